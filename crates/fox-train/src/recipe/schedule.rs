//! The section `[schedule]`: the learning rate over time.

use serde::{Deserialize, Serialize};

use super::Recipe;
use super::load::shorter_warmup;
use crate::schedule::{Decay, Schedule};
use crate::{Error, Result};

/// A schedule by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Shape {
    /// Warm-up, then decay over all the rest, or over the last `decay_tokens`.
    #[default]
    Decay,
    /// Warm-up, stable, decay: the peak is held until the last `decay_fraction` of the run. A run can be made
    /// longer from any checkpoint of its stable part (Hägele et al. 2024).
    Wsd,
}

/// The learning rate over time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "Keys")]
pub struct ScheduleRecipe {
    /// Which one.
    pub shape: Shape,
    /// How it falls: cosine by default, 1-sqrt for `wsd`.
    pub decay: Decay,
    /// Tokens of linear warm-up.
    pub warmup_tokens: u64,
    /// Tokens of decay at the end; everything after the warm-up without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_tokens: Option<u64>,
    /// The part of the whole run, warm-up included, in which `wsd` decays; a fifth by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_fraction: Option<f64>,
    /// Learning rate at the end, relative to the peak.
    pub final_fraction: f64,
}

/// The section as written: defaults depend on the shape.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Keys {
    shape: Shape,
    decay: Option<Decay>,
    warmup_tokens: u64,
    decay_tokens: Option<u64>,
    decay_fraction: Option<f64>,
    final_fraction: f64,
}

impl From<Keys> for ScheduleRecipe {
    fn from(keys: Keys) -> Self {
        let (decay, fraction) = match keys.shape {
            Shape::Decay => (Decay::Cosine, None),
            Shape::Wsd => (Decay::OneMinusSqrt, Some(0.2)),
        };
        ScheduleRecipe {
            shape: keys.shape,
            decay: keys.decay.unwrap_or(decay),
            warmup_tokens: keys.warmup_tokens,
            decay_tokens: keys.decay_tokens,
            decay_fraction: keys.decay_fraction.or(fraction),
            final_fraction: keys.final_fraction,
        }
    }
}

impl Default for ScheduleRecipe {
    fn default() -> Self {
        Keys::default().into()
    }
}

impl ScheduleRecipe {
    /// Tokens of decay in a run of `tokens`; `None` for everything after the warm-up.
    fn decay_in(&self, tokens: u64) -> Option<u64> {
        let part = self.decay_fraction.map(|part| (part * tokens as f64).round() as u64);
        part.or(self.decay_tokens)
    }

    /// Keys that do not go together, for the recipe `origin`.
    pub(super) fn validate(&self, origin: &str) -> Result<()> {
        let bad = |key: &str, detail: &str| Err(Error::value(origin, key, detail));
        let unit = 0.0..=1.0;
        if !unit.contains(&self.final_fraction) {
            return bad("schedule.final_fraction", "must be between 0 and 1");
        }
        match (self.shape, self.decay_fraction, self.decay_tokens) {
            (Shape::Decay, Some(_), _) => bad(
                "schedule.decay_fraction",
                "is a key of the shape \"wsd\"; set schedule.shape=\"wsd\" or use schedule.decay_tokens",
            ),
            (Shape::Wsd, _, Some(_)) => bad(
                "schedule.decay_tokens",
                "has no place in the shape \"wsd\", whose decay is schedule.decay_fraction of the run; leave it out",
            ),
            (Shape::Wsd, Some(part), _) if !unit.contains(&part) => {
                bad("schedule.decay_fraction", "must be between 0 and 1")
            }
            (Shape::Wsd, ..) if !matches!(self.decay, Decay::Linear | Decay::OneMinusSqrt) => {
                bad("schedule.decay", "must be linear or 1-sqrt in the shape \"wsd\"")
            }
            _ => Ok(()),
        }
    }
}

impl Recipe {
    /// Sets the tokens of the run; a shorter run has a shorter warm-up, in proportion.
    pub fn set_tokens(&mut self, tokens: u64) {
        let warmup = shorter_warmup(self.schedule.warmup_tokens, self.training.tokens, tokens);
        (self.schedule.warmup_tokens, self.training.tokens) = (warmup, tokens);
    }

    /// The learning rate.
    pub fn schedule(&self) -> Schedule {
        Schedule {
            peak: self.optimizer.peak_lr,
            warmup: self.schedule.warmup_tokens,
            total: self.training.tokens,
            decay_tokens: self.schedule.decay_in(self.training.tokens),
            decay: self.schedule.decay,
            final_fraction: self.schedule.final_fraction,
        }
    }

    /// An error when the run is too short for its schedule.
    pub(crate) fn check_length(&self) -> Result<()> {
        let (warmup, tokens) = (self.schedule.warmup_tokens, self.training.tokens);
        let bad = |detail: String| Err(Error::value(&self.name, "schedule.warmup_tokens", detail));
        if warmup > tokens {
            return bad(format!(
                "is {warmup}, but the run ends after {tokens} tokens (training.tokens), before its learning rate is reached; lower one or raise the other"
            ));
        }
        let decay = match self.schedule.shape {
            Shape::Decay => 0,
            Shape::Wsd => self.schedule.decay_in(tokens).unwrap_or(0),
        };
        if decay > tokens - warmup {
            return bad(format!(
                "is {warmup}, which with {decay} tokens of decay (schedule.decay_fraction) is more than the {tokens} of the run (training.tokens); lower one of them"
            ));
        }
        Ok(())
    }
}
