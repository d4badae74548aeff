//! PaTH attention: softmax attention with a product of reflections between query and key (arXiv 2505.16381).
//!
//! `R_q` and `R_k` are rows of queries and keys, `H` query heads, `H_kv` key heads, `d` the head dim.

pub(crate) mod cases;
mod naive;
mod tape;

pub(crate) use cases::cases;
pub use tape::PathVars;

use crate::check::Operands;
use crate::{
    AttentionInputs, AttentionOut, AttentionSpec, Backend, Mask, Result, Tensor,
    check_attention_fwd,
};

/// Keys of a block: reflections of a block are applied together. Also the queries of a tile, cut at the same positions.
pub const PATH_BLOCK: usize = 64;

/// Largest head dim of PaTH attention.
pub const PATH_MAX_HEAD_DIM: usize = 128;

/// Operands of PaTH attention,
///
/// ```text
/// s_ij = scale * q_i^T M_i M_{i-1} ... M_{j+1} k_j + c_i - c_j,  j <= i        M_t = I - u_t u_t^T
/// o_i = sum_j softmax_j(s_ij) v_j                                              c = cumsum(log_gates)
/// ```
///
/// with `|u_t|^2` between 0 and 2, so that no `M_t` makes a vector longer. A key is not reflected by its own `u`.
#[derive(Clone, Debug)]
pub struct PathInputs<'a> {
    /// Queries `[R_q, H * d]`.
    pub q: &'a Tensor,
    /// Keys `[R_k, H_kv * d]`.
    pub k: &'a Tensor,
    /// Values `[R_k, H_kv * d]`.
    pub v: &'a Tensor,
    /// Reflections `[R_k, H_kv * d]`; see [`ReflectionOps`](crate::ReflectionOps).
    pub u: &'a Tensor,
    /// Log forget gates of the key rows `[R_k, H]`, all <= 0; `None` means no forgetting.
    pub log_gates: Option<&'a Tensor>,
}

impl<'a> PathInputs<'a> {
    /// All operands but the reflections.
    pub fn attention(&self) -> AttentionInputs<'a> {
        AttentionInputs { q: self.q, k: self.k, v: self.v, log_gates: self.log_gates }
    }
}

/// Result of the backward of PaTH attention.
#[derive(Clone, Debug)]
pub struct PathGrads {
    /// `[R_q, H * d]`.
    pub dq: Tensor,
    /// `[R_k, H_kv * d]`.
    pub dk: Tensor,
    /// `[R_k, H_kv * d]`.
    pub dv: Tensor,
    /// `[R_k, H_kv * d]`.
    pub du: Tensor,
    /// `[R_k, H]`; present when there are gates.
    pub dlog_gates: Option<Tensor>,
}

/// PaTH attention on a device.
///
/// The pruning rule of [`Acp`](crate::Acp) holds unchanged, because reflections make neither queries nor keys longer. A
/// tile has the queries at positions `64 n ..`, and its walk ends at the first block of keys that all of them have
/// forgotten.
pub trait PathOps {
    /// PaTH attention; see [`PathInputs`]. The mask is causal, without a window.
    fn path_attention_fwd(
        &self,
        inputs: &PathInputs<'_>,
        spec: &AttentionSpec,
    ) -> Result<AttentionOut>;
    /// Gradients of `path_attention_fwd`, from its result.
    fn path_attention_bwd(
        &self,
        d_out: &Tensor,
        inputs: &PathInputs<'_>,
        out: &AttentionOut,
        spec: &AttentionSpec,
    ) -> Result<PathGrads>;
}

/// Validates the operands of [`PathOps::path_attention_fwd`].
pub fn check_path_attention_fwd(
    backend: &dyn Backend,
    inputs: &PathInputs<'_>,
    spec: &AttentionSpec,
) -> Result<()> {
    check_attention_fwd(backend, &inputs.attention(), spec)?;
    let operands = Operands::new("path_attention", backend);
    operands.real("u", inputs.u, inputs.k.dims())?;
    operands.require(spec.head_dim <= PATH_MAX_HEAD_DIM, || {
        format!("head dim {} is above {PATH_MAX_HEAD_DIM}", spec.head_dim)
    })?;
    operands.require(spec.mask == Mask::Causal && spec.window.is_none(), || {
        "the mask must be causal, without a window".into()
    })?;
    operands.require(spec.full_sequence.is_none(), || {
        "the keys of a sequence must all be on one device".into()
    })
}

/// Validates the operands of [`PathOps::path_attention_bwd`].
pub fn check_path_attention_bwd(
    backend: &dyn Backend,
    d_out: &Tensor,
    inputs: &PathInputs<'_>,
    out: &AttentionOut,
    spec: &AttentionSpec,
) -> Result<()> {
    check_path_attention_fwd(backend, inputs, spec)?;
    let operands = Operands::new("path_attention_bwd", backend);
    operands.real("d_out", d_out, inputs.q.dims())?;
    operands.real("o", &out.o, inputs.q.dims())?;
    operands.real("lse", &out.lse, &[inputs.q.rows(), spec.heads])?;
    operands.ints("tiles", &out.tiles, &[spec.heads, 4])
}
