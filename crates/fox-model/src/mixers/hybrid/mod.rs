//! Hybrids: layers with different mixers, named one by one in a pattern that repeats.

mod config;
mod formats;
mod kind;

pub use config::{HybridConfig, LayerConfigs, MlpRatios};
pub use kind::LayerKind;

use fox_tensor::Rope;

use super::delta::DeltaConfig;
use super::forgetting::ForgettingConfig;
use super::kda::KdaConfig;
use super::mamba1::Mamba1Config;
use super::mamba2::Mamba2Config;
use super::wall::WallConfig;
use super::{Architecture, MixerFamily};
use crate::config::{ModelConfig, Validator};
use LayerKind::{Fox, GatedDeltaNet, Kda, Mamba1, Mamba2, Window};

/// Hybrids.
pub static FAMILY: MixerFamily = MixerFamily {
    name: "hybrids",
    formats: &formats::FORMATS,
    architectures: &[
        Architecture { name: "fox-window", build: ModelConfig::fox_window, published: &[] },
        Architecture {
            name: "fox-gated-delta-net",
            build: ModelConfig::fox_gated_delta_net,
            published: &[],
        },
        Architecture { name: "fox-kda", build: ModelConfig::fox_kda, published: &[] },
        Architecture { name: "mamba2-window", build: ModelConfig::mamba2_window, published: &[] },
        Architecture { name: "samba", build: ModelConfig::samba, published: &[] },
    ],
};

impl ModelConfig {
    /// FoX (LLaMA) and attention over 512 tokens with RoPE, in turns.
    pub fn fox_window(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        hybrid((hidden_size, num_layers, heads), &[Fox, Window(512)])
    }

    /// Three layers of Gated DeltaNet for each of FoX (LLaMA).
    pub fn fox_gated_delta_net(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        let pattern = [GatedDeltaNet, GatedDeltaNet, GatedDeltaNet, Fox];
        hybrid((hidden_size, num_layers, heads), &pattern)
    }

    /// Three layers of KDA for each of FoX (LLaMA).
    pub fn fox_kda(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        hybrid((hidden_size, num_layers, heads), &[Kda, Kda, Kda, Fox])
    }

    /// Mamba-2 and attention over 2048 tokens with RoPE, in turns.
    pub fn mamba2_window(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        hybrid((hidden_size, num_layers, heads), &[Mamba2, Window(2048)])
    }

    /// Samba of the official repository: Mamba-1 and attention over 2048 tokens with RoPE, in turns.
    pub fn samba(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        let pattern = vec![Mamba1, Window(2048)];
        let ratios = MlpRatios { recurrent: 3.0, attention: 4.0 };
        let mut layers = LayerConfigs::standard(hidden_size, heads);
        layers.attention.rope = Some(Rope::new(500_000.0));
        let mixer = HybridConfig::new(pattern, layers).with_mlp_ratios(Some(ratios));
        let mut config = Self::with_mixer(hidden_size, num_layers.max(2), mixer, 4.0);
        // In the official file this field has the channels of Mamba-1.
        config.mlp.intermediate_size = Some(2 * hidden_size);
        config.norm_eps = 1e-5;
        config
    }
}

/// A model of the first layers of a pattern that repeats.
fn hybrid((width, layers, heads): (usize, usize, usize), pattern: &[LayerKind]) -> ModelConfig {
    let pattern = pattern[..layers.clamp(1, pattern.len())].to_vec();
    let mixer = HybridConfig::new(pattern, LayerConfigs::standard(width, heads));
    ModelConfig::with_mixer(width, layers, mixer, 4.0)
}

impl LayerConfigs {
    /// The mixers of a model of this width whose attention has so many heads: heads of Mamba-2 as wide as those of
    /// attention, heads of Gated DeltaNet with keys three quarters as wide as two of them, heads of KDA as wide as two.
    pub fn standard(width: usize, heads: usize) -> Self {
        // Sizes beyond these are refused later; here they must not overflow.
        let (width, heads) =
            (width.min(Validator::MAX_WIDTH), heads.clamp(1, Validator::MAX_WIDTH));
        let delta_heads = if heads.is_multiple_of(2) { heads / 2 } else { heads };
        LayerConfigs {
            attention: ForgettingConfig::fox_llama(heads),
            delta: DeltaConfig::gated(delta_heads, 3 * width / (4 * delta_heads)),
            kda: KdaConfig::square(delta_heads, width / delta_heads),
            wall: WallConfig::new(heads),
            mamba2: Mamba2Config {
                heads: 2 * heads,
                head_dim: width / heads,
                state_size: 128,
                groups: 1,
                conv_size: 4,
                time_step_limit: (0.0, f64::INFINITY),
                time_step_init: (0.001, 0.1, 1e-4),
                norm_before_gate: false,
            },
            mamba1: Mamba1Config::published(width),
        }
    }
}
