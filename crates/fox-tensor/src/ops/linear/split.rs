//! A linear layer whose output is divided by columns into separate matrices.

use super::{LinearOps, check_linear_fwd};
use crate::check::Operands;
use crate::tape::{Slot, Tape, Var};
use crate::{Backend, ColumnOps, Result, Tensor};

/// [`LinearOps::linear_split_fwd`] by copies of columns.
pub fn linear_split_fwd_by_copies<B: LinearOps + ColumnOps + ?Sized>(
    backend: &B,
    x: &Tensor,
    w: &Tensor,
    widths: &[usize],
) -> Result<Vec<Tensor>> {
    backend.split_columns(&backend.linear_fwd(x, w, None)?, widths)
}

/// [`LinearOps::linear_split_bwd_input`] by copies of columns.
pub fn linear_split_bwd_input_by_copies<B: LinearOps + ColumnOps + ?Sized>(
    backend: &B,
    dys: &[Tensor],
    w: &Tensor,
    acc: Option<Tensor>,
) -> Result<Tensor> {
    backend.linear_bwd_input(&backend.join_columns(dys)?, w, acc)
}

/// [`LinearOps::linear_split_bwd_weight`] by copies of columns.
pub fn linear_split_bwd_weight_by_copies<B: LinearOps + ColumnOps + ?Sized>(
    backend: &B,
    dys: &[Tensor],
    x: &Tensor,
    acc: Option<Tensor>,
) -> Result<Tensor> {
    backend.linear_bwd_weight(&backend.join_columns(dys)?, x, acc)
}

/// Validates the operands of [`LinearOps::linear_split_fwd`].
pub fn check_linear_split_fwd(
    backend: &dyn Backend,
    x: &Tensor,
    w: &Tensor,
    widths: &[usize],
) -> Result<()> {
    check_linear_fwd(backend, x, w, None)?;
    let (rows, total) = (w.rows(), widths.iter().fold(0, |sum: usize, n| sum.saturating_add(*n)));
    let operands = Operands::new("linear_split", backend);
    operands.require(total == rows && !widths.contains(&0), || {
        format!("widths {widths:?} do not divide the {rows} outputs")
    })
}

/// Validates the operands of [`LinearOps::linear_split_bwd_input`].
pub fn check_linear_split_bwd_input(
    backend: &dyn Backend,
    dys: &[Tensor],
    w: &Tensor,
    acc: Option<&Tensor>,
) -> Result<()> {
    let operands = Operands::new("linear_split_bwd_input", backend);
    let (width, _) = operands.matrix("weight", w)?;
    let total = check_gradients(&operands, dys)?;
    operands.require(total == width, || {
        format!("gradients of {total} outputs for a weight of {width}")
    })?;
    operands.maybe("acc", acc, &[dys[0].rows(), w.cols()])
}

/// Validates the operands of [`LinearOps::linear_split_bwd_weight`].
pub fn check_linear_split_bwd_weight(
    backend: &dyn Backend,
    dys: &[Tensor],
    x: &Tensor,
    acc: Option<&Tensor>,
) -> Result<()> {
    let operands = Operands::new("linear_split_bwd_weight", backend);
    let (rows, inner) = operands.matrix("x", x)?;
    let width = check_gradients(&operands, dys)?;
    operands.require(dys[0].rows() == rows, || {
        format!("gradients of {} rows for an input of {rows}", dys[0].rows())
    })?;
    operands.maybe("acc", acc, &[width, inner])
}

/// Validates gradients of equal row count, at least one: the number of all their columns.
fn check_gradients(operands: &Operands<'_>, dys: &[Tensor]) -> Result<usize> {
    operands.require(!dys.is_empty(), || "there are no gradients".into())?;
    let mut total = 0;
    for dy in dys {
        let (_, own) = operands.matrix("dy", dy)?;
        operands.real("dy", dy, &[dys[0].rows(), own])?;
        total += own;
    }
    Ok(total)
}

impl Tape<'_> {
    /// `x[R, K] w[N, K]^T`, divided by columns into matrices of these widths, which add up to `N`: without copies
    /// where the device can compute them as separate products.
    pub fn linear_split(&mut self, x: &Var, w: &Var, widths: &[usize]) -> Result<Vec<Var>> {
        let outs = self.device.backend().linear_split_fwd(x.value(), w.value(), widths)?;
        let needs_grad = x.needs_grad() || w.needs_grad();
        let vars: Vec<Var> = outs.into_iter().map(|y| self.output(y, needs_grad)).collect();
        let outs: Vec<_> = vars.iter().map(|y| (y.slot, y.value.shape())).collect();
        let (x_slot, w_slot) = (x.slot, w.slot);
        let (device, x, w) = (self.device.clone(), x.saved(), w.saved());
        self.push(move |flow| {
            let Some(dys) = flow.take_all(&outs, &device)? else { return Ok(()) };
            let backend = device.backend();
            flow.update(x_slot, |acc| backend.linear_split_bwd_input(&dys, &w.get()?, acc))?;
            drop(w);
            if w_slot == Slot::None {
                return Ok(());
            }
            let device = device.clone();
            x.use_later(x_slot != Slot::None, flow, move |x, flow| {
                flow.update(w_slot, |acc| device.backend().linear_split_bwd_weight(&dys, x, acc))
            })
        });
        Ok(vars)
    }
}
