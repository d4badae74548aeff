//! PaTH attention and PaTH-FoX (arXiv 2505.16381): softmax attention whose position encoding is a product of
//! data-dependent reflections, optionally with forget gates.

mod config;
mod formats;
mod layer;

pub use config::{PathConfig, PathConv};

use super::{Architecture, MixerFamily};
use crate::config::ModelConfig;

/// PaTH attention.
pub static FAMILY: MixerFamily = MixerFamily {
    name: "PaTH attention",
    formats: &formats::FORMATS,
    architectures: &[
        Architecture { name: "path", build: ModelConfig::path, published: &[] },
        Architecture { name: "path-fox", build: ModelConfig::path_fox, published: &[] },
    ],
};

impl ModelConfig {
    /// PaTH: no forget gate.
    pub fn path(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        Self::with_mixer(hidden_size, num_layers, PathConfig::published(heads), 4.0)
    }

    /// PaTH-FoX: PaTH with forget gates.
    pub fn path_fox(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        let mixer = PathConfig { forget_gate: true, ..PathConfig::published(heads) };
        Self::with_mixer(hidden_size, num_layers, mixer, 4.0)
    }
}
