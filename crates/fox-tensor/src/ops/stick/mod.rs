//! Stick-breaking attention.
//!
//! Operands, options and results are those of [`AttentionOps`](crate::AttentionOps); the op on the tape is
//! [`Tape::attend`](crate::Tape::attend).

pub(crate) mod cases;
mod naive;

pub(crate) use cases::cases;

use crate::{Acp, AttentionGrads, AttentionInputs, AttentionOut, AttentionSpec, Result, Tensor};

/// Natural logarithm of a remaining stick that is treated as 0, with or without pruning: smaller values underflow f32.
pub const LOG_STICK_FLOOR: f32 = -104.0;

impl AttentionSpec {
    /// Logarithm of the mass that stick-breaking may drop: a row skips a block of keys and all older ones when the
    /// remaining stick, decay included, is below it.
    pub fn stick_tolerance(&self) -> f32 {
        match self.acp {
            Acp::Off => LOG_STICK_FLOOR,
            Acp::On { log_tolerance, .. } => log_tolerance.max(LOG_STICK_FLOOR),
        }
    }
}

/// Stick-breaking attention on a device.
pub trait StickOps {
    /// Stick-breaking attention, `o_i = sum_{j < i} w_ij v_j` over the visible keys before `i`, with `w_ij = b_ij prod_{j < l < i} (1 - b_il) exp(c_i - c_j)` and
    /// `b_ij = sigmoid(q_i . k_j * scale)`. The weights of a row add up to at most 1 and are not
    /// normalised. The mask is causal. Blocks of keys are visited from the newest to the oldest; a
    /// block of queries stops where [`AttentionSpec::stick_tolerance`] lets all its rows.
    fn stick_breaking_fwd(
        &self,
        inputs: &AttentionInputs<'_>,
        spec: &AttentionSpec,
    ) -> Result<AttentionOut>;
    /// Gradients of `stick_breaking_fwd`, from its result.
    fn stick_breaking_bwd(
        &self,
        d_out: &Tensor,
        inputs: &AttentionInputs<'_>,
        out: &AttentionOut,
        spec: &AttentionSpec,
    ) -> Result<AttentionGrads>;
}
