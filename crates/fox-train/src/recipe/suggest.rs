//! Suggestions for keys that are written without their section, or as other software calls them.

use toml::{Table, Value};

use super::load;
use crate::Error;

/// What other software calls keys of a recipe.
const OTHER_NAMES: &[(&str, &str)] = &[
    ("lr", "optimizer.peak_lr"),
    ("learning_rate", "optimizer.peak_lr"),
    ("max_lr", "optimizer.peak_lr"),
    ("wd", "optimizer.weight_decay"),
    ("batch_size", "training.batch"),
    ("micro_batch_size", "training.micro_batch"),
    ("epoch", "data.epochs"),
    ("epochs", "data.epochs"),
    ("num_train_epochs", "data.epochs"),
    ("max_tokens", "training.tokens"),
    ("steps", "training.tokens"),
    ("max_steps", "training.tokens"),
    ("warmup", "schedule.warmup_tokens"),
    ("warmup_steps", "schedule.warmup_tokens"),
    ("dropout", "training.dropout"),
    ("resid_pdrop", "training.dropout"),
    ("embd_pdrop", "training.dropout"),
    ("seq_len", "data.sequence_length"),
    ("context_length", "data.sequence_length"),
    ("block_size", "data.sequence_length"),
    ("num_layers", "model.num_hidden_layers"),
    ("layers", "model.num_hidden_layers"),
    ("heads", "model.num_heads"),
];

/// Adds the key of another section that was meant to an error about an unknown key.
pub(super) fn with_suggestion(error: Error) -> Error {
    match error {
        Error::UnknownKey { origin, key, nearest } => {
            let last = key.rsplit('.').next().unwrap_or_default();
            let nearest = meant(last).filter(|full| *full != key).or(nearest);
            Error::UnknownKey { origin, key, nearest }
        }
        other => other,
    }
}

/// The full key whose last part is `name`, or that other software calls so.
fn meant(name: &str) -> Option<String> {
    let same = OTHER_NAMES.iter().find(|(other, _)| *other == name).map(|row| row.1.to_string());
    same.or_else(|| {
        let known: Table = load("tiny-fox-pro", &[]).ok()?.to_toml().ok()?.parse().ok()?;
        known.iter().find_map(|(section, keys)| match keys {
            Value::Table(keys) => keys.contains_key(name).then(|| format!("{section}.{name}")),
            _ => None,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_without_section_are_found() {
        let said = |set: &str| load("tiny-fox-pro", &[set.to_string()]).unwrap_err().to_string();
        for (set, full) in [
            ("lr=1", "optimizer.peak_lr"),
            ("training.lr=1", "optimizer.peak_lr"),
            ("tokens=1000", "training.tokens"),
            ("data.batch=2", "training.batch"),
            ("epochs=2", "data.epochs"),
        ] {
            assert!(said(set).contains(&format!("did you mean `{full}`?")), "{}", said(set));
        }
        assert!(said("training.tokenz=1").contains("did you mean `training.tokens`?"));
    }

    #[test]
    fn suggested_keys_exist() {
        for (_, full) in OTHER_NAMES {
            let fails = load("tiny-fox-pro", &[format!("{full}=1")]).err();
            assert!(!matches!(fails, Some(Error::UnknownKey { .. })), "{full}");
        }
    }
}
