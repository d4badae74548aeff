//! `prepare_heads`: token shift, per-head RMS norm and RoPE of a projection.
//!
//! `R` is a number of rows (tokens), `H` heads, `d` the head dim.

mod cases;
mod naive;
mod rope;
mod tape;

use crate::check::Operands;
use crate::{Backend, Result, Segments, Tensor};
pub(crate) use cases::cases;
pub use rope::{Rope, RopeScaling};

/// Operands of `prepare_heads`: token shift, then per-head RMS norm, then RoPE.
#[derive(Clone, Debug)]
pub struct HeadInputs<'a> {
    /// Raw projection `[R, H * d]`.
    pub u: &'a Tensor,
    /// Logits of the shift coefficient `[R, H]`: `a = sigmoid(.)` weighs the previous row of `u`.
    pub shift: Option<&'a Tensor>,
    /// The row of `u` before each segment's first `[segments, H * d]`; zeros when absent.
    pub prev: Option<&'a Tensor>,
    /// Norm weights, `[H * d]`, or `[d]` shared by the heads.
    pub norm: Option<&'a Tensor>,
}

/// Options of `prepare_heads`. Rows outside every segment come out as zeros.
#[derive(Clone, Debug)]
pub struct HeadSpec {
    /// Number of heads `H`.
    pub heads: usize,
    /// Width of a head `d`.
    pub head_dim: usize,
    /// Epsilon inside the norm's square root.
    pub norm_eps: f32,
    /// Rotary embedding, with positions counted from each segment's first key.
    pub rope: Option<Rope>,
    /// The sequences (query rows).
    pub segments: Segments,
}

/// Gradients of `prepare_heads`.
#[derive(Clone, Debug)]
pub struct HeadGrads {
    /// Gradient of the raw projection, shape of `u`.
    pub du: Tensor,
    /// Gradient of the shift logits.
    pub dshift: Option<Tensor>,
    /// Gradient of the norm weights.
    pub dnorm: Option<Tensor>,
}

/// Preparation of queries, keys and values on a device.
pub trait HeadOps {
    /// Token shift, per-head RMS norm, RoPE: `[R, H * d]`.
    fn prepare_heads_fwd(&self, inputs: &HeadInputs<'_>, spec: &HeadSpec) -> Result<Tensor>;
    /// Gradients of `prepare_heads_fwd`; everything is recomputed from the inputs.
    fn prepare_heads_bwd(
        &self,
        dy: &Tensor,
        inputs: &HeadInputs<'_>,
        spec: &HeadSpec,
    ) -> Result<HeadGrads>;
}

/// Validates the operands of [`HeadOps::prepare_heads_fwd`].
pub fn check_prepare_heads_fwd(
    backend: &dyn Backend,
    inputs: &HeadInputs<'_>,
    spec: &HeadSpec,
) -> Result<()> {
    let operands = Operands::new("prepare_heads", backend);
    let (heads, d, segments) = (spec.heads, spec.head_dim, &spec.segments);
    let (rows, width) = (inputs.u.rows(), heads.saturating_mul(d));
    operands.real("u", inputs.u, &[rows, width])?;
    operands.require(width > 0, || format!("{heads} heads of width {d}"))?;
    operands.maybe("shift", inputs.shift, &[rows, heads])?;
    operands.maybe("prev", inputs.prev, &[segments.len(), width])?;
    if let Some(norm) = inputs.norm {
        operands.head_weights("norm", norm, d, width)?;
    }
    operands.require(spec.rope.is_none() || d.is_multiple_of(2), || {
        format!("RoPE needs an even head dim, not {d}")
    })?;
    operands.segments(segments, rows, usize::MAX)
}

/// Validates the operands of [`HeadOps::prepare_heads_bwd`].
pub fn check_prepare_heads_bwd(
    backend: &dyn Backend,
    dy: &Tensor,
    inputs: &HeadInputs<'_>,
    spec: &HeadSpec,
) -> Result<()> {
    check_prepare_heads_fwd(backend, inputs, spec)?;
    Operands::new("prepare_heads_bwd", backend).real("dy", dy, inputs.u.dims())
}
