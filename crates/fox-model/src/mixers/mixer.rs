//! Token mixers: options as plain data, and the layer that they declare.

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

use fox_cache::{AttentionStateSpec, LayerState};
use fox_tensor::{DecodeMixer, ParamId, Result as TensorResult, Segments, Tape, Tensor, Var};

use super::StateSpec;
use super::forgetting::{DecayTime, ForgettingConfig, ForgettingLayer};
use crate::config::{ModelConfig, Validator};
use crate::observe::Observer;
use crate::params::{Init, ParamGroup, ParamList, Parameters};
use crate::{Pruning, Result};

/// The options of a mixer, and everything that follows from them without a device.
///
/// An implementation is plain data with `#[derive(Clone, Debug, PartialEq)]`. The `model` handed to the
/// methods is the one that the mixer is part of; it gives the sizes that all parts share. All methods but
/// [`MixerConfig::validate`] may rely on a valid configuration.
pub trait MixerConfig: MixerData + Debug + Send + Sync {
    /// Name of a model with this mixer in tables, e.g. `FoX (Pro)`.
    fn name(&self) -> &'static str;

    /// What a file format of another family cannot express; the name, unless the family has a word for all
    /// of its models.
    fn kind(&self) -> &'static str {
        self.name()
    }

    /// Number of heads, and the width of their queries (or whatever width describes them best).
    fn heads(&self, model: &ModelConfig) -> (usize, usize);

    /// Number of heads of keys; fewer than heads when several heads share keys.
    fn key_heads(&self, model: &ModelConfig) -> usize {
        self.heads(model).0
    }

    /// The options, for people.
    fn options(&self, model: &ModelConfig) -> Vec<String>;

    /// Checks every value of this configuration; those of the rest of `model` are checked already.
    fn validate(&self, model: &ModelConfig, validator: &Validator<'_>) -> Result<()>;

    /// The mixer of a layer, where layers have different ones; all other methods are then those of the whole.
    fn at(&self, _layer: usize) -> Option<&dyn MixerConfig> {
        None
    }

    /// Width of the MLP of a block that has one.
    fn mlp_width(&self, model: &ModelConfig, _layer: usize) -> usize {
        model.mlp.width(model.hidden_size)
    }

    /// Declares what the layers of a model share, before the first of them; [`LayerParams::shared`] hands it
    /// to each.
    fn declare_shared(&self, _model: &ModelConfig, _list: &mut ParamList) -> Option<ParamId> {
        None
    }

    /// Declares the parameters of one layer.
    fn declare(&self, model: &ModelConfig, layer: &mut LayerParams<'_>) -> Box<dyn Mixer>;

    /// The decode state of a layer.
    fn state(&self, model: &ModelConfig) -> StateSpec;

    /// FLOPs per token of token mixing in one layer, forward and backward, in sequences of `seq`
    /// tokens. Products with parameters are counted elsewhere.
    fn train_flops(&self, model: &ModelConfig, seq: usize) -> f64;

    /// Whether an MLP follows in each block.
    fn has_mlp(&self) -> bool {
        true
    }

    /// Whether its layers find the beginnings of sequences elsewhere ([`Tape::preceding_rows`]).
    fn continues_sequences(&self) -> bool {
        false
    }

    /// Names of the modules around the mixer.
    fn names(&self) -> BlockNames {
        BlockNames::DEFAULT
    }

    /// Standard deviation of the initial weights of the MLP's second matrix.
    fn mlp_down_std(&self, model: &ModelConfig) -> f64 {
        model.initializer_range
    }

    /// How the output projection starts, where it is not the embedding table.
    fn head_init(&self, model: &ModelConfig) -> Init {
        Init::Normal { std: model.initializer_range, zero_row: None }
    }

    /// Whether the embedding of the pad token is trained like any other, instead of staying 0.
    fn trains_pad(&self) -> bool {
        false
    }

    /// The options of attention, if the mixer is attention.
    fn forgetting(&self) -> Option<&ForgettingConfig> {
        None
    }

    /// The options of attention, if the mixer is attention.
    fn forgetting_mut(&mut self) -> Option<&mut ForgettingConfig> {
        None
    }
}

/// `Clone` and `PartialEq` of a boxed configuration; every [`MixerConfig`] has it.
pub trait MixerData: Any {
    /// A copy.
    fn boxed(&self) -> Box<dyn MixerConfig>;

    /// Whether the other one is of the same type and equal.
    fn equals(&self, other: &dyn MixerConfig) -> bool;
}

impl<C: MixerConfig + Clone + PartialEq> MixerData for C {
    fn boxed(&self) -> Box<dyn MixerConfig> {
        Box::new(self.clone())
    }

    fn equals(&self, other: &dyn MixerConfig) -> bool {
        other.downcast_ref::<C>() == Some(self)
    }
}

impl dyn MixerConfig {
    /// The configuration itself, if it is of type `C`.
    pub fn downcast_ref<C: MixerConfig>(&self) -> Option<&C> {
        let any: &dyn Any = self;
        any.downcast_ref()
    }
}

impl Clone for Box<dyn MixerConfig> {
    fn clone(&self) -> Self {
        (**self).boxed()
    }
}

impl PartialEq for dyn MixerConfig {
    fn eq(&self, other: &Self) -> bool {
        self.equals(other)
    }
}

// Needed by `#[derive(PartialEq)]` of a struct with such a box: rust-lang/rust#31740.
impl PartialEq<&Self> for Box<dyn MixerConfig> {
    fn eq(&self, other: &&Self) -> bool {
        self.equals(&***other)
    }
}

/// One layer of a model: where its parameters are, and how it computes.
pub trait Mixer: Debug + Send + Sync {
    /// `x: [R, D]`, the normalised residual stream, to `[R, D]`.
    ///
    /// `state` is what [`MixerConfig::state`] asked for: `None` in training, where sequences begin with the
    /// first row of their segment. What a step leaves in it is staged there and becomes current when all
    /// layers have succeeded.
    fn forward(
        &self,
        tape: &mut Tape<'_>,
        x: &Var,
        context: &MixerContext<'_>,
        state: Option<&mut LayerState>,
    ) -> TensorResult<MixerOutput>;

    /// Values that a training step saves for the backward pass.
    fn saved_activations(&self) -> SavedActivations;

    /// The layer's weights for devices that decode a model in slots; `None` if it only runs op by op. `thresholds`
    /// are those of the cache's eviction policy, per query head.
    fn decode_weights(
        &self,
        _params: &Parameters,
        _thresholds: Option<Arc<[f64]>>,
    ) -> Option<DecodeMixer> {
        None
    }

    /// The biases of its data-dependent gates, and values with which its heads have these memory lengths.
    fn gate_biases(&self, _time: DecayTime) -> Vec<(ParamId, Vec<f32>)> {
        Vec::new()
    }

    /// The attention layer, if the mixer is one.
    fn attention(&self) -> Option<&ForgettingLayer> {
        None
    }

    /// Per query head, what no logit exceeds, for eviction; `None` without forget gates. `norm` are the weights of the
    /// block's norm, and `shape` is the layer's state.
    fn logit_bounds(
        &self,
        shape: &AttentionStateSpec,
        params: &Parameters,
        norm: ParamId,
    ) -> TensorResult<Option<Vec<f64>>> {
        self.attention().map_or(Ok(None), |layer| layer.logit_bounds(shape, params, norm))
    }
}

/// Operands of a mixer besides its input.
#[derive(Clone, Copy)]
pub struct MixerContext<'a> {
    /// The values of all parameters; see [`Parameters::var`].
    pub params: &'a Parameters,
    /// Queries and keys of each sequence; with a cache, the keys are the cache's rows.
    pub segments: &'a Segments,
    /// Which attention blocks may be skipped.
    pub pruning: Pruning,
    /// Factor on the angles of RoPE, instead of the configured one.
    pub rope_strength: Option<f64>,
    /// Callback for the operands of attention, and the number of the layer.
    pub observer: Option<(&'a dyn Observer, usize)>,
}

/// The output of a mixer.
#[derive(Debug)]
pub struct MixerOutput {
    /// `[R, D]`, to be added to the residual stream.
    pub out: Var,
    /// Attention tiles visited and in total, `[H, 4]` i32; `None` without attention.
    pub tiles: Option<Tensor>,
}

impl From<Var> for MixerOutput {
    /// The output of a mixer without attention.
    fn from(out: Var) -> Self {
        MixerOutput { out, tiles: None }
    }
}

/// Declares the parameters of one layer.
#[derive(Debug)]
pub struct LayerParams<'a> {
    /// Number of the layer, from 0.
    pub index: usize,
    /// Prefix of its parameters' names, e.g. `model.layers.0.attn`.
    pub prefix: &'a str,
    /// The parameter that [`MixerConfig::declare_shared`] declared.
    pub shared: Option<ParamId>,
    /// The declarations of the model.
    pub list: &'a mut ParamList,
}

impl LayerParams<'_> {
    /// A matrix `name.weight` with weight decay and normal initialization.
    pub fn matrix(&mut self, name: &str, (rows, cols): (usize, usize), std: f64) -> ParamId {
        let name = format!("{}.{name}.weight", self.prefix);
        self.list.matrix(ParamGroup::Mixer, name, rows, cols, std)
    }

    /// A matrix `name.weight` with weight decay and uniform initialization.
    pub fn uniform(&mut self, name: &str, dims: (usize, usize), bound: f64) -> ParamId {
        let name = format!("{}.{name}.weight", self.prefix);
        self.list.uniform_matrix(ParamGroup::Mixer, name, dims, bound)
    }

    /// A vector without weight decay, every element `start`.
    pub fn vector(&mut self, name: &str, len: usize, start: f32) -> ParamId {
        self.push(name, &[len], false, Init::Constant(start))
    }

    /// Any parameter that is trained.
    pub fn push(&mut self, name: &str, dims: &[usize], decay: bool, init: Init) -> ParamId {
        let name = format!("{}.{name}", self.prefix);
        self.list.push(ParamGroup::Mixer, name, dims.to_vec(), decay, init)
    }
}

/// Values per token (not bytes) that a training step saves for the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedActivations {
    /// All of them.
    pub per_token: usize,
    /// How many of these belong to ops that a GPU runs again in the backward pass instead.
    pub cheap_per_token: usize,
}

/// Names of the modules around the mixers in files: `STEM.layers.0.NORM.weight` and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockNames {
    /// The model without its output projection.
    pub stem: &'static str,
    /// The norm in front of a mixer.
    pub mixer_norm: &'static str,
    /// The mixer.
    pub mixer: &'static str,
    /// The norm after the last block.
    pub final_norm: &'static str,
}

impl BlockNames {
    /// Those of most models.
    pub const DEFAULT: BlockNames =
        BlockNames { stem: "model", mixer_norm: "attn_norm", mixer: "attn", final_norm: "norm" };
}
