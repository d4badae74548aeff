//! Gated linear units.

pub(crate) mod cases;
mod naive;
mod tape;

use crate::{Activation, Result, Tensor};

/// A device's gated linear unit.
pub trait GluOps {
    /// `act(g) * u` for `x = [g | u]` of shape `[R, 2 I]`.
    fn glu_fwd(&self, x: &Tensor, act: Activation) -> Result<Tensor>;
    /// `dx[R, 2 I]`.
    fn glu_bwd(&self, dy: &Tensor, x: &Tensor, act: Activation) -> Result<Tensor>;
}
