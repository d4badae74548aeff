//! The output of a mixer: `rms_groups(x; norm) * act(gate)`, either part optional.

pub(crate) mod cases;
mod naive;
mod tape;

use crate::{Activation, Result, Tensor};

/// Operands of `gated_norm`: `y = rms_groups(x; norm) * act(gate)`, either part optional.
#[derive(Clone, Debug)]
pub struct GatedNormInputs<'a> {
    /// Input `[R, C]`.
    pub x: &'a Tensor,
    /// Norm weights `[C]`.
    pub norm: Option<&'a Tensor>,
    /// Gate logits `[R, C]`.
    pub gate: Option<&'a Tensor>,
    /// Groups of channels normalised on their own (the heads).
    pub groups: usize,
    /// Epsilon inside the norm's square root.
    pub eps: f32,
    /// Nonlinearity of the gate.
    pub act: Activation,
}

/// Gradients of the gated norm.
#[derive(Clone, Debug)]
pub struct GatedNormGrads {
    /// `[R, C]`.
    pub dx: Tensor,
    /// Gradient of the gate logits `[R, C]`; present when there is a gate.
    pub dgate: Option<Tensor>,
    /// Gradient of the norm weights `[C]`; present when there are some.
    pub dnorm: Option<Tensor>,
}

/// A device's gated norm.
pub trait GatedNormOps {
    /// `rms_groups(x; norm) * act(gate)`, either part optional.
    fn gated_norm_fwd(&self, inputs: &GatedNormInputs<'_>) -> Result<Tensor>;
    /// Gradients of `gated_norm_fwd`.
    fn gated_norm_bwd(&self, dy: &Tensor, inputs: &GatedNormInputs<'_>) -> Result<GatedNormGrads>;
}
