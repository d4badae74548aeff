//! The loss on the tape.

use crate::tape::{Tape, Var};
use crate::{IGNORE_LABEL, IdRange, LossInputs, Result, Tensor};

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
        const OP: &str = "linear_cross_entropy";
        self.check_matrix(OP, "x", x.value())?;
        self.check_matrix(OP, "weight", w.value())?;
        let (rows, width, vocab) = (x.value().rows(), x.value().cols(), w.value().rows());
        w.value().expect_shape(OP, "weight", &[vocab, width])?;
        self.check_ids(OP, "labels", labels, IdRange { vocab, ignore: Some(IGNORE_LABEL) })?;
        labels.expect_shape(OP, "labels", &[rows])?;
        self.check(OP, "weights", weights, &[rows])?;
        let weights = self.recording.then_some(weights);
        let inputs = LossInputs { x: x.value(), w: w.value(), labels, weights };
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
