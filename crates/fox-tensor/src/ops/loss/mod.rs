//! The output projection and its cross-entropy.

pub(crate) mod cases;
mod naive;
mod tape;

use crate::{Result, Tensor};

/// The label that is not predicted: its row has loss 0 and no gradient.
pub const IGNORE_LABEL: i32 = -100;

/// Operands of `linear_cross_entropy`.
#[derive(Clone, Copy, Debug)]
pub struct LossInputs<'a> {
    /// `[R, C]`.
    pub x: &'a Tensor,
    /// The output projection `[V, C]`.
    pub w: &'a Tensor,
    /// `[R]` i32, each a valid index or [`IGNORE_LABEL`].
    pub labels: &'a Tensor,
    /// Weights of the losses `[R]`, when gradients are wanted.
    pub weights: Option<&'a Tensor>,
}

/// Result of the fused output projection and cross-entropy.
#[derive(Clone, Debug)]
pub struct LossOut {
    /// Loss of every row `[R]`, unweighted; 0 where the label is ignored.
    pub loss: Tensor,
    /// Gradient of `sum_r weights[r] * loss[r]` with respect to `x` and the projection; present
    /// when asked for.
    pub grads: Option<(Tensor, Tensor)>,
}

/// A device's loss.
pub trait LossOps {
    /// Cross-entropy of `softmax(x w^T)` against `labels`, never holding all logits. With `weights`, also
    /// the gradient of the weighted sum of losses.
    fn linear_cross_entropy(&self, inputs: &LossInputs<'_>) -> Result<LossOut>;
}
