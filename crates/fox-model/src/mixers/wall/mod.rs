//! Wall attention: softmax attention whose keys decay per channel, with or without a forget gate per head.

mod config;
mod formats;
mod layer;

pub use config::WallConfig;

use super::{Architecture, MixerFamily};
use crate::config::ModelConfig;

/// Wall attention.
pub static FAMILY: MixerFamily = MixerFamily {
    name: "Wall attention",
    formats: &formats::FORMATS,
    architectures: &[
        Architecture { name: "wall", build: ModelConfig::wall, published: &[] },
        Architecture { name: "wall-scalar", build: ModelConfig::wall_scalar, published: &[] },
    ],
};

impl ModelConfig {
    /// Wall attention with decays per channel only.
    pub fn wall(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        Self::with_mixer(hidden_size, num_layers, WallConfig::new(heads), 4.0)
    }

    /// Wall attention with decays per channel and a forget gate per head.
    pub fn wall_scalar(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        let mixer = WallConfig { scalar_gate: true, ..WallConfig::new(heads) };
        Self::with_mixer(hidden_size, num_layers, mixer, 4.0)
    }
}
