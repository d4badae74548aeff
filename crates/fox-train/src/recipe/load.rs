//! From a name or a file to a recipe: extension, variants, overrides, then checks.
//!
//! ```text
//! NAME or FILE.toml, followed by any number of +VARIANT
//!   extends = "other"      the other is read first; this file's keys replace its keys, table by table
//!   +variant               keys of recipes/variants.toml on top
//!   key=value              single keys on top, e.g. training.tokens=1e6
//! ```

use std::fs;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use toml::{Table, Value};

use super::builtin::{self, Source, builtin_names, variants};
use super::suggest::with_suggestion;
use super::{Recipe, gate_init, nearest, typed};
use crate::{Error, OptimizerRecipe, Result, tuning};

/// How deep recipes may extend each other.
const MAX_DEPTH: usize = 16;

#[rustfmt::skip]
const SECTIONS: [&str; 9] = [
    "model", "data", "training", "optimizer", "schedule", "evaluation", "checkpoints", "metrics",
    "parallel",
];

/// Reads a recipe by name or file, with variants and `key=value` overrides.
pub fn load(spec: &str, overrides: &[String]) -> Result<Recipe> {
    let mut table = load_table(spec)?;
    apply_overrides(&mut table, overrides)?;
    parse_table(spec, table).map_err(with_suggestion)
}

/// [`load`], but the model is that of a checkpoint, and its weights are what the run begins with. Overrides may still
/// change options of the model that leave its parameters as they are.
pub fn load_from(spec: &str, init: &Path, overrides: &[String]) -> Result<Recipe> {
    let mut table = load_table(spec)?;
    table.insert("model".into(), Value::Table(tuning::model_table(init)?));
    let path = std::path::absolute(init).map_err(Error::io("find", init))?;
    let path = Value::String(path.to_string_lossy().into_owned());
    let training = Table::from_iter([("init".to_string(), path)]);
    merge(&mut table, Table::from_iter([("training".to_string(), Value::Table(training))]));
    apply_overrides(&mut table, overrides)?;
    parse_table(spec, table).map_err(with_suggestion)
}

/// Reads a recipe as a table, with everything it extends and its variants, but unchecked.
pub fn load_table(spec: &str) -> Result<Table> {
    let mut parts = spec.split('+');
    let base = parts.next().unwrap_or_default();
    // A file may have a plus sign in its name.
    if Path::new(spec).is_file() {
        return read(spec, None, spec, 0);
    }
    let mut table = read(base, None, spec, 0)?;
    for name in parts {
        let known = variants()?;
        let Some(variant) = known.iter().find(|variant| variant.name == name) else {
            return Err(Error::UnknownVariant {
                name: name.to_string(),
                nearest: nearest(name, known.iter().map(|v| v.name.as_str())),
            });
        };
        if let (Some(keeps), Some(Value::Table(model))) = (&variant.keeps, table.get_mut("model")) {
            model.retain(|key, _| keeps.iter().any(|kept| kept == key));
        }
        merge(&mut table, variant.changes.clone());
    }
    Ok(table)
}

/// Merges the layer `top` over `base`: tables are merged, everything else is replaced.
pub fn merge(base: &mut Table, top: Table) {
    gate_init::reset_below(base, &top);
    merge_tables(base, top);
}

fn merge_tables(base: &mut Table, top: Table) {
    for (key, value) in top {
        match (base.get_mut(&key), value) {
            (Some(Value::Table(below)), Value::Table(above)) => merge_tables(below, above),
            (_, value) => {
                base.insert(key, value);
            }
        }
    }
}

/// Applies `section.key=value` overrides, all as one layer.
pub fn apply_overrides(table: &mut Table, overrides: &[String]) -> Result<()> {
    let mut layer = Table::new();
    overrides.iter().try_for_each(|text| apply_override(&mut layer, text))?;
    gate_init::reset_below(table, &layer);
    let before = count(table, "training", "tokens");
    overrides.iter().try_for_each(|text| apply_override(table, text))?;
    if let (Some(before), Some(now)) = (before, count(&layer, "training", "tokens"))
        && count(&layer, "schedule", "warmup_tokens").is_none()
        && let Some(warmup) = count(table, "schedule", "warmup_tokens")
        && let Some(Value::Table(schedule)) = table.get_mut("schedule")
    {
        let warmup = shorter_warmup(warmup, before, now);
        schedule.insert("warmup_tokens".into(), Value::Integer(warmup as i64));
    }
    Ok(())
}

/// A number of tokens in a table; `None` where it is missing or no number of tokens.
fn count(table: &Table, section: &str, key: &str) -> Option<u64> {
    u64::try_from(table.get(section)?.get(key)?.as_integer()?).ok()
}

/// The warm-up of a run of `now` tokens whose recipe has `before`: shorter in proportion, but never longer.
pub(super) fn shorter_warmup(warmup: u64, before: u64, now: u64) -> u64 {
    match now < before {
        true => (warmup as f64 * (now as f64 / before as f64)) as u64,
        false => warmup,
    }
}

/// Applies `section.key=value`. The value is TOML; what is not, is taken as text.
pub(crate) fn apply_override(table: &mut Table, text: &str) -> Result<()> {
    let bad = || Error::BadOverride { text: text.to_string() };
    let (key, value) = text.split_once('=').ok_or_else(bad)?;
    let value = parse_value(value.trim());
    let mut path: Vec<&str> = key.trim().split('.').collect();
    let last = path.pop().filter(|last| !last.is_empty()).ok_or_else(bad)?;
    let mut table = table;
    for part in path {
        let entry = table.entry(part).or_insert_with(|| Value::Table(Table::new()));
        table = entry.as_table_mut().ok_or_else(bad)?;
    }
    table.insert(last.to_string(), value);
    Ok(())
}

/// A TOML value; `1e6` and `2.5e6` are whole numbers, because token counts are written like that.
fn parse_value(text: &str) -> Value {
    let parsed = format!("x = {text}").parse::<Table>().ok().and_then(|mut t| t.remove("x"));
    match parsed {
        Some(value) if text.contains('.') && !text.contains(['e', 'E']) => value,
        Some(value) => whole(value),
        None => Value::String(text.to_string()),
    }
}

/// A value in which whole numbers are integers, in lists and tables too.
fn whole(value: Value) -> Value {
    match value {
        Value::Float(x) if x.fract() == 0.0 && x.abs() < 9e15 => Value::Integer(x as i64),
        Value::Array(list) => Value::Array(list.into_iter().map(whole).collect()),
        Value::Table(map) => Value::Table(map.into_iter().map(|(k, v)| (k, whole(v))).collect()),
        other => other,
    }
}

/// A table with everything that it extends below it.
fn read(name: &str, beside: Option<&Path>, origin: &str, depth: usize) -> Result<Table> {
    if depth > MAX_DEPTH {
        return Err(Error::ExtendsItself { origin: origin.to_string(), name: name.to_string() });
    }
    let beside = beside.map(|folder| folder.join(name)).filter(|path| path.is_file());
    let path = beside.unwrap_or_else(|| PathBuf::from(name));
    let (text, folder) = match (path.is_file(), builtin::find(name)?) {
        (false, Some(Source::File(text))) => (text.to_string(), None),
        (false, Some(Source::Layers(parent, layers))) => {
            let mut base = read(&parent, None, origin, depth + 1)?;
            layers.into_iter().for_each(|layer| merge(&mut base, layer));
            return Ok(base);
        }
        (false, None) if !name.ends_with(".toml") => {
            let known = builtin_names()?;
            let nearest = nearest(name, known.iter().map(String::as_str));
            return Err(Error::UnknownRecipe { name: name.to_string(), nearest });
        }
        _ => (fs::read_to_string(&path).map_err(Error::io("read", &path))?, path.parent()),
    };
    let mut table: Table = text.parse().map_err(|e: toml::de::Error| Error::Toml {
        file: path.clone(),
        detail: one_line(&e.to_string()),
    })?;
    let Some(parent) = table.remove("extends") else { return Ok(table) };
    let Value::String(parent) = parent else {
        return Err(Error::value(name, "extends", "must be the name or the path of a recipe"));
    };
    let mut base = read(&parent, folder, origin, depth + 1)?;
    merge(&mut base, table);
    Ok(base)
}

/// Checks a merged table and turns it into a recipe.
pub fn parse_table(name: &str, mut table: Table) -> Result<Recipe> {
    let description = match table.remove("description") {
        None => String::new(),
        Some(Value::String(text)) => text,
        Some(_) => return Err(Error::value(name, "description", "must be text")),
    };
    if let Some(unknown) = table.keys().find(|key| !SECTIONS.contains(&key.as_str())) {
        let known = SECTIONS.into_iter().chain(["description", "extends"]);
        return Err(Error::UnknownKey {
            origin: name.to_string(),
            key: unknown.clone(),
            nearest: nearest(unknown, known),
        });
    }
    let init =
        table.get("training").and_then(|section| section.get("init")).and_then(Value::as_str);
    let of_checkpoint = match (table.contains_key("model"), init) {
        (false, Some(path)) => Some(Value::Table(tuning::model_table(Path::new(path))?)),
        _ => None,
    };
    let Some(Value::Table(model)) = table.remove("model").or(of_checkpoint) else {
        let detail = "is missing; give the model's sizes in a table or extend another recipe";
        return Err(Error::value(name, "model", detail));
    };
    let notice = gate_init::read_former(name, &mut table)?;
    let optimizer = section(name, &mut table, "optimizer")?;
    let recipe = Recipe {
        name: name.to_string(),
        notices: notice.into_iter().collect(),
        description,
        model,
        data: section(name, &mut table, "data")?,
        training: section(name, &mut table, "training")?,
        optimizer: OptimizerRecipe::read(name, optimizer)?,
        schedule: section(name, &mut table, "schedule")?,
        evaluation: section(name, &mut table, "evaluation")?,
        checkpoints: section(name, &mut table, "checkpoints")?,
        metrics: section(name, &mut table, "metrics")?,
        parallel: section(name, &mut table, "parallel")?,
    };
    recipe.validate()?;
    Ok(recipe)
}

/// One section; a missing one has its defaults.
fn section<T: DeserializeOwned>(origin: &str, table: &mut Table, name: &str) -> Result<T> {
    let value = table.remove(name).unwrap_or_else(|| Value::Table(Table::new()));
    typed(origin, name, value)
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
