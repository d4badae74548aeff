//! Softmax and stick-breaking attention, with or without forgetting: FoX and the Transformer.

mod config;
mod formats;
mod gate;
mod layer;
mod projection;
mod slot;

pub(crate) use config::QK_NORM_EPS;
pub use config::{DecayTime, ForgetGate, ForgettingConfig, QkNorm};
pub(crate) use formats::{NATIVE, native};
pub use layer::ForgettingLayer;
pub(crate) use projection::Projection;

use super::{Architecture, MixerFamily};
use crate::config::ModelConfig;

/// Attention.
pub static FAMILY: MixerFamily = MixerFamily {
    name: "attention",
    formats: &formats::FORMATS,
    architectures: &[
        Architecture {
            name: "fox-llama",
            build: ModelConfig::fox_llama,
            published: &[
                ("fox-llama-125m", 768, 12, 12),
                ("fox-llama-360m", 1024, 24, 16),
                ("fox-llama-760m", 1536, 24, 24),
            ],
        },
        Architecture {
            name: "fox-pro",
            build: ModelConfig::fox_pro,
            published: &[
                ("fox-pro-125m", 768, 12, 12),
                ("fox-pro-360m", 1024, 24, 16),
                ("fox-pro-760m", 1536, 24, 24),
            ],
        },
        Architecture {
            name: "transformer-llama",
            build: ModelConfig::transformer_llama,
            published: &[
                ("transformer-llama-125m", 768, 12, 12),
                ("transformer-llama-360m", 1024, 24, 16),
                ("transformer-llama-760m", 1536, 24, 12),
            ],
        },
        Architecture {
            name: "transformer-pro",
            build: ModelConfig::transformer_pro,
            published: &[
                ("transformer-pro-125m", 768, 12, 12),
                ("transformer-pro-360m", 1024, 24, 16),
                ("transformer-pro-760m", 1536, 24, 12),
            ],
        },
        Architecture { name: "stick-breaking", build: ModelConfig::stick_breaking, published: &[] },
        Architecture {
            name: "stick-breaking-fox",
            build: ModelConfig::stick_breaking_fox,
            published: &[],
        },
    ],
};

impl ModelConfig {
    /// FoX (LLaMA): the data-dependent forget gate and nothing else.
    pub fn fox_llama(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        Self::with_mixer(hidden_size, num_layers, ForgettingConfig::fox_llama(heads), 4.0)
    }

    /// FoX (Pro): QK-norm, output norm and gate, key and value shift, a narrower MLP.
    pub fn fox_pro(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        Self::with_mixer(hidden_size, num_layers, ForgettingConfig::fox_pro(heads), 3.5)
    }

    /// Transformer (LLaMA): RoPE, no forget gate.
    pub fn transformer_llama(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        let mixer = ForgettingConfig::fox_llama(heads).without_forgetting();
        Self::with_mixer(hidden_size, num_layers, mixer, 4.0)
    }

    /// Transformer (Pro): the Pro layer with RoPE and no forget gate.
    pub fn transformer_pro(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        let mixer = ForgettingConfig::fox_pro(heads).without_forgetting();
        Self::with_mixer(hidden_size, num_layers, mixer, 3.5)
    }

    /// An encoder with the layer of FoX (Pro): bidirectional attention with forget gates.
    pub fn fox_encoder(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        let mixer = ForgettingConfig::fox_pro(heads).bidirectional();
        Self::with_mixer(hidden_size, num_layers, mixer, 3.5)
    }

    /// An encoder with the layer of Transformer (Pro): bidirectional attention with RoPE.
    pub fn transformer_encoder(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        let mixer = ForgettingConfig::fox_pro(heads).without_forgetting().bidirectional();
        Self::with_mixer(hidden_size, num_layers, mixer, 3.5)
    }

    /// Stick-breaking attention in the LLaMA layer, without a forget gate.
    pub fn stick_breaking(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        let plain = ForgettingConfig::fox_llama(heads).stick_breaking();
        let mixer = ForgettingConfig { gate: ForgetGate::None, ..plain };
        Self::with_mixer(hidden_size, num_layers, mixer, 4.0)
    }

    /// Stick-breaking attention whose weights are multiplied by the forget gates of FoX (LLaMA).
    pub fn stick_breaking_fox(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        let mixer = ForgettingConfig::fox_llama(heads).stick_breaking();
        Self::with_mixer(hidden_size, num_layers, mixer, 4.0)
    }
}
