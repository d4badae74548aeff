//! Validation of a configuration, before anything is built or allocated from it.

use super::{ModelConfig, SpecialTokens};
use crate::{Error, Result};

/// Far above every real model, and low enough that no product of sizes overflows and that a hostile
/// file cannot make the list of tensors itself a burden.
const MAX_LAYERS: usize = 10_000;
const MAX_VOCAB: usize = 1 << 28;

impl ModelConfig {
    /// Checks every value; `origin` is the file for the message.
    pub fn validate(&self, origin: &str) -> Result<()> {
        let validator = Validator { origin };
        validator.range("vocab_size", self.vocab_size, 1, MAX_VOCAB)?;
        validator.range("hidden_size", self.hidden_size, 1, Validator::MAX_WIDTH)?;
        validator.range("num_hidden_layers", self.num_layers, 1, MAX_LAYERS)?;
        if self.has_mlp() {
            validator.positive("hidden_ratio", self.mlp.hidden_ratio, 1000.0)?;
            let width_field = match self.mlp.intermediate_size {
                Some(_) => "intermediate_size",
                None => "hidden_ratio",
            };
            validator.range(width_field, self.mlp_width(), 1, Validator::MAX_MLP_WIDTH)?;
        }
        validator.positive("norm_eps", self.norm_eps, 1.0)?;
        if self.initializer_range != 0.0 {
            validator.positive("initializer_range", self.initializer_range, 100.0)?;
        }
        validator.range(
            "max_position_embeddings",
            self.max_position_embeddings,
            1,
            Validator::MAX_LENGTH,
        )?;
        let SpecialTokens { bos, eos, pad, mask } = &self.tokens;
        let marked = [("bos_token_id", bos), ("pad_token_id", pad), ("mask_token_id", mask)];
        let marked = marked.into_iter().filter_map(|(field, id)| Some((field, (*id)?)));
        for (field, id) in eos.iter().map(|id| ("eos_token_id", *id)).chain(marked) {
            validator.require(id < self.vocab_size, field, || {
                format!("is {id}, but the vocabulary has {} entries", self.vocab_size)
            })?;
        }
        self.mixer.validate(self, &validator)
    }
}

/// Checks of values, with errors that name the field and the file.
#[derive(Clone, Copy, Debug)]
pub struct Validator<'a> {
    origin: &'a str,
}

impl Validator<'_> {
    /// Far above every real width.
    pub const MAX_WIDTH: usize = 1 << 20;
    /// Far above every real MLP.
    pub const MAX_MLP_WIDTH: usize = 1 << 24;
    /// Longest sequence.
    pub const MAX_LENGTH: usize = 1 << 40;
    /// Widest head of a recurrent layer: a state is a square of it.
    pub const MAX_HEAD: usize = 1 << 12;
    /// Most taps of a convolution.
    pub const MAX_TAPS: usize = 64;

    /// Requires `min <= value <= max`.
    pub fn range(&self, field: &str, value: usize, min: usize, max: usize) -> Result<()> {
        self.require((min..=max).contains(&value), field, || {
            format!("is {value}; it must be between {min} and {max}")
        })
    }

    /// Requires a positive divisor of another field, e.g. heads of `hidden_size`.
    pub fn divisor(&self, field: &str, value: usize, (name, of): (&str, usize)) -> Result<()> {
        self.range(field, value, 1, of)?;
        self.require(of.is_multiple_of(value), field, || {
            format!("is {value}, which does not divide `{name}` {of}")
        })
    }

    /// Requires `0 < value <= max`.
    pub fn positive(&self, field: &str, value: f64, max: f64) -> Result<()> {
        self.require(value > 0.0 && value <= max, field, || {
            format!("is {value}; it must be above 0 and at most {max}")
        })
    }

    /// Requires a condition; `detail` describes a violation, e.g. `is 3, which is odd`.
    pub fn require(&self, holds: bool, field: &str, detail: impl FnOnce() -> String) -> Result<()> {
        if holds {
            return Ok(());
        }
        Err(Error::Config {
            origin: self.origin.to_string(),
            field: field.to_string(),
            detail: detail(),
        })
    }
}
