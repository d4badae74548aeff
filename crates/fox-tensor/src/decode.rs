//! One decode step of a whole block, for devices that do it in fewer launches than op by op.

use crate::{Activation, Rope, Segments, Tensor};

/// A query, key or value projection of a [`DecodeBlock`].
#[derive(Clone, Copy, Debug)]
pub struct DecodeProjection<'a> {
    /// `[heads * d, D]`.
    pub weight: &'a Tensor,
    /// `[heads * d]`.
    pub bias: Option<&'a Tensor>,
    /// Weights of the shift coefficient `[heads, D]`.
    pub shift: Option<&'a Tensor>,
    /// Norm weights `[heads * d]` or `[d]`.
    pub norm: Option<&'a Tensor>,
    /// The raw row of the step before `[batch, heads * d]`, with a shift.
    pub last: Option<&'a Tensor>,
    /// Whether its heads are rotated.
    pub rope: bool,
}

/// A block of a FoX model, one new token for each sequence: everything that
/// [`Backend::decode_block`](crate::Backend::decode_block) needs. `D` is the width of the model.
#[derive(Debug)]
pub struct DecodeBlock<'a> {
    /// The residual stream `[batch, D]` and its last addend, not yet added.
    pub h: &'a Tensor,
    /// As above; the first block has none.
    pub delta: Option<&'a Tensor>,
    /// Weights of the norm in front of the mixer `[D]`.
    pub mixer_norm: &'a Tensor,
    /// Epsilon of the norms of the stream and of the output norm.
    pub norm_eps: f32,
    /// Query heads.
    pub heads: usize,
    /// Key heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Sliding window.
    pub window: Option<usize>,
    /// Queries.
    pub q: DecodeProjection<'a>,
    /// Keys.
    pub k: DecodeProjection<'a>,
    /// Values.
    pub v: DecodeProjection<'a>,
    /// Epsilon of the norms of queries and keys.
    pub qk_eps: f32,
    /// The rotation.
    pub rope: Option<Rope>,
    /// Weights `[H, D]` and bias `[H]` of the forget gate.
    pub gate: Option<(&'a Tensor, &'a Tensor)>,
    /// Weights of the output gate `[D, D]`.
    pub output_gate: Option<&'a Tensor>,
    /// Its nonlinearity.
    pub output_act: Activation,
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
    /// The MLP's nonlinearity.
    pub mlp_act: Activation,
    /// Where the new tokens and all keys, the new ones included, lie.
    pub segments: &'a Segments,
    /// Keys `[rows, H_kv * d]`; the new ones are written.
    pub k_cache: &'a mut Tensor,
    /// Values, likewise.
    pub v_cache: &'a mut Tensor,
    /// Log forget gates `[rows, H]`, likewise.
    pub gate_cache: Option<&'a mut Tensor>,
}

/// Result of a decode step of a block.
#[derive(Debug)]
pub struct DecodeOut {
    /// The residual stream before the MLP is added `[batch, D]`.
    pub h: Tensor,
    /// The MLP's output `[batch, D]`.
    pub delta: Tensor,
    /// Raw key rows of this step `[batch, H_kv * d]`, with a shift.
    pub last_k: Option<Tensor>,
    /// Raw value rows, likewise.
    pub last_v: Option<Tensor>,
}
