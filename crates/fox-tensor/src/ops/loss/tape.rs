//! The loss on the tape.

use crate::check::Operands;
use crate::tape::{Tape, Var};
use crate::{LossInputs, Result, Teacher, Tensor};

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
        // An inference tape does not pass the weights on; they are validated all the same.
        let operands = Operands::new("linear_cross_entropy", self.device.backend());
        operands.real("weights", weights, &[x.value().rows()])?;
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
