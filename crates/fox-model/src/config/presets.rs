//! The published configurations by name: four families of attention models in three sizes.

use super::{ForgettingConfig, MixerConfig, MlpConfig, ModelConfig, SpecialTokens};
use fox_tensor::Activation;

/// A published configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preset {
    /// Its name, e.g. `fox-pro-125m`.
    pub name: &'static str,
    family: Family,
    hidden_size: usize,
    num_layers: usize,
    heads: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    FoxLlama,
    FoxPro,
    TransformerLlama,
    TransformerPro,
}

const fn preset(
    name: &'static str,
    family: Family,
    hidden_size: usize,
    num_layers: usize,
    heads: usize,
) -> Preset {
    Preset { name, family, hidden_size, num_layers, heads }
}

/// The published attention models.
pub const PRESETS: [Preset; 12] = [
    preset("fox-llama-125m", Family::FoxLlama, 768, 12, 12),
    preset("fox-llama-360m", Family::FoxLlama, 1024, 24, 16),
    preset("fox-llama-760m", Family::FoxLlama, 1536, 24, 24),
    preset("fox-pro-125m", Family::FoxPro, 768, 12, 12),
    preset("fox-pro-360m", Family::FoxPro, 1024, 24, 16),
    preset("fox-pro-760m", Family::FoxPro, 1536, 24, 24),
    preset("transformer-llama-125m", Family::TransformerLlama, 768, 12, 12),
    preset("transformer-llama-360m", Family::TransformerLlama, 1024, 24, 16),
    preset("transformer-llama-760m", Family::TransformerLlama, 1536, 24, 12),
    preset("transformer-pro-125m", Family::TransformerPro, 768, 12, 12),
    preset("transformer-pro-360m", Family::TransformerPro, 1024, 24, 16),
    preset("transformer-pro-760m", Family::TransformerPro, 1536, 24, 12),
];

impl Preset {
    /// The preset of this name; `_` and `-` are alike, and so are capitals and small letters.
    pub fn by_name(name: &str) -> Option<Preset> {
        let wanted = name.to_ascii_lowercase().replace('_', "-");
        PRESETS.into_iter().find(|preset| preset.name == wanted)
    }

    /// Its configuration.
    pub fn config(&self) -> ModelConfig {
        let (d, layers, heads) = (self.hidden_size, self.num_layers, self.heads);
        match self.family {
            Family::FoxLlama => ModelConfig::fox_llama(d, layers, heads),
            Family::FoxPro => ModelConfig::fox_pro(d, layers, heads),
            Family::TransformerLlama => ModelConfig::transformer_llama(d, layers, heads),
            Family::TransformerPro => ModelConfig::transformer_pro(d, layers, heads),
        }
    }
}

impl ModelConfig {
    /// FoX (LLaMA): the data-dependent forget gate and nothing else.
    pub fn fox_llama(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        Self::published(hidden_size, num_layers, ForgettingConfig::fox_llama(heads), 4.0)
    }

    /// FoX (Pro): QK-norm, output norm and gate, key and value shift, a narrower MLP.
    pub fn fox_pro(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        Self::published(hidden_size, num_layers, ForgettingConfig::fox_pro(heads), 3.5)
    }

    /// Transformer (LLaMA): RoPE, no forget gate.
    pub fn transformer_llama(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        let mixer = ForgettingConfig::fox_llama(heads).without_forgetting();
        Self::published(hidden_size, num_layers, mixer, 4.0)
    }

    /// Transformer (Pro): the Pro layer with RoPE and no forget gate.
    pub fn transformer_pro(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        let mixer = ForgettingConfig::fox_pro(heads).without_forgetting();
        Self::published(hidden_size, num_layers, mixer, 3.5)
    }

    /// What the published configurations share; the vocabulary is GPT-2's.
    fn published(
        hidden_size: usize,
        num_layers: usize,
        mixer: ForgettingConfig,
        hidden_ratio: f64,
    ) -> Self {
        ModelConfig {
            vocab_size: 50257,
            hidden_size,
            num_layers,
            mlp: MlpConfig { hidden_ratio, intermediate_size: None, activation: Activation::Silu },
            mixer: MixerConfig::Forgetting(mixer),
            norm_eps: 1e-6,
            initializer_range: 0.02,
            tie_word_embeddings: false,
            tokens: SpecialTokens::default(),
            max_position_embeddings: 2048,
        }
    }
}
