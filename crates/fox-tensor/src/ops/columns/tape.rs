//! Columns on the tape.

use crate::tape::{Tape, Var};
use crate::{DType, Error, Result, Tensor};

impl Tape<'_> {
    /// The columns of `x[R, C]`, cut into parts of these widths.
    pub fn split_columns(&mut self, x: &Var, widths: &[usize]) -> Result<Vec<Var>> {
        const OP: &str = "split_columns";
        self.check_matrix(OP, "x", x.value())?;
        if widths.iter().sum::<usize>() != x.value().cols() {
            let detail = format!("widths {widths:?} do not add up to {}", x.value().cols());
            return Err(Error::argument(OP, detail));
        }
        let parts = self.device.backend().split_columns(x.value(), widths)?;
        let parts: Vec<Var> =
            parts.into_iter().map(|part| self.output(part, x.needs_grad())).collect();
        let outs: Vec<_> = parts.iter().map(|part| (part.slot, part.value.shape())).collect();
        let (x_slot, device) = (x.slot, self.device.clone());
        self.push(move |flow| {
            let grads: Vec<Option<Tensor>> =
                outs.iter().map(|(slot, _)| flow.take(*slot)).collect();
            if grads.iter().all(Option::is_none) {
                return Ok(());
            }
            let whole = |(grad, (_, shape)): (Option<Tensor>, &(_, _))| match grad {
                Some(grad) => Ok(grad),
                None => device.zeros(*shape, DType::F32),
            };
            let grads = grads.into_iter().zip(&outs).map(whole).collect::<Result<Vec<_>>>()?;
            flow.add(x_slot, device.backend().join_columns(&grads)?)
        });
        Ok(parts)
    }
}
