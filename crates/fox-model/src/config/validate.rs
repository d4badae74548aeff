//! The rules a configuration must obey before anything is built or allocated from it.

use super::{
    DecayTime, DeltaConfig, ForgetGate, ForgettingConfig, Hgrn2Config, LowerBounds, Mamba2Config,
    MixerConfig, ModelConfig,
};
use crate::{Error, Result};
use fox_tensor::Activation;

/// Far above every real model, and low enough that no product of sizes overflows and that a hostile
/// file cannot make the list of tensors itself a burden.
const MAX_LAYERS: usize = 10_000;
const MAX_WIDTH: usize = 1 << 20;
const MAX_MLP_WIDTH: usize = 1 << 24;
const MAX_VOCAB: usize = 1 << 28;
const MAX_LENGTH: usize = 1 << 40;

impl ModelConfig {
    /// Checks every value; `origin` is the file for the message.
    pub fn validate(&self, origin: &str) -> Result<()> {
        let rules = Rules { origin };
        rules.range("vocab_size", self.vocab_size, 1, MAX_VOCAB)?;
        rules.range("hidden_size", self.hidden_size, 1, MAX_WIDTH)?;
        rules.range("num_hidden_layers", self.num_layers, 1, MAX_LAYERS)?;
        if self.has_mlp() {
            rules.positive("hidden_ratio", self.mlp.hidden_ratio, 1000.0)?;
            let width_field = match self.mlp.intermediate_size {
                Some(_) => "intermediate_size",
                None => "hidden_ratio",
            };
            rules.range(width_field, self.mlp_width(), 1, MAX_MLP_WIDTH)?;
        }
        rules.positive("norm_eps", self.norm_eps, 1.0)?;
        if self.initializer_range != 0.0 {
            rules.positive("initializer_range", self.initializer_range, 100.0)?;
        }
        rules.range("max_position_embeddings", self.max_position_embeddings, 1, MAX_LENGTH)?;
        for (field, id) in [
            ("bos_token_id", self.tokens.bos),
            ("eos_token_id", self.tokens.eos),
            ("pad_token_id", self.tokens.pad),
        ] {
            if let Some(id) = id {
                rules.require(id < self.vocab_size, field, || {
                    format!("is {id}, but the vocabulary has {} entries", self.vocab_size)
                })?;
            }
        }
        match &self.mixer {
            MixerConfig::Forgetting(mixer) => rules.forgetting(mixer, self.hidden_size),
            MixerConfig::Delta(mixer) => rules.delta(mixer),
            MixerConfig::Hgrn2(mixer) => rules.hgrn2(mixer, self.hidden_size),
            MixerConfig::Mamba2(mixer) => rules.mamba2(mixer),
        }
    }
}

/// Widest head of a recurrent layer, and most taps of a convolution: a state is a square of it.
const MAX_HEAD: usize = 1 << 12;
const MAX_TAPS: usize = 64;

struct Rules<'a> {
    origin: &'a str,
}

impl Rules<'_> {
    fn forgetting(&self, mixer: &ForgettingConfig, hidden_size: usize) -> Result<()> {
        let heads = mixer.heads;
        self.range("num_heads", heads, 1, hidden_size)?;
        self.require(hidden_size.is_multiple_of(heads), "num_heads", || {
            format!("is {heads}, which does not divide `hidden_size` {hidden_size}")
        })?;
        let head_dim = hidden_size / heads;
        self.require(head_dim.is_multiple_of(8) && head_dim <= 256, "num_heads", || {
            format!("gives heads of width {head_dim}; the width must be a multiple of 8 up to 256")
        })?;
        self.range("num_kv_heads", mixer.kv_heads, 1, heads)?;
        self.require(heads.is_multiple_of(mixer.kv_heads), "num_kv_heads", || {
            format!("is {}, which does not divide `num_heads` {heads}", mixer.kv_heads)
        })?;
        if let Some(window) = mixer.window {
            self.range("window_size", window, 1, MAX_LENGTH)?;
        }
        if let Some(base) = mixer.rope_base {
            self.positive("rope_base", base, 1e30)?;
        }
        if let Some(tolerance) = mixer.log_pruning_tolerance {
            self.require(
                tolerance.is_finite() && tolerance < 0.0,
                "log_pruning_tolerance",
                || {
                    format!(
                        "is {tolerance}; it is the logarithm of a probability, so it is negative"
                    )
                },
            )?;
        }
        self.require(
            !(mixer.output_norm && mixer.output_gate == Some(Activation::Silu)),
            "ogate_act",
            || "must be \"sigmoid\" when `use_output_norm` is true".to_string(),
        )?;
        match mixer.gate {
            ForgetGate::BiasOnly { decay_time: Some(time) }
            | ForgetGate::Fixed { decay_time: Some(time) } => self.decay_time(time),
            _ => Ok(()),
        }
    }

    fn delta(&self, mixer: &DeltaConfig) -> Result<()> {
        self.range("num_heads", mixer.heads, 1, MAX_WIDTH)?;
        self.range("num_v_heads", mixer.value_heads, mixer.heads, MAX_WIDTH)?;
        self.require(mixer.value_heads.is_multiple_of(mixer.heads), "num_v_heads", || {
            format!("is {}, no multiple of `num_heads` {}", mixer.value_heads, mixer.heads)
        })?;
        self.range("head_dim", mixer.key_dim, 1, MAX_HEAD)?;
        self.range("expand_v", mixer.value_dim, 1, MAX_HEAD)?;
        self.range("conv_size", mixer.conv_size, 1, MAX_TAPS)
    }

    fn hgrn2(&self, mixer: &Hgrn2Config, hidden_size: usize) -> Result<()> {
        self.range("num_heads", mixer.heads, 1, hidden_size)?;
        self.range("expand_ratio", mixer.expand_ratio, 1, MAX_HEAD)?;
        self.require(hidden_size.is_multiple_of(mixer.heads), "num_heads", || {
            format!("is {}, which does not divide `hidden_size` {hidden_size}", mixer.heads)
        })?;
        let wide = mixer.heads * mixer.expand_ratio;
        self.require(
            mixer.lower_bounds == LowerBounds::None || wide == hidden_size,
            "use_lower_bound",
            || format!("needs gates as wide as `hidden_size` {hidden_size}, not {wide}"),
        )?;
        self.positive("norm_eps", mixer.output_norm_eps, 1.0)
    }

    fn mamba2(&self, mixer: &Mamba2Config) -> Result<()> {
        self.range("num_heads", mixer.heads, 1, MAX_WIDTH)?;
        self.range("head_dim", mixer.head_dim, 1, MAX_HEAD)?;
        self.range("state_size", mixer.state_size, 1, MAX_HEAD)?;
        self.range("n_groups", mixer.groups, 1, mixer.heads)?;
        self.require(mixer.heads.is_multiple_of(mixer.groups), "n_groups", || {
            format!("is {}, which does not divide {} heads", mixer.groups, mixer.heads)
        })?;
        self.range("conv_kernel", mixer.conv_size, 1, MAX_TAPS)?;
        let (low, high) = mixer.time_step_limit;
        self.require(low >= 0.0 && low <= high, "time_step_limit", || {
            format!("is {low} to {high}; it must be a range of numbers from 0 on")
        })?;
        let (min, max, floor) = mixer.time_step_init;
        self.positive("time_step_min", min, 1e3)?;
        self.positive("time_step_max", max, 1e3)?;
        self.positive("time_step_floor", floor, 1e3)
    }

    fn decay_time(&self, time: DecayTime) -> Result<()> {
        self.positive("decay_time_min", time.min, 1e30)?;
        self.positive("decay_time_max", time.max, 1e30)?;
        self.require(time.min <= time.max, "decay_time_min", || {
            format!("is {}, above `decay_time_max` {}", time.min, time.max)
        })
    }

    fn range(&self, field: &str, value: usize, min: usize, max: usize) -> Result<()> {
        self.require((min..=max).contains(&value), field, || {
            format!("is {value}; it must be between {min} and {max}")
        })
    }

    fn positive(&self, field: &str, value: f64, max: f64) -> Result<()> {
        self.require(value > 0.0 && value <= max, field, || {
            format!("is {value}; it must be above 0 and at most {max}")
        })
    }

    fn require(&self, holds: bool, field: &str, detail: impl FnOnce() -> String) -> Result<()> {
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
