//! `training.gate_init`: where data-dependent forget gates start.

use fox_model::DecayTime;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::{Error, Result};

/// The former name of the key, which holds only `[shortest, longest]`.
const FORMER: &str = "gate_memory";
const KEY: &str = "gate_init";

/// Initial biases `[heads]` of the data-dependent forget gates of every layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub enum GateInit {
    /// Biases of 0: every gate is 1/2, as published. A checkpoint named by `training.init` keeps its biases.
    #[default]
    Published,
    /// Decay times log-spaced over the heads from 1 token to the training length.
    Spread,
    /// Decay times log-spaced over the heads from the first to the second, in tokens.
    DecayTimes([f64; 2]),
}

impl GateInit {
    /// The decay times for training sequences of this length; `None` where the biases stay as they are.
    pub fn decay_time(self, sequence_length: usize) -> Option<DecayTime> {
        match self {
            GateInit::Published => None,
            GateInit::Spread => Some(DecayTime { min: 1.0, max: sequence_length.max(1) as f64 }),
            GateInit::DecayTimes([min, max]) => Some(DecayTime { min, max }),
        }
    }

    /// Whether the decay times are positive and ascending.
    pub(super) fn is_valid(self) -> bool {
        match self {
            GateInit::DecayTimes([min, max]) => 0.0 < min && min <= max && max <= 1e30,
            _ => true,
        }
    }
}

/// The value as it stands in TOML.
#[derive(Clone, Serialize, Deserialize)]
#[serde(untagged)]
enum Written {
    Name(String),
    Times(Vec<f64>),
    Other(Value),
}

impl TryFrom<Written> for GateInit {
    type Error = String;

    fn try_from(written: Written) -> std::result::Result<Self, String> {
        match written {
            Written::Name(name) if name == "published" => Ok(GateInit::Published),
            Written::Name(name) if name == "spread" => Ok(GateInit::Spread),
            Written::Times(times) if times.len() == 2 => {
                Ok(GateInit::DecayTimes([times[0], times[1]]))
            }
            _ => Err("set it to \"published\", \"spread\" or [shortest, longest] in tokens".into()),
        }
    }
}

impl From<GateInit> for Written {
    fn from(init: GateInit) -> Self {
        match init {
            GateInit::Published => Written::Name("published".into()),
            GateInit::Spread => Written::Name("spread".into()),
            GateInit::DecayTimes(times) => Written::Times(times.to_vec()),
        }
    }
}

/// Whether a layer of a recipe (a file, a variant, overrides) replaces the gates or their weights, so that the
/// `gate_init` of the layers below does not apply.
fn replaces_gates(layer: &Table) -> bool {
    let text = |section: &str, key: &str| layer.get(section)?.get(key)?.as_str();
    let path = layer.get("model").and_then(|model| model.get("use_forget_gate")?.as_bool());
    let gated = |name: &str| match name {
        "forgetting_transformer-project_fox" | "fox" | "fox_hybrid" | "fox_encoder" => true,
        "path_attn" => path == Some(true),
        _ => false,
    };
    text("model", "fgate_type").is_some_and(|kind| !["full", "shared"].contains(&kind))
        || text("model", "model_type").is_some_and(|name| !gated(name))
        || text("training", "init").is_some()
}

/// Removes the `gate_init` below a layer that [`replaces_gates`].
pub(super) fn reset_below(base: &mut Table, layer: &Table) {
    if replaces_gates(layer)
        && let Some(Value::Table(training)) = base.get_mut("training")
    {
        training.remove(KEY);
        training.remove(FORMER);
    }
}

/// Renames the former key in a merged recipe; returns a notice where it was used.
pub(super) fn read_former(origin: &str, table: &mut Table) -> Result<Option<String>> {
    let Some(Value::Table(training)) = table.get_mut("training") else { return Ok(None) };
    let Some(value) = training.remove(FORMER) else { return Ok(None) };
    // The recipe below may have its own gate_init, so that only a range written beside the former key conflicts.
    if training.get(KEY).is_some_and(Value::is_array) {
        let detail = "is the former name of training.gate_init, which is set too; remove it";
        return Err(Error::value(origin, "training.gate_memory", detail));
    }
    training.insert(KEY.into(), value);
    Ok(Some(format!("{origin}: training.gate_memory is now called training.gate_init")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_reaches_training_length() {
        let times = GateInit::Spread.decay_time(4096).unwrap();
        assert_eq!((times.min, times.max), (1.0, 4096.0));
        // b = logit(exp(-1 / T)), T = 1, 16, 256, 4096.
        let logit = |t: f64| -((1.0 / t).exp() - 1.0).ln();
        for (got, t) in times.gate_biases(4).into_iter().zip([1.0, 16.0, 256.0, 4096.0]) {
            assert!((f64::from(got) - logit(t)).abs() < 1e-5, "{got} {t}");
        }
        assert_eq!(GateInit::Published.decay_time(4096), None);
    }
}
