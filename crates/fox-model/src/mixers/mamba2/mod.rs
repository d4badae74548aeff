//! Mamba-2: a decay per head, in blocks without an MLP.

mod config;
mod formats;
mod layer;

pub use config::Mamba2Config;

use super::{Architecture, MixerFamily};
use crate::config::ModelConfig;

/// Mamba-2.
pub static FAMILY: MixerFamily = MixerFamily {
    name: "Mamba-2",
    formats: &formats::FORMATS,
    architectures: &[Architecture {
        name: "mamba2",
        build: ModelConfig::mamba2,
        published: &[
            ("mamba2-125m", 768, 24, 24),
            ("mamba2-360m", 1024, 48, 32),
            ("mamba2-760m", 1536, 48, 48),
        ],
    }],
};

impl ModelConfig {
    /// Mamba-2: twice the width inside, states of 128 per channel, one group.
    pub fn mamba2(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        let mixer = Mamba2Config {
            heads,
            head_dim: 2 * hidden_size / heads.max(1),
            state_size: 128,
            groups: 1,
            conv_size: 4,
            time_step_limit: (0.0, f64::INFINITY),
            time_step_init: (0.001, 0.1, 1e-4),
            norm_before_gate: false,
        };
        ModelConfig { norm_eps: 1e-5, ..Self::with_mixer(hidden_size, num_layers, mixer, 4.0) }
    }
}
