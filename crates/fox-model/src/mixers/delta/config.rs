//! Options of the delta rule: validation, sizes, arithmetic.

use super::layer::DeltaLayer;
use crate::Result;
use crate::config::{ModelConfig, Validator};
use crate::mixers::{
    LayerParams, Mixer, MixerConfig, RecurrentStateSpec, ScanShape, StateSpec, enabled,
};

/// DeltaNet, and Gated DeltaNet when its state decays.
#[derive(Clone, Debug, PartialEq)]
pub struct DeltaConfig {
    /// Heads of queries and keys.
    pub heads: usize,
    /// Heads of values, each with a state; head `h` reads keys `h / (value_heads / heads)`.
    pub value_heads: usize,
    /// Width of a query and of a key `dk`.
    pub key_dim: usize,
    /// Width of a value `dv`.
    pub value_dim: usize,
    /// Taps of the short convolutions.
    pub conv_size: usize,
    /// Whether the output is gated by `silu(x Wg^T)`.
    pub output_gate: bool,
    /// Whether writes reach twice as far, so that a state may be turned around.
    pub negative_eigenvalues: bool,
    /// Whether the state decays, by Mamba-2's rule: Gated DeltaNet.
    pub decay: bool,
}

impl DeltaConfig {
    /// DeltaNet with square states, as published.
    pub fn delta_net(heads: usize, head_dim: usize) -> Self {
        DeltaConfig {
            heads,
            value_heads: heads,
            key_dim: head_dim,
            value_dim: head_dim,
            conv_size: 4,
            output_gate: false,
            negative_eigenvalues: false,
            decay: false,
        }
    }

    /// Gated DeltaNet with values twice as wide as keys and an output gate, as published.
    pub fn gated(heads: usize, head_dim: usize) -> Self {
        DeltaConfig {
            value_dim: 2 * head_dim,
            output_gate: true,
            decay: true,
            ..Self::delta_net(heads, head_dim)
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
        self.scan().delta_state(Some(self.conv_size))
    }
}

impl MixerConfig for DeltaConfig {
    fn name(&self) -> &'static str {
        if self.decay { "Gated DeltaNet" } else { "DeltaNet" }
    }

    fn heads(&self, _: &ModelConfig) -> (usize, usize) {
        (self.value_heads, self.key_dim)
    }

    fn key_heads(&self, _: &ModelConfig) -> usize {
        self.heads
    }

    fn options(&self, _: &ModelConfig) -> Vec<String> {
        let mut words = vec![
            "delta rule".to_string(),
            format!("states of {} x {} per head", self.key_dim, self.value_dim),
            format!("convolutions of {} taps", self.conv_size),
        ];
        let more = enabled(&[
            (self.decay, "decay per head from the input"),
            (self.output_gate, "output gate (silu)"),
            (self.negative_eigenvalues, "negative eigenvalues"),
        ]);
        words.extend(more.into_iter().map(String::from));
        words
    }

    fn validate(&self, _: &ModelConfig, validator: &Validator<'_>) -> Result<()> {
        self.scan().validate_delta(validator)?;
        validator.range("conv_size", self.conv_size, 1, Validator::MAX_TAPS)
    }

    fn declare(&self, model: &ModelConfig, layer: &mut LayerParams<'_>) -> Box<dyn Mixer> {
        Box::new(DeltaLayer::declare(model, self, layer))
    }

    fn state(&self, _: &ModelConfig) -> StateSpec {
        StateSpec::Recurrent(self.shape())
    }

    fn continues_sequences(&self) -> bool {
        true
    }

    fn train_flops(&self, _: &ModelConfig, seq: usize) -> f64 {
        self.scan().train_flops(seq)
    }

    fn mlp_down_std(&self, model: &ModelConfig) -> f64 {
        model.deep_down_std()
    }
}
