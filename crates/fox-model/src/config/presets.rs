//! The published configurations by name: seven families in three sizes.

use super::{
    DeltaConfig, ForgetGate, ForgettingConfig, Hgrn2Config, LowerBounds, Mamba2Config, MixerConfig,
    MlpConfig, ModelConfig, SpecialTokens,
};
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
    DeltaNet,
    Hgrn2,
    Mamba2,
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

/// The published models.
pub const PRESETS: [Preset; 21] = [
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
    preset("delta-net-125m", Family::DeltaNet, 768, 12, 6),
    preset("delta-net-360m", Family::DeltaNet, 1024, 24, 8),
    preset("delta-net-760m", Family::DeltaNet, 1536, 24, 12),
    preset("hgrn2-125m", Family::Hgrn2, 768, 12, 6),
    preset("hgrn2-360m", Family::Hgrn2, 1024, 24, 8),
    preset("hgrn2-760m", Family::Hgrn2, 1536, 24, 12),
    preset("mamba2-125m", Family::Mamba2, 768, 24, 24),
    preset("mamba2-360m", Family::Mamba2, 1024, 48, 32),
    preset("mamba2-760m", Family::Mamba2, 1536, 48, 48),
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
            Family::DeltaNet => ModelConfig::delta_net(d, layers, heads),
            Family::Hgrn2 => ModelConfig::hgrn2(d, layers, heads),
            Family::Mamba2 => ModelConfig::mamba2(d, layers, heads),
        }
    }
}

impl ModelConfig {
    /// FoX (LLaMA): the data-dependent forget gate and nothing else.
    pub fn fox_llama(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        let mixer = MixerConfig::Forgetting(ForgettingConfig::fox_llama(heads));
        Self::published(hidden_size, num_layers, mixer, 4.0)
    }

    /// FoX (Pro): QK-norm, output norm and gate, key and value shift, a narrower MLP.
    pub fn fox_pro(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        let mixer = MixerConfig::Forgetting(ForgettingConfig::fox_pro(heads));
        Self::published(hidden_size, num_layers, mixer, 3.5)
    }

    /// Transformer (LLaMA): RoPE, no forget gate.
    pub fn transformer_llama(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        let mixer = ForgettingConfig::fox_llama(heads).without_forgetting();
        Self::published(hidden_size, num_layers, MixerConfig::Forgetting(mixer), 4.0)
    }

    /// Transformer (Pro): the Pro layer with RoPE and no forget gate.
    pub fn transformer_pro(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        let mixer = ForgettingConfig::fox_pro(heads).without_forgetting();
        Self::published(hidden_size, num_layers, MixerConfig::Forgetting(mixer), 3.5)
    }

    /// Stick-breaking attention in the LLaMA layer, without a forget gate.
    pub fn stick_breaking(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        let plain = ForgettingConfig::fox_llama(heads).stick_breaking();
        let mixer = ForgettingConfig { gate: ForgetGate::None, ..plain };
        Self::published(hidden_size, num_layers, MixerConfig::Forgetting(mixer), 4.0)
    }

    /// Stick-breaking attention whose weights are multiplied by the forget gates of FoX (LLaMA).
    pub fn stick_breaking_fox(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        let mixer = ForgettingConfig::fox_llama(heads).stick_breaking();
        Self::published(hidden_size, num_layers, MixerConfig::Forgetting(mixer), 4.0)
    }

    /// DeltaNet: square states, convolutions of 4 taps.
    pub fn delta_net(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        let mixer = DeltaConfig::delta_net(heads, hidden_size / heads.max(1));
        Self::published(hidden_size, num_layers, MixerConfig::Delta(mixer), 4.0)
    }

    /// Gated DeltaNet: keys of three quarters of the width, values twice as wide as keys.
    pub fn gated_delta_net(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        let mixer = DeltaConfig::gated(heads, 3 * hidden_size / (4 * heads.max(1)));
        Self::published(hidden_size, num_layers, MixerConfig::Delta(mixer), 4.0)
    }

    /// HGRN2 as the official repository has it: lower bounds are stored, but have no effect.
    pub fn hgrn2(hidden_size: usize, num_layers: usize, heads: usize) -> Self {
        let mixer = Hgrn2Config {
            heads,
            expand_ratio: hidden_size / heads.max(1),
            lower_bounds: LowerBounds::Stored,
            output_norm_eps: 1e-6,
        };
        Self::published(hidden_size, num_layers, MixerConfig::Hgrn2(mixer), 4.0)
    }

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
        let mixer = MixerConfig::Mamba2(mixer);
        ModelConfig { norm_eps: 1e-5, ..Self::published(hidden_size, num_layers, mixer, 4.0) }
    }

    /// What the published configurations share; the vocabulary is GPT-2's.
    fn published(
        hidden_size: usize,
        num_layers: usize,
        mixer: MixerConfig,
        hidden_ratio: f64,
    ) -> Self {
        ModelConfig {
            vocab_size: 50257,
            hidden_size,
            num_layers,
            mlp: MlpConfig { hidden_ratio, intermediate_size: None, activation: Activation::Silu },
            mixer,
            norm_eps: 1e-6,
            initializer_range: 0.02,
            tie_word_embeddings: false,
            tokens: SpecialTokens::default(),
            max_position_embeddings: 2048,
        }
    }
}
