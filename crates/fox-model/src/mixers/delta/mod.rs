//! The delta rule: DeltaNet and Gated DeltaNet.

mod config;
mod formats;
mod layer;

pub use config::DeltaConfig;

use super::{Architecture, MixerFamily};
use crate::config::ModelConfig;

/// DeltaNet and Gated DeltaNet.
pub static FAMILY: MixerFamily = MixerFamily {
    name: "the delta rule",
    formats: &formats::FORMATS,
    architectures: &[
        Architecture {
            name: "delta-net",
            build: ModelConfig::delta_net,
            published: &[
                ("delta-net-125m", 768, 12, 6),
                ("delta-net-360m", 1024, 24, 8),
                ("delta-net-760m", 1536, 24, 12),
            ],
        },
        Architecture {
            name: "gated-delta-net",
            build: ModelConfig::gated_delta_net,
            published: &[],
        },
    ],
};

impl ModelConfig {
    /// DeltaNet: square states, convolutions of 4 taps.
    pub fn delta_net(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        let mixer = DeltaConfig::delta_net(heads, hidden_size / heads.max(1));
        Self::with_mixer(hidden_size, num_layers, mixer, 4.0)
    }

    /// Gated DeltaNet: keys of three quarters of the width, values twice as wide as keys.
    pub fn gated_delta_net(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        let mixer = DeltaConfig::gated(heads, 3 * hidden_size / (4 * heads.max(1)));
        Self::with_mixer(hidden_size, num_layers, mixer, 4.0)
    }
}
