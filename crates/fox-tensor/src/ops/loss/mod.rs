//! The output projection and its cross-entropy.

mod cases;
mod naive;
mod tape;

use crate::check::Operands;
use crate::{Backend, IdRange, Result, Tensor};
pub(crate) use cases::cases;

/// The label that is not predicted: its row has loss 0 and no gradient.
pub const IGNORE_LABEL: i32 = -100;

/// Bytes of logits, or of their gradients, that a GPU holds at once in [`LossOps::linear_cross_entropy`] unless a single
/// row has more: about 6,000 rows of 50,304 in bf16.
pub const LOSS_CHUNK_BYTES: usize = 576 << 20;

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
    /// The teacher of distillation, if any.
    pub teacher: Option<Teacher<'a>>,
}

/// The teacher of distillation: a second model over the same vocabulary. With weight `a` the gradient is that of
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
    /// Gradient of `sum_r weights[r] * loss[r]`, or of the objective of [`Teacher`], with respect to `x` and the
    /// projection; present when there are weights.
    pub grads: Option<(Tensor, Tensor)>,
}

/// The loss on a device.
pub trait LossOps {
    /// Cross-entropy of `softmax(x w^T)` against `labels`, a chunk of rows at a time. With `weights`, also
    /// the gradient of the weighted sum of losses.
    fn linear_cross_entropy(&self, inputs: &LossInputs<'_>) -> Result<LossOut>;
}

/// Validates the operands of [`LossOps::linear_cross_entropy`].
pub fn check_linear_cross_entropy(backend: &dyn Backend, inputs: &LossInputs<'_>) -> Result<()> {
    let operands = Operands::new("linear_cross_entropy", backend);
    let (rows, width) = operands.matrix("x", inputs.x)?;
    let (vocab, _) = operands.matrix("weight", inputs.w)?;
    operands.real("weight", inputs.w, &[vocab, width])?;
    operands.require(width > 0 && vocab > 0, || format!("a projection of {vocab} x {width}"))?;
    operands.ids("labels", inputs.labels, IdRange { vocab, ignore: Some(IGNORE_LABEL) })?;
    inputs.labels.expect_shape("linear_cross_entropy", "labels", &[rows])?;
    operands.maybe("weights", inputs.weights, &[rows])?;
    if let Some(Teacher { x, w, .. }) = inputs.teacher {
        let (_, width) = operands.matrix("the teacher's x", x)?;
        operands.real("the teacher's x", x, &[rows, width])?;
        operands.real("the teacher's weight", w, &[vocab, width])?;
        operands.require(width > 0, || "the teacher's x has no columns".into())?;
    }
    Ok(())
}
