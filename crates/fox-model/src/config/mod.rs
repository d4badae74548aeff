//! What a model is: sizes, options, and the rules they must obey.
//!
//! [`ModelConfig`] is independent of any file format. [`ModelType`] names the formats:
//! `read` turns their config.json into a [`ModelConfig`], `write` turns it back.

mod fields;
mod presets;
mod read;
mod read_recurrent;
mod recurrent;
mod relaxed_json;
mod validate;
mod write;
mod write_recurrent;

use fox_tensor::{Activation, AttentionWeights};

pub use presets::{PRESETS, Preset};
pub(crate) use recurrent::RecurrentShape;
pub use recurrent::{DeltaConfig, Hgrn2Config, LowerBounds, Mamba2Config};

/// Epsilon of the QK-norm, whatever `norm_eps` says.
pub const QK_NORM_EPS: f32 = 1e-5;

/// A language model: embedding, blocks of a mixer and an MLP, a norm and an output projection.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Number of token ids `V`.
    pub vocab_size: usize,
    /// Width of the residual stream `D`.
    pub hidden_size: usize,
    /// Number of blocks `L`.
    pub num_layers: usize,
    /// The feed-forward half of a block.
    pub mlp: MlpConfig,
    /// The half of a block that looks along time.
    pub mixer: MixerConfig,
    /// Epsilon of the block norms, the final norm and the output norm.
    pub norm_eps: f64,
    /// Standard deviation of the initial weights.
    pub initializer_range: f64,
    /// Whether the output projection is the embedding table.
    pub tie_word_embeddings: bool,
    /// Token ids with a meaning of their own.
    pub tokens: SpecialTokens,
    /// The length the model was meant for; no effect on the mathematics.
    pub max_position_embeddings: usize,
}

/// The gated MLP: `down(act(g) * u)` with `[g | u] = gate_up(x)`.
#[derive(Clone, Debug, PartialEq)]
pub struct MlpConfig {
    /// Width relative to `D`; used when no width is given.
    pub hidden_ratio: f64,
    /// Width `I`, when given outright.
    pub intermediate_size: Option<usize>,
    /// Nonlinearity of `g`.
    pub activation: Activation,
}

impl MlpConfig {
    /// The width `I` for a residual stream of width `hidden_size`: as given, or two thirds of
    /// `hidden_ratio * D` rounded up to a multiple of 256.
    pub fn width(&self, hidden_size: usize) -> usize {
        self.intermediate_size.unwrap_or_else(|| {
            let raw = (hidden_size as f64 * self.hidden_ratio * 2.0 / 3.0) as usize;
            raw.div_ceil(256).saturating_mul(256)
        })
    }
}

/// Token ids with a meaning of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Begins a sequence.
    pub bos: Option<usize>,
    /// Ends a sequence.
    pub eos: Option<usize>,
    /// Fills up a batch; its embedding starts at 0 and is not trained.
    pub pad: Option<usize>,
}

/// The families of mixers.
#[derive(Clone, Debug, PartialEq)]
pub enum MixerConfig {
    /// Softmax or stick-breaking attention, with or without forgetting.
    Forgetting(ForgettingConfig),
    /// The delta rule: DeltaNet and Gated DeltaNet.
    Delta(DeltaConfig),
    /// A decay per channel: HGRN2.
    Hgrn2(Hgrn2Config),
    /// A decay per head, without an MLP: Mamba-2.
    Mamba2(Mamba2Config),
}

impl MixerConfig {
    /// The options of attention, if that is what it is.
    pub fn forgetting(&self) -> Option<&ForgettingConfig> {
        match self {
            MixerConfig::Forgetting(mixer) => Some(mixer),
            _ => None,
        }
    }

    /// The options of attention, if that is what it is.
    pub fn forgetting_mut(&mut self) -> Option<&mut ForgettingConfig> {
        match self {
            MixerConfig::Forgetting(mixer) => Some(mixer),
            _ => None,
        }
    }
}

/// Options of the attention layer. FoX and the Transformer are the same layer with other options.
#[derive(Clone, Debug, PartialEq)]
pub struct ForgettingConfig {
    /// Query heads `H`.
    pub heads: usize,
    /// Key and value heads; query head `h` reads `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// How scores become weights.
    pub weights: AttentionWeights,
    /// Where the forget gate comes from.
    pub gate: ForgetGate,
    /// Whether the query, key and value projections have a bias.
    pub qkv_bias: bool,
    /// Mix each key with its predecessor.
    pub k_shift: bool,
    /// Mix each value with its predecessor.
    pub v_shift: bool,
    /// Normalise queries and keys per head.
    pub qk_norm: Option<QkNorm>,
    /// Base of the rotary embedding, when there is one.
    pub rope_base: Option<f64>,
    /// Sliding window: a query sees this many keys, itself included.
    pub window: Option<usize>,
    /// Normalise the attention output per head.
    pub output_norm: bool,
    /// Gate the attention output.
    pub output_gate: Option<Activation>,
    /// Adaptive computation pruning: natural log of the share of attention that may be dropped.
    pub log_pruning_tolerance: Option<f64>,
}

impl ForgettingConfig {
    /// A layer with all options off and the data-dependent gate: FoX (LLaMA).
    pub fn fox_llama(heads: usize) -> Self {
        ForgettingConfig {
            heads,
            kv_heads: heads,
            weights: AttentionWeights::Softmax,
            gate: ForgetGate::Full,
            qkv_bias: false,
            k_shift: false,
            v_shift: false,
            qk_norm: None,
            rope_base: None,
            window: None,
            output_norm: false,
            output_gate: None,
            log_pruning_tolerance: None,
        }
    }

    /// FoX (Pro): QK-norm, output norm and gate, key and value shift.
    pub fn fox_pro(heads: usize) -> Self {
        ForgettingConfig {
            k_shift: true,
            v_shift: true,
            qk_norm: Some(QkNorm::PerHead),
            output_norm: true,
            output_gate: Some(Activation::Sigmoid),
            ..Self::fox_llama(heads)
        }
    }

    /// Stick-breaking instead of the softmax: order comes from the sticks, so there is no RoPE.
    /// Applies to any variant; gates, where there are any, multiply the weights.
    #[must_use]
    pub fn stick_breaking(self) -> Self {
        ForgettingConfig { weights: AttentionWeights::StickBreaking, rope_base: None, ..self }
    }

    /// The Transformer: RoPE instead of forgetting. Applies to either variant.
    #[must_use]
    pub fn without_forgetting(self) -> Self {
        ForgettingConfig { gate: ForgetGate::None, rope_base: Some(500_000.0), ..self }
    }
}

/// Where the forget gate comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ForgetGate {
    /// Nothing is forgotten.
    None,
    /// From the input: `sigmoid(w_f . x + b_f)`.
    Full,
    /// From the input, one gate for all heads: an ablation.
    Shared,
    /// A learned constant per head.
    BiasOnly {
        /// How the constants start; at a gate of one half without.
        decay_time: Option<DecayTime>,
    },
    /// A constant per head that is stored, but not learned.
    Fixed {
        /// How the constants are set.
        decay_time: Option<DecayTime>,
    },
}

/// The heads' memory lengths: geometric from `min` (head 0) to `max` (last head), in tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecayTime {
    /// Of the first head.
    pub min: f64,
    /// Of the last head.
    pub max: f64,
}

impl DecayTime {
    /// Biases `[heads]` such that head `h` forgets `1 / T_h` nat per token, `T_h` being its memory length.
    pub fn gate_biases(&self, heads: usize) -> Vec<f32> {
        let (low, high) = (self.min.ln(), self.max.ln());
        let bias = |h: usize| {
            let share = if heads > 1 { h as f64 / (heads - 1) as f64 } else { 0.0 };
            let decay = 1.0 / (low + (high - low) * share).exp();
            -decay.exp_m1().ln() as f32
        };
        (0..heads).map(bias).collect()
    }
}

/// Whether the heads have norm weights of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// Weights of the full width.
    PerHead,
    /// One vector of `head_dim` weights for all heads.
    Shared,
}

/// The file formats, by their `model_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelType {
    /// `forgetting_transformer-project_fox`: FoX with every published option.
    OfficialFox,
    /// `transformer-project_fox`: the LLaMA-style baseline, with window and grouped heads.
    OfficialTransformer,
    /// `forgetting_transformer`: flash-linear-attention's FoX.
    FlaFox,
    /// `transformer`: flash-linear-attention's Transformer.
    FlaTransformer,
    /// `delta_net-project_fox`: DeltaNet.
    OfficialDeltaNet,
    /// `hgrn2-project_fox`: HGRN2, whose lower bounds have no effect.
    OfficialHgrn2,
    /// `mamba2-project_fox`: Mamba-2.
    OfficialMamba2,
    /// `delta_net`: flash-linear-attention's DeltaNet.
    FlaDeltaNet,
    /// `gated_deltanet`: flash-linear-attention's Gated DeltaNet.
    FlaGatedDeltaNet,
    /// `hgrn2`: flash-linear-attention's HGRN2, with lower bounds.
    FlaHgrn2,
    /// `mamba2`: flash-linear-attention's Mamba-2.
    FlaMamba2,
    /// `fox`: the official fields and names, every one with effect. For combinations that no
    /// reference has, such as FoX with grouped heads; the references refuse it.
    Native,
}

/// How tensors are named and cut in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// The official FoX repository's.
    Official,
    /// flash-linear-attention's.
    Fla,
}

impl ModelType {
    /// Every format.
    pub const ALL: [ModelType; 12] = [
        ModelType::OfficialFox,
        ModelType::OfficialTransformer,
        ModelType::FlaFox,
        ModelType::FlaTransformer,
        ModelType::OfficialDeltaNet,
        ModelType::OfficialHgrn2,
        ModelType::OfficialMamba2,
        ModelType::FlaDeltaNet,
        ModelType::FlaGatedDeltaNet,
        ModelType::FlaHgrn2,
        ModelType::FlaMamba2,
        ModelType::Native,
    ];

    /// The value of the field `model_type`.
    pub fn as_str(self) -> &'static str {
        match self {
            ModelType::OfficialFox => "forgetting_transformer-project_fox",
            ModelType::OfficialTransformer => "transformer-project_fox",
            ModelType::FlaFox => "forgetting_transformer",
            ModelType::FlaTransformer => "transformer",
            ModelType::OfficialDeltaNet => "delta_net-project_fox",
            ModelType::OfficialHgrn2 => "hgrn2-project_fox",
            ModelType::OfficialMamba2 => "mamba2-project_fox",
            ModelType::FlaDeltaNet => "delta_net",
            ModelType::FlaGatedDeltaNet => "gated_deltanet",
            ModelType::FlaHgrn2 => "hgrn2",
            ModelType::FlaMamba2 => "mamba2",
            ModelType::Native => "fox",
        }
    }

    /// How its tensors are named.
    pub fn layout(self) -> Layout {
        match self {
            ModelType::FlaFox
            | ModelType::FlaTransformer
            | ModelType::FlaDeltaNet
            | ModelType::FlaGatedDeltaNet
            | ModelType::FlaHgrn2
            | ModelType::FlaMamba2 => Layout::Fla,
            ModelType::OfficialFox
            | ModelType::OfficialTransformer
            | ModelType::OfficialDeltaNet
            | ModelType::OfficialHgrn2
            | ModelType::OfficialMamba2
            | ModelType::Native => Layout::Official,
        }
    }
}

impl ModelConfig {
    /// Number of heads, and the width of their queries, or of their values in Mamba-2.
    pub fn heads(&self) -> (usize, usize) {
        match &self.mixer {
            MixerConfig::Forgetting(mixer) => (mixer.heads, self.hidden_size / mixer.heads),
            MixerConfig::Delta(mixer) => (mixer.value_heads, mixer.key_dim),
            MixerConfig::Hgrn2(mixer) => (mixer.heads, mixer.expand_ratio),
            MixerConfig::Mamba2(mixer) => (mixer.heads, mixer.head_dim),
        }
    }

    /// Width of a head `d`; see [`ModelConfig::heads`].
    pub fn head_dim(&self) -> usize {
        self.heads().1
    }

    /// Whether blocks have an MLP.
    pub fn has_mlp(&self) -> bool {
        !matches!(self.mixer, MixerConfig::Mamba2(_))
    }

    /// Width of the MLP `I`; 0 without one.
    pub fn mlp_width(&self) -> usize {
        if self.has_mlp() { self.mlp.width(self.hidden_size) } else { 0 }
    }

    /// The token whose embedding starts at 0 and is not trained.
    pub(crate) fn untrained_token(&self) -> Option<usize> {
        // The Mamba-2 of the references trains it like any other.
        self.tokens.pad.filter(|_| self.has_mlp())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decay_times_are_geometric_and_give_the_decay_they_name() {
        let bias = DecayTime { min: 2.0, max: 128.0 }.gate_biases(4);
        for (h, b) in bias.iter().enumerate() {
            let log_gate = -(-f64::from(*b)).exp().ln_1p();
            let want = -1.0 / (2.0 * 4f64.powi(h as i32));
            assert!((log_gate / want - 1.0).abs() < 1e-5, "head {h}: {log_gate} {want}");
        }
        assert_eq!(DecayTime { min: 2.0, max: 9.0 }.gate_biases(1).len(), 1);
    }
}
