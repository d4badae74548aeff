//! Model configurations: sizes, options and their validation.
//!
//! [`ModelConfig`] is independent of any file format. `read` turns the config.json of a
//! [`ModelType`](crate::ModelType) into a [`ModelConfig`], `write` turns it back; fields of
//! a mixer are read and written in its folder.

mod fields;
mod presets;
mod read;
mod relaxed_json;
mod validate;
mod write;

use fox_tensor::{Activation, Mask};

use crate::mixers::{MixerConfig, StateSpec, enabled};
pub use fields::Fields;
pub use presets::Preset;
pub use validate::Validator;
pub(crate) use write::{object, whole_or_real};

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
    /// The token mixer of a block.
    pub mixer: Box<dyn MixerConfig>,
    /// Epsilon of the block norms, the final norm and the output norm.
    pub norm_eps: f64,
    /// Standard deviation of the initial weights.
    pub initializer_range: f64,
    /// Whether the output projection is the embedding table.
    pub tie_word_embeddings: bool,
    /// Special token ids.
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

/// Special token ids.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Starts a sequence.
    pub bos: Option<usize>,
    /// Each of them ends a sequence; several in chat models, which also end their turns.
    pub eos: Vec<usize>,
    /// Fills up a batch; its embedding starts at 0 and is not trained.
    pub pad: Option<usize>,
    /// Stands for a token that an encoder is to predict.
    pub mask: Option<usize>,
}

impl ModelConfig {
    /// A model of these sizes with GPT-2's vocabulary and the defaults of the published configurations.
    pub fn with_mixer(
        hidden_size: usize,
        num_layers: usize,
        mixer: impl MixerConfig,
        hidden_ratio: f64,
    ) -> Self {
        ModelConfig {
            vocab_size: 50257,
            hidden_size,
            num_layers,
            mlp: MlpConfig { hidden_ratio, intermediate_size: None, activation: Activation::Silu },
            mixer: Box::new(mixer),
            norm_eps: 1e-6,
            initializer_range: 0.02,
            tie_word_embeddings: false,
            tokens: SpecialTokens::default(),
            max_position_embeddings: 2048,
        }
    }

    /// The same model with a vocabulary of this size.
    #[must_use]
    pub fn with_vocab(self, vocab_size: usize) -> Self {
        ModelConfig { vocab_size, ..self }
    }

    /// The same model with an MLP of this width.
    #[must_use]
    pub fn with_mlp_width(mut self, width: usize) -> Self {
        self.mlp.intermediate_size = Some(width);
        self
    }

    /// The mixer of a layer.
    pub fn mixer_of(&self, layer: usize) -> &dyn MixerConfig {
        self.mixer.at(layer).unwrap_or(&*self.mixer)
    }

    /// The decode state of a layer.
    pub fn state_of(&self, layer: usize) -> StateSpec {
        self.mixer_of(layer).state(self)
    }

    /// The decode states of all layers, in order.
    pub fn state_specs(&self) -> impl Iterator<Item = StateSpec> {
        (0..self.num_layers).map(|layer| self.state_of(layer))
    }

    /// Number of heads, and the width of their queries, or of their values in Mamba-2.
    pub fn heads(&self) -> (usize, usize) {
        self.mixer.heads(self)
    }

    /// Width of a head `d`; see [`ModelConfig::heads`].
    pub fn head_dim(&self) -> usize {
        self.heads().1
    }

    /// Whether every position reads the whole sequence: such a model predicts masked tokens and does not generate.
    pub fn is_encoder(&self) -> bool {
        self.mixer.forgetting().is_some_and(|mixer| mixer.mask == Mask::Bidirectional)
    }

    /// Whether any layer is attention.
    pub fn has_attention(&self) -> bool {
        self.mixer.forgetting().is_some()
    }

    /// Whether blocks have an MLP.
    pub fn has_mlp(&self) -> bool {
        self.mixer.has_mlp()
    }

    /// Width of the MLP `I` of the first block; 0 without one.
    pub fn mlp_width(&self) -> usize {
        self.mlp_width_of(0)
    }

    /// Width of the MLP of a block; 0 without one.
    pub fn mlp_width_of(&self, layer: usize) -> usize {
        if self.has_mlp() { self.mixer.mlp_width(self, layer) } else { 0 }
    }

    /// The options of the model, for people.
    pub fn options(&self) -> Vec<String> {
        let mut words = self.mixer.options(self);
        let more = enabled(&[
            (self.tie_word_embeddings, "tied embeddings"),
            (self.mlp.activation == Activation::Sigmoid, "sigmoid MLP"),
        ]);
        words.extend(more.into_iter().map(String::from));
        words
    }

    /// The token whose embedding starts at 0 and is not trained.
    pub(crate) fn untrained_token(&self) -> Option<usize> {
        self.tokens.pad.filter(|_| !self.mixer.trains_pad())
    }

    /// Deviation of the MLP's second matrix in the official recurrent models: they start with smaller steps,
    /// the deeper they are.
    pub(crate) fn deep_down_std(&self) -> f64 {
        self.initializer_range / (2.0 * self.num_layers as f64).sqrt()
    }
}
