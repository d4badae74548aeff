//! Options of Mamba-2: validation, sizes, arithmetic.

use super::layer::Mamba2Layer;
use crate::Result;
use crate::config::{ModelConfig, Validator};
use crate::mixers::{
    BlockNames, ConvStateSpec, LayerParams, Mixer, MixerConfig, RecurrentStateSpec, ScanShape,
    StateSpec,
};
use crate::params::Init;

/// Mamba-2. Blocks have no MLP.
#[derive(Clone, Debug, PartialEq)]
pub struct Mamba2Config {
    /// Heads `H`; `H * head_dim` is the inner width `E`.
    pub heads: usize,
    /// Width of a value.
    pub head_dim: usize,
    /// Width of a query and of a key `N`.
    pub state_size: usize,
    /// Heads of queries and keys `G`.
    pub groups: usize,
    /// Taps of the short convolution.
    pub conv_size: usize,
    /// Smallest and largest time step.
    pub time_step_limit: (f64, f64),
    /// Range of the initial time steps, and a floor under them.
    pub time_step_init: (f64, f64, f64),
    /// Whether the output is normalised before it is gated.
    pub norm_before_gate: bool,
}

impl Mamba2Config {
    /// The inner width `E`.
    pub fn inner(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Channels of the convolution: values, keys and queries.
    pub(crate) fn conv_width(&self) -> usize {
        self.inner() + 2 * self.groups * self.state_size
    }

    /// Sizes of the recurrence.
    pub(super) fn scan(&self) -> ScanShape {
        ScanShape {
            heads: self.heads,
            key_heads: self.groups,
            key_dim: self.state_size,
            value_dim: self.head_dim,
            delta: false,
        }
    }

    /// Sizes of the decode state of a layer.
    pub(super) fn shape(&self) -> RecurrentStateSpec {
        RecurrentStateSpec {
            convs: vec![ConvStateSpec { channels: self.conv_width(), taps: self.conv_size }],
            scan: self.inner() * self.state_size,
        }
    }
}

impl MixerConfig for Mamba2Config {
    fn name(&self) -> &'static str {
        "Mamba-2"
    }

    /// The width is that of the values.
    fn heads(&self, _: &ModelConfig) -> (usize, usize) {
        (self.heads, self.head_dim)
    }

    fn key_heads(&self, _: &ModelConfig) -> usize {
        self.groups
    }

    fn options(&self, _: &ModelConfig) -> Vec<String> {
        let mut words = vec![
            "decay per head from the time step".to_string(),
            format!("states of {} x {} per head", self.state_size, self.head_dim),
            format!("convolution of {} taps", self.conv_size),
        ];
        if self.norm_before_gate {
            words.push("norm before the output gate".into());
        }
        words
    }

    fn validate(&self, _: &ModelConfig, validator: &Validator<'_>) -> Result<()> {
        validator.range("num_heads", self.heads, 1, Validator::MAX_WIDTH)?;
        validator.range("head_dim", self.head_dim, 1, Validator::MAX_HEAD)?;
        validator.range("state_size", self.state_size, 1, Validator::MAX_HEAD)?;
        validator.divisor("n_groups", self.groups, ("num_heads", self.heads))?;
        validator.range("conv_kernel", self.conv_size, 1, Validator::MAX_TAPS)?;
        let (low, high) = self.time_step_limit;
        validator.require(low >= 0.0 && low <= high, "time_step_limit", || {
            format!("is {low} to {high}; it must be a range of numbers from 0 on")
        })?;
        let (min, max, floor) = self.time_step_init;
        validator.positive("time_step_min", min, 1e3)?;
        validator.positive("time_step_max", max, 1e3)?;
        validator.positive("time_step_floor", floor, 1e3)
    }

    fn declare(&self, model: &ModelConfig, layer: &mut LayerParams<'_>) -> Box<dyn Mixer> {
        Box::new(Mamba2Layer::declare(model, self, layer))
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

    fn has_mlp(&self) -> bool {
        false
    }

    fn names(&self) -> BlockNames {
        BlockNames { stem: "backbone", mixer_norm: "norm", mixer: "mixer", final_norm: "norm_f" }
    }

    fn head_init(&self, model: &ModelConfig) -> Init {
        Init::Uniform { bound: 1.0 / (model.hidden_size as f64).sqrt() }
    }

    fn trains_pad(&self) -> bool {
        true
    }
}
