//! Decode steps of a whole model, for devices that do it in fewer launches than op by op: an optional
//! ability.

use crate::{Activation, PagedKeys, Result, Rope, Segments, Tensor};

/// Decode steps in fewer launches than op by op; see [`Caps`](crate::Caps).
pub trait DecodeOps {
    /// One decode step of a whole model; `None` where the device has no such way for this model, with
    /// nothing changed.
    fn decode_step(&self, step: DecodeStep<'_>) -> Result<Option<DecodeOut>>;
}

/// A query, key or value projection of a [`DecodeBlock`].
#[derive(Clone, Debug)]
pub struct DecodeProjection<'a> {
    /// `[heads * d, D]`.
    pub weight: &'a Tensor,
    /// `[heads * d]`.
    pub bias: Option<&'a Tensor>,
    /// Weights of the shift coefficient `[heads, D]`.
    pub shift: Option<&'a Tensor>,
    /// Norm weights `[heads * d]` or `[d]`.
    pub norm: Option<&'a Tensor>,
    /// The raw rows of the step before `[.., heads * d]`, one for each sequence in order; none without a
    /// shift.
    pub last: Vec<&'a Tensor>,
}

/// A FoX model, one new token for each sequence: everything that [`DecodeOps::decode_step`] needs. `D` is the width of the model.
#[derive(Debug)]
pub struct DecodeStep<'a> {
    /// The embedded tokens `[batch, D]`.
    pub h: &'a Tensor,
    /// Where the new tokens and all keys, the new ones included, lie.
    pub segments: &'a Segments,
    /// What the blocks have in common.
    pub shape: DecodeShape,
    /// The blocks, in order.
    pub blocks: Vec<DecodeBlock<'a>>,
    /// Weights of the norm after the last block `[D]`.
    pub norm: &'a Tensor,
    /// The output projection `[V, D]`.
    pub head: &'a Tensor,
}

/// What all blocks of a model have in common.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecodeShape {
    /// Query heads.
    pub heads: usize,
    /// Key heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Sliding window.
    pub window: Option<usize>,
    /// The rotation of queries and keys.
    pub rope: Option<Rope>,
    /// Epsilon of the norms of the stream and of the output norm.
    pub norm_eps: f32,
    /// Epsilon of the norms of queries and keys.
    pub qk_eps: f32,
    /// Nonlinearity of the output gate.
    pub output_act: Activation,
    /// Nonlinearity of the MLP.
    pub mlp_act: Activation,
}

/// A block of a [`DecodeStep`].
#[derive(Debug)]
pub struct DecodeBlock<'a> {
    /// Weights of the norm in front of the mixer `[D]`.
    pub mixer_norm: &'a Tensor,
    /// Queries.
    pub q: DecodeProjection<'a>,
    /// Keys.
    pub k: DecodeProjection<'a>,
    /// Values.
    pub v: DecodeProjection<'a>,
    /// Weights `[H, D]` and bias `[H]` of the forget gate.
    pub gate: Option<(&'a Tensor, &'a Tensor)>,
    /// Weights of the output gate `[D, D]`.
    pub output_gate: Option<&'a Tensor>,
    /// Weights of the output norm `[D]`.
    pub output_norm: Option<&'a Tensor>,
    /// `[D, D]`.
    pub o_proj: &'a Tensor,
    /// Weights of the norm in front of the MLP `[D]`.
    pub mlp_norm: &'a Tensor,
    /// `[2 I, D]`.
    pub gate_up: &'a Tensor,
    /// `[D, I]`.
    pub down: &'a Tensor,
    /// Keys, values and gates of the past; the new ones are written.
    pub keys: DecodeKeys<'a>,
}

/// Where keys, values and gates of the past lie.
#[derive(Debug)]
pub enum DecodeKeys<'a> {
    /// In rows that the segments name.
    Rows {
        /// Keys `[rows, H_kv * d]`.
        k: &'a mut Tensor,
        /// Values `[rows, H_kv * d]`.
        v: &'a mut Tensor,
        /// Log forget gates `[rows, H]`.
        gates: Option<&'a mut Tensor>,
    },
    /// In pages, for each sequence, with room for one more key that nobody shares.
    Pages(Vec<&'a mut dyn PagedKeys>),
}

/// Result of a decode step.
#[derive(Debug)]
pub struct DecodeOut {
    /// `[batch, V]`.
    pub logits: Tensor,
    /// Per block, the raw rows of this step.
    pub last: Vec<LastRows>,
    /// With pages, the new log gates `[blocks * batch, H]`.
    pub log_gates: Option<Tensor>,
}

/// Raw rows of keys and values, in tensors like those of [`DecodeProjection::last`].
#[derive(Debug)]
pub struct LastRows {
    /// Of keys.
    pub k: Vec<Tensor>,
    /// Of values.
    pub v: Vec<Tensor>,
}
