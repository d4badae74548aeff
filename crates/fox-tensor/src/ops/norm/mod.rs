//! The residual stream: `h' = h + delta` and its RMS norm.

pub(crate) mod cases;
mod naive;
mod tape;

use crate::{Result, Tensor};

/// Operands of `add_rms_norm`: `h' = h + delta`, `y = h' / sqrt(mean(h'^2) + eps) * w`.
#[derive(Clone, Copy, Debug)]
pub struct NormInputs<'a> {
    /// The residual stream `[R, C]`.
    pub h: &'a Tensor,
    /// What is added to it first `[R, C]`.
    pub delta: Option<&'a Tensor>,
    /// Weights `[C]`.
    pub w: &'a Tensor,
    /// Epsilon inside the square root.
    pub eps: f32,
}

/// Result of `add_rms_norm`.
#[derive(Clone, Debug)]
pub struct NormOut {
    /// `h'` `[R, C]`; without `delta`, `h` itself.
    pub sum: Tensor,
    /// `y` `[R, C]`.
    pub y: Tensor,
    /// `1 / sqrt(mean(h'^2) + eps)` of every row `[R]`.
    pub rstd: Tensor,
}

/// What the backward of `add_rms_norm` starts from.
#[derive(Clone, Copy, Debug)]
pub struct NormSaved<'a> {
    /// [`NormOut::sum`] `[R, C]`.
    pub sum: &'a Tensor,
    /// [`NormOut::rstd`] `[R]`.
    pub rstd: &'a Tensor,
    /// Weights `[C]`.
    pub w: &'a Tensor,
    /// Epsilon inside the square root.
    pub eps: f32,
}

/// Gradients of `add_rms_norm`.
#[derive(Clone, Debug)]
pub struct NormGrads {
    /// Of `h` and of `delta` alike `[R, C]`: `dy` through the norm plus the gradient of `h'`.
    pub dh: Tensor,
    /// `[C]`.
    pub dw: Tensor,
}

/// A device's RMS norm of the residual stream.
pub trait NormOps {
    /// The sum and its norm; see [`NormInputs`].
    fn add_rms_norm_fwd(&self, inputs: &NormInputs<'_>) -> Result<NormOut>;
    /// Gradients from those of `y` and, if there is one, of `h'`; `dw` is added to `dw_acc`.
    fn add_rms_norm_bwd(
        &self,
        dy: &Tensor,
        dsum: Option<Tensor>,
        saved: &NormSaved<'_>,
        dw_acc: Option<Tensor>,
    ) -> Result<NormGrads>;
}
