//! Kimi Delta Attention (KDA, arXiv 2510.26692): the delta rule with a decay per channel.

mod config;
mod formats;
mod layer;

pub use config::KdaConfig;

use super::{Architecture, MixerFamily};
use crate::config::ModelConfig;

/// Kimi Delta Attention.
pub static FAMILY: MixerFamily = MixerFamily {
    name: "Kimi Delta Attention",
    formats: &formats::FORMATS,
    architectures: &[Architecture { name: "kda", build: ModelConfig::kda, published: &[] }],
};

impl ModelConfig {
    /// Kimi Delta Attention: square states as wide as the model, convolutions of 4 taps.
    pub fn kda(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        let mixer = KdaConfig::square(heads, hidden_size / heads.max(1));
        Self::with_mixer(hidden_size, num_layers, mixer, 4.0)
    }
}
