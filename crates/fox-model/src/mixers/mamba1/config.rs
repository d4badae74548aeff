//! Options of Mamba-1: validation, sizes, arithmetic.

use super::layer::Mamba1Layer;
use crate::Result;
use crate::config::{ModelConfig, Validator};
use crate::mixers::{
    ConvStateSpec, LayerParams, Mixer, MixerConfig, RecurrentStateSpec, StateSpec,
};

/// Mamba-1.
#[derive(Clone, Debug, PartialEq)]
pub struct Mamba1Config {
    /// Channels `E`.
    pub inner: usize,
    /// Elements of a channel's state `N`.
    pub state_size: usize,
    /// Rank `R` of the projection that gives the time steps.
    pub rank: usize,
    /// Taps of the short convolution.
    pub conv_size: usize,
    /// Time steps at the start: smallest, largest, and a floor under them.
    pub time_step_init: (f64, f64, f64),
}

impl Mamba1Config {
    /// The published sizes for a model of this width.
    pub fn published(hidden_size: usize) -> Self {
        Mamba1Config {
            inner: 2 * hidden_size,
            state_size: 16,
            rank: hidden_size.div_ceil(16),
            conv_size: 4,
            time_step_init: (0.001, 0.1, 1e-4),
        }
    }

    /// Sizes of the decode state of a layer.
    pub(super) fn shape(&self) -> RecurrentStateSpec {
        RecurrentStateSpec {
            convs: vec![ConvStateSpec { channels: self.inner, taps: self.conv_size }],
            scan: self.inner * self.state_size,
        }
    }
}

impl MixerConfig for Mamba1Config {
    fn name(&self) -> &'static str {
        "Mamba-1"
    }

    fn heads(&self, _: &ModelConfig) -> (usize, usize) {
        (self.inner, 1)
    }

    fn key_heads(&self, _: &ModelConfig) -> usize {
        1
    }

    fn options(&self, _: &ModelConfig) -> Vec<String> {
        vec![
            "selective scan".to_string(),
            format!("{} channels with states of {}", self.inner, self.state_size),
            format!("a convolution of {} taps", self.conv_size),
        ]
    }

    fn validate(&self, _: &ModelConfig, validator: &Validator<'_>) -> Result<()> {
        validator.range("expand", self.inner, 1, Validator::MAX_WIDTH)?;
        validator.range("state_size", self.state_size, 1, Validator::MAX_HEAD)?;
        validator.range("time_step_rank", self.rank, 1, Validator::MAX_WIDTH)?;
        validator.range("conv_kernel", self.conv_size, 1, Validator::MAX_TAPS)?;
        let (min, max, floor) = self.time_step_init;
        validator.positive("time_step_min", min, 1e6)?;
        validator.positive("time_step_max", max, 1e6)?;
        validator.positive("time_step_floor", floor, 1e6)
    }

    fn declare(&self, model: &ModelConfig, layer: &mut LayerParams<'_>) -> Box<dyn Mixer> {
        Box::new(Mamba1Layer::declare(model, self, layer))
    }

    fn state(&self, _: &ModelConfig) -> StateSpec {
        StateSpec::Recurrent(self.shape())
    }

    /// A decay, a write and a read for every element of the state, and twice that in the backward pass.
    fn train_flops(&self, _: &ModelConfig, _: usize) -> f64 {
        3.0 * 6.0 * (self.inner * self.state_size) as f64
    }
}
