//! Options of Kimi Delta Attention: validation, sizes, arithmetic.

use super::layer::KdaLayer;
use crate::Result;
use crate::config::{ModelConfig, Validator};
use crate::mixers::{
    LayerParams, Mixer, MixerConfig, RecurrentStateSpec, ScanShape, StateSpec, enabled,
};

/// Kimi Delta Attention.
#[derive(Clone, Debug, PartialEq)]
pub struct KdaConfig {
    /// Heads of queries and keys.
    pub heads: usize,
    /// Heads of values, each with a state; head `h` reads keys `h / (value_heads / heads)`.
    pub value_heads: usize,
    /// Width of a query and of a key `dk`.
    pub key_dim: usize,
    /// Width of a value `dv`.
    pub value_dim: usize,
    /// Taps of the short convolutions; `None` without convolutions.
    pub conv_size: Option<usize>,
    /// Whether writes reach twice as far, so that a state may be turned around.
    pub negative_eigenvalues: bool,
    /// The strongest log decay of a token; unbounded when absent.
    pub decay_bound: Option<f64>,
    /// Whether flash-linear-attention computes it with kernels for bounded decays; initializes `A_log` to 0.
    pub safe_gate: bool,
}

impl KdaConfig {
    /// Square states, as published.
    pub fn square(heads: usize, head_dim: usize) -> Self {
        KdaConfig {
            heads,
            value_heads: heads,
            key_dim: head_dim,
            value_dim: head_dim,
            conv_size: Some(4),
            negative_eigenvalues: false,
            decay_bound: None,
            safe_gate: false,
        }
    }

    /// Sizes of the recurrence.
    pub(super) fn scan(&self) -> ScanShape {
        ScanShape {
            heads: self.value_heads,
            key_heads: self.heads,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
            delta: true,
        }
    }

    /// Sizes of the decode state of a layer.
    pub(super) fn shape(&self) -> RecurrentStateSpec {
        self.scan().delta_state(self.conv_size)
    }
}

impl MixerConfig for KdaConfig {
    fn name(&self) -> &'static str {
        "KDA"
    }

    fn heads(&self, _: &ModelConfig) -> (usize, usize) {
        (self.value_heads, self.key_dim)
    }

    fn key_heads(&self, _: &ModelConfig) -> usize {
        self.heads
    }

    fn options(&self, _: &ModelConfig) -> Vec<String> {
        let mut words = vec![
            "delta rule with a decay per channel".to_string(),
            format!("states of {} x {} per head", self.key_dim, self.value_dim),
            "output gate (sigmoid)".to_string(),
        ];
        words.extend(self.conv_size.map(|taps| format!("convolutions of {taps} taps")));
        words.extend(self.decay_bound.map(|bound| format!("log decays above {bound}")));
        let more = enabled(&[(self.negative_eigenvalues, "negative eigenvalues")]);
        words.extend(more.into_iter().map(String::from));
        words
    }

    fn validate(&self, _: &ModelConfig, validator: &Validator<'_>) -> Result<()> {
        self.scan().validate_delta(validator)?;
        if let Some(bound) = self.decay_bound {
            validator.require(bound < 0.0 && (bound as f32).is_finite(), "lower_bound", || {
                format!("is {bound}; log decays are negative, set it below 0 or to null")
            })?;
        }
        validator.require(!self.safe_gate || self.decay_bound.is_some(), "safe_gate", || {
            "needs `lower_bound`, e.g. -5.0".into()
        })?;
        self.conv_size
            .map_or(Ok(()), |taps| validator.range("conv_size", taps, 1, Validator::MAX_TAPS))
    }

    fn declare(&self, model: &ModelConfig, layer: &mut LayerParams<'_>) -> Box<dyn Mixer> {
        Box::new(KdaLayer::declare(model, self, layer))
    }

    fn state(&self, _: &ModelConfig) -> StateSpec {
        StateSpec::Recurrent(self.shape())
    }

    fn continues_sequences(&self) -> bool {
        true
    }

    fn train_flops(&self, _: &ModelConfig, seq: usize) -> f64 {
        // Scores are per value head, because their decays are.
        ScanShape { key_heads: self.value_heads, ..self.scan() }.train_flops(seq)
    }
}
