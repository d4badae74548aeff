//! The loss on the tape.

use crate::tape::{Tape, Var};
use crate::{IGNORE_LABEL, IdRange, LossInputs, Result, Teacher, Tensor};

impl Tape<'_> {
    /// The loss of every row `[R]` of `softmax(x[R, C] w[V, C]^T)` against `labels[R]`.
    ///
    /// The objective that [`Tape::backward`] starts from is `sum_r weights[r] * loss[r]`; a mean is
    /// made by weights of `1 / R`.
    pub fn linear_cross_entropy(
        &mut self,
        x: &Var,
        w: &Var,
        labels: &Tensor,
        weights: &Tensor,
    ) -> Result<Tensor> {
        self.distillation_cross_entropy(x, w, labels, weights, None)
    }

    /// [`Tape::linear_cross_entropy`] whose objective is partly that of a [`Teacher`]. The losses are those of the
    /// labels as before.
    pub fn distillation_cross_entropy(
        &mut self,
        x: &Var,
        w: &Var,
        labels: &Tensor,
        weights: &Tensor,
        teacher: Option<Teacher<'_>>,
    ) -> Result<Tensor> {
        const OP: &str = "linear_cross_entropy";
        self.check_matrix(OP, "x", x.value())?;
        self.check_matrix(OP, "weight", w.value())?;
        let (rows, width, vocab) = (x.value().rows(), x.value().cols(), w.value().rows());
        w.value().expect_shape(OP, "weight", &[vocab, width])?;
        self.check_ids(OP, "labels", labels, IdRange { vocab, ignore: Some(IGNORE_LABEL) })?;
        labels.expect_shape(OP, "labels", &[rows])?;
        self.check(OP, "weights", weights, &[rows])?;
        if let Some(teacher) = &teacher {
            self.check_matrix(OP, "the teacher's x", teacher.x)?;
            let width = teacher.x.cols();
            self.check(OP, "the teacher's x", teacher.x, &[rows, width])?;
            self.check(OP, "the teacher's weight", teacher.w, &[vocab, width])?;
        }
        let weights = self.recording.then_some(weights);
        let inputs = LossInputs { x: x.value(), w: w.value(), labels, weights, teacher };
        let result = self.device.backend().linear_cross_entropy(&inputs)?;
        let (x_slot, w_slot) = (x.slot, w.slot);
        if let Some((dx, dw)) = result.grads {
            self.push(move |flow| {
                flow.add(x_slot, dx)?;
                flow.add(w_slot, dw)
            });
        }
        Ok(result.loss)
    }
}
