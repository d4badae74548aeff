//! Wall attention: softmax attention whose keys decay per channel.
//!
//! ```text
//! s_ij = scale sum_n q_in k_jn exp(G_in - G_jn) + c_i - c_j      G, c = cumulative sums of log decays, log gates
//! o_i = sum_j softmax_j(s_ij) v_j                                 j <= i, and i - j < window
//! ```
//!
//! Decays are per query head and channel, gates per query head. A key is not decayed by its own decay, so the first
//! decay of a sequence has no effect. A key whose channels have decayed to 0 has logit 0, not `-inf`: its content is
//! forgotten, its weight in the softmax is not.
//!
//! Scores are products of factors `exp(log_decay) <= 1`, never `exp(-G)`: any decay is exact, and underflow to 0 is
//! right. Keys come in blocks of [`WALL_BLOCK`]; keys of older blocks are decayed to the end of their block, and a query
//! decays from block to block.
//!
//! `R_q` and `R_k` are rows of queries and keys, `H` heads, `d` the head dim.

pub(crate) mod cases;
mod naive;
mod tape;

pub(crate) use cases::cases;
pub use tape::WallVars;

use crate::check::Operands;
use crate::{
    AttentionInputs, AttentionOut, AttentionSpec, Backend, Mask, Result, Tensor,
    check_attention_bwd, check_attention_fwd,
};

/// Keys of a block.
pub const WALL_BLOCK: usize = 64;

/// Operands of Wall attention.
#[derive(Clone, Debug)]
pub struct WallInputs<'a> {
    /// Queries `[R_q, H * d]`.
    pub q: &'a Tensor,
    /// Keys `[R_k, H_kv * d]`.
    pub k: &'a Tensor,
    /// Values `[R_k, H_kv * d]`.
    pub v: &'a Tensor,
    /// Log decays of the key rows `[R_k, H * d]`, all <= 0.
    pub log_decays: &'a Tensor,
    /// Log forget gates of the key rows `[R_k, H]`, all <= 0; not scaled.
    pub log_gates: Option<&'a Tensor>,
}

impl<'a> WallInputs<'a> {
    /// The operands that forgetting attention has as well.
    pub fn attention(&self) -> AttentionInputs<'a> {
        AttentionInputs { q: self.q, k: self.k, v: self.v, log_gates: self.log_gates }
    }
}

/// A full block of past keys in its own frame, which later tokens do not change.
#[derive(Clone, Copy, Debug)]
pub struct WallBlock<'a> {
    /// Keys decayed to the end of the block `[WALL_BLOCK, H * d]`.
    pub k: &'a Tensor,
    /// Values `[WALL_BLOCK, H_kv * d]`.
    pub v: &'a Tensor,
    /// Product of the decays of the block, not their logarithm `[1, H * d]`.
    pub decay: &'a Tensor,
    /// Log forget gates `[WALL_BLOCK, H]`.
    pub log_gates: Option<&'a Tensor>,
}

/// Result of the backward pass.
#[derive(Clone, Debug)]
pub struct WallGrads {
    /// `[R_q, H * d]`.
    pub dq: Tensor,
    /// `[R_k, H_kv * d]`.
    pub dk: Tensor,
    /// `[R_k, H_kv * d]`.
    pub dv: Tensor,
    /// `[R_k, H * d]`.
    pub dlog_decays: Tensor,
    /// `[R_k, H]`; present when there are gates.
    pub dlog_gates: Option<Tensor>,
}

/// Wall attention on a device.
pub trait WallOps {
    /// Wall attention with the causal mask. `past` has the full blocks before each segment's keys, oldest first, one
    /// list per segment, or is empty.
    ///
    /// [`Acp`](crate::Acp) skips key blocks by the forget gates, as in forgetting attention. Without gates and without a
    /// window no key may be dropped; there a device may sum blocks instead: with `eps = exp(log_tolerance) / 2`, keys
    /// whose logits are all provably within `eps` of 0 get logit 0, which changes an output by at most
    /// `(exp(2 eps) - 1) max|v|`.
    fn wall_attention_fwd(
        &self,
        inputs: &WallInputs<'_>,
        past: &[Vec<WallBlock<'_>>],
        spec: &AttentionSpec,
    ) -> Result<AttentionOut>;

    /// Gradients of `wall_attention_fwd` without past blocks, from its result.
    fn wall_attention_bwd(
        &self,
        d_out: &Tensor,
        inputs: &WallInputs<'_>,
        out: &AttentionOut,
        spec: &AttentionSpec,
    ) -> Result<WallGrads>;

    /// Closes a block: `(k, decay)` of a [`WallBlock`] from keys `[WALL_BLOCK, H_kv * d]` and log decays
    /// `[WALL_BLOCK, H * d]`.
    fn wall_close_block(
        &self,
        k: &Tensor,
        log_decays: &Tensor,
        head_dim: usize,
    ) -> Result<(Tensor, Tensor)>;
}

/// Validates the operands of [`WallOps::wall_attention_fwd`].
pub fn check_wall_attention_fwd(
    backend: &dyn Backend,
    inputs: &WallInputs<'_>,
    past: &[Vec<WallBlock<'_>>],
    spec: &AttentionSpec,
) -> Result<()> {
    check_attention_fwd(backend, &inputs.attention(), spec)?;
    let operands = Operands::new("wall_attention", backend);
    operands.require(spec.mask == Mask::Causal && spec.full_sequence.is_none(), || {
        "Wall attention is causal and has all keys of a sequence; use the causal mask".into()
    })?;
    let (width, kv_width) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
    operands.real("log_decays", inputs.log_decays, &[inputs.k.rows(), width])?;
    operands.require(past.is_empty() || past.len() == spec.segments.len(), || {
        format!("past blocks of {} sequences for {} segments", past.len(), spec.segments.len())
    })?;
    for block in past.iter().flatten() {
        operands.real("past k", block.k, &[WALL_BLOCK, width])?;
        operands.real("past v", block.v, &[WALL_BLOCK, kv_width])?;
        operands.real("past decay", block.decay, &[1, width])?;
        operands.maybe("past log_gates", block.log_gates, &[WALL_BLOCK, spec.heads])?;
        operands.require(block.log_gates.is_some() == inputs.log_gates.is_some(), || {
            "either all keys have log gates or none".into()
        })?;
    }
    Ok(())
}

/// Validates the operands of [`WallOps::wall_attention_bwd`].
pub fn check_wall_attention_bwd(
    backend: &dyn Backend,
    d_out: &Tensor,
    inputs: &WallInputs<'_>,
    out: &AttentionOut,
    spec: &AttentionSpec,
) -> Result<()> {
    check_wall_attention_fwd(backend, inputs, &[], spec)?;
    check_attention_bwd(backend, d_out, &inputs.attention(), out, spec)
}

/// Validates the operands of [`WallOps::wall_close_block`].
pub fn check_wall_close_block(
    backend: &dyn Backend,
    k: &Tensor,
    log_decays: &Tensor,
    head_dim: usize,
) -> Result<()> {
    let operands = Operands::new("wall_close_block", backend);
    let ((_, kv_width), (_, width)) =
        (operands.matrix("k", k)?, operands.matrix("log_decays", log_decays)?);
    operands.real("k", k, &[WALL_BLOCK, kv_width])?;
    operands.real("log_decays", log_decays, &[WALL_BLOCK, width])?;
    let fits = head_dim > 0
        && kv_width > 0
        && width > 0
        && kv_width.is_multiple_of(head_dim)
        && width.is_multiple_of(kv_width);
    operands.require(fits, || {
        format!(
            "decays of width {width} do not fit keys of width {kv_width} with head dim {head_dim}"
        )
    })
}
