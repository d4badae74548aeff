//! Stick-breaking attention.
//!
//! Operands, options and results are those of [`AttentionOps`](crate::AttentionOps), and so is the
//! way onto the tape, [`Tape::attend`](crate::Tape::attend).

pub(crate) mod cases;
mod naive;

pub(crate) use cases::cases;

use crate::{Acp, AttentionGrads, AttentionInputs, AttentionOut, AttentionSpec, Result, Tensor};

/// Natural logarithm of a rest of a stick that counts as nothing, pruning or not: there is no
/// smaller positive f32.
pub const LOG_STICK_FLOOR: f32 = -104.0;

impl AttentionSpec {
    /// The logarithm of the mass that stick-breaking may drop: a row is done with a block of keys,
    /// and all older ones, when so little of its stick, decay included, is left for them.
    pub fn stick_tolerance(&self) -> f32 {
        match self.acp {
            Acp::Off => LOG_STICK_FLOOR,
            Acp::On { log_tolerance, .. } => log_tolerance.max(LOG_STICK_FLOOR),
        }
    }
}

/// A device's stick-breaking attention.
pub trait StickOps {
    /// Stick-breaking attention, `o_i = sum_{j < i} w_ij v_j` over the keys that `i` sees but
    /// itself, with `w_ij = b_ij prod_{j < l < i} (1 - b_il) exp(c_i - c_j)` and
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
