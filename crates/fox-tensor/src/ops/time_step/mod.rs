//! Time steps and log decays of Mamba2.

pub(crate) mod cases;
mod naive;
mod tape;

use crate::{Result, Tensor};

/// Operands of the time step: `dt = clamp(softplus(z + bias))`, `log_decay = -exp(a_log) dt`.
#[derive(Clone, Debug)]
pub struct TimeStepInputs<'a> {
    /// `[R, H]`.
    pub z: &'a Tensor,
    /// `[H]`.
    pub bias: &'a Tensor,
    /// `[H]`.
    pub a_log: &'a Tensor,
    /// Smallest and largest time step.
    pub limits: (f32, f32),
}

/// A device's time steps.
pub trait TimeStepOps {
    /// `(dt, log_decay)`, both `[R, H]`.
    fn time_step_fwd(&self, inputs: &TimeStepInputs<'_>) -> Result<(Tensor, Tensor)>;
    /// `(dz[R, H], da_log[H])` from the gradients of `dt` and `log_decay`, if there are any. The
    /// bias has the column sums of `dz`.
    fn time_step_bwd(
        &self,
        ddt: Option<&Tensor>,
        dlog_decay: Option<&Tensor>,
        inputs: &TimeStepInputs<'_>,
    ) -> Result<(Tensor, Tensor)>;
}
