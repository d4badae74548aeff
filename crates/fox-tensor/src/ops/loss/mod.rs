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
    /// Whose distributions the gradient draws to, besides the labels.
    pub teacher: Option<Teacher<'a>>,
}

/// A second model over the same vocabulary. With weight `a` the gradient is that of
///
/// ```text
/// sum_r weights[r] ((1 - a) loss[r] + a KL(teacher_r || student_r))      over the rows with a label
/// ```
///
/// whose gradient of the logits is `weights[r] (student_r - (1 - a) onehot_r - a teacher_r)`.
#[derive(Clone, Copy, Debug)]
pub struct Teacher<'a> {
    /// `[R, C']`.
    pub x: &'a Tensor,
    /// Its output projection `[V, C']`.
    pub w: &'a Tensor,
    /// `a`, between 0 and 1.
    pub weight: f32,
}

/// Result of the fused output projection and cross-entropy.
#[derive(Clone, Debug)]
pub struct LossOut {
    /// Loss of every row `[R]`, unweighted; 0 where the label is ignored.
    pub loss: Tensor,
    /// Gradient of `sum_r weights[r] * loss[r]`, or of what [`Teacher`] says, with respect to `x` and the projection;
    /// present when asked for.
    pub grads: Option<(Tensor, Tensor)>,
}

/// A device's loss.
pub trait LossOps {
    /// Cross-entropy of `softmax(x w^T)` against `labels`, never holding all logits. With `weights`, also
    /// the gradient of the weighted sum of losses.
    fn linear_cross_entropy(&self, inputs: &LossInputs<'_>) -> Result<LossOut>;
}
