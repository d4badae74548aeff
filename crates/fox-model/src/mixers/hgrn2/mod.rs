//! HGRN2: a decay per channel.

mod config;
mod formats;
mod layer;

pub use config::{Hgrn2Config, LowerBounds};

use super::{Architecture, MixerFamily};
use crate::config::ModelConfig;

/// HGRN2.
pub static FAMILY: MixerFamily = MixerFamily {
    name: "HGRN2",
    formats: &formats::FORMATS,
    architectures: &[Architecture {
        name: "hgrn2",
        build: ModelConfig::hgrn2,
        published: &[
            ("hgrn2-125m", 768, 12, 6),
            ("hgrn2-360m", 1024, 24, 8),
            ("hgrn2-760m", 1536, 24, 12),
        ],
    }],
};

impl ModelConfig {
    /// HGRN2 as the official repository has it: lower bounds are stored, but have no effect.
    pub fn hgrn2(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        let mixer = Hgrn2Config {
            heads,
            expand_ratio: hidden_size / heads.max(1),
            lower_bounds: LowerBounds::Stored,
            output_norm_eps: 1e-6,
        };
        Self::with_mixer(hidden_size, num_layers, mixer, 4.0)
    }
}
