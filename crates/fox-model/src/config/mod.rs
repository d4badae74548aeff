//! What a model is: sizes, options, and the rules they must obey.
//!
//! [`ModelConfig`] is independent of any file format. [`ModelType`] names the formats:
//! `read` turns their config.json into a [`ModelConfig`], `write` turns it back.

mod fields;
mod presets;
mod read;
mod relaxed_json;
mod validate;
mod write;

use fox_tensor::Activation;

pub use presets::{PRESETS, Preset};

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
    /// Softmax attention, with or without forgetting.
    Forgetting(ForgettingConfig),
}

/// Options of the attention layer. FoX and the Transformer are the same layer with other options.
#[derive(Clone, Debug, PartialEq)]
pub struct ForgettingConfig {
    /// Query heads `H`.
    pub heads: usize,
    /// Key and value heads; query head `h` reads `h / (heads / kv_heads)`.
    pub kv_heads: usize,
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
    /// Adaptive computation pruning: natural log of the softmax mass that may be dropped.
    pub log_pruning_tolerance: Option<f64>,
}

impl ForgettingConfig {
    /// A layer with all options off and the data-dependent gate: FoX (LLaMA).
    pub fn fox_llama(heads: usize) -> Self {
        ForgettingConfig {
            heads,
            kv_heads: heads,
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
    pub const ALL: [ModelType; 5] = [
        ModelType::OfficialFox,
        ModelType::OfficialTransformer,
        ModelType::FlaFox,
        ModelType::FlaTransformer,
        ModelType::Native,
    ];

    /// The value of the field `model_type`.
    pub fn as_str(self) -> &'static str {
        match self {
            ModelType::OfficialFox => "forgetting_transformer-project_fox",
            ModelType::OfficialTransformer => "transformer-project_fox",
            ModelType::FlaFox => "forgetting_transformer",
            ModelType::FlaTransformer => "transformer",
            ModelType::Native => "fox",
        }
    }

    /// How its tensors are named.
    pub fn layout(self) -> Layout {
        match self {
            ModelType::FlaFox | ModelType::FlaTransformer => Layout::Fla,
            ModelType::OfficialFox | ModelType::OfficialTransformer | ModelType::Native => {
                Layout::Official
            }
        }
    }
}

impl ModelConfig {
    /// Width of a head `d`.
    pub fn head_dim(&self) -> usize {
        let MixerConfig::Forgetting(mixer) = &self.mixer;
        self.hidden_size / mixer.heads
    }

    /// Width of the MLP `I`.
    pub fn mlp_width(&self) -> usize {
        self.mlp.width(self.hidden_size)
    }
}
