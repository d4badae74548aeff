//! Splitting a matrix by columns, and the inverse.

use crate::cases::{Case, Output};
use crate::check::Operands;
use crate::naive::{Naive, matrix};
use crate::tape::{Tape, Var};
use crate::{Backend, Result, Tensor};

/// Slices and concatenation of columns on a device.
pub trait ColumnOps {
    /// Splits `x[R, C]` into matrices of these widths, which add up to `C`.
    fn split_columns(&self, x: &Tensor, widths: &[usize]) -> Result<Vec<Tensor>>;
    /// Concatenates matrices of equal row count along their columns: the inverse and the gradient of `split_columns`.
    fn join_columns(&self, matrices: &[Tensor]) -> Result<Tensor>;
}

/// Validates the operands of [`ColumnOps::split_columns`].
pub fn check_split_columns(backend: &dyn Backend, x: &Tensor, widths: &[usize]) -> Result<()> {
    let operands = Operands::new("split_columns", backend);
    let (_, cols) = operands.matrix("x", x)?;
    let total = widths.iter().fold(0, |sum: usize, width| sum.saturating_add(*width));
    operands.require(total == cols, || format!("widths {widths:?} do not add up to {cols}"))
}

/// Validates the operands of [`ColumnOps::join_columns`].
pub fn check_join_columns(backend: &dyn Backend, matrices: &[Tensor]) -> Result<()> {
    let operands = Operands::new("join_columns", backend);
    operands.require(!matrices.is_empty(), || "there are no matrices".into())?;
    for x in matrices {
        let (_, cols) = operands.matrix("input", x)?;
        operands.real("input", x, &[matrices[0].rows(), cols])?;
    }
    Ok(())
}

impl Tape<'_> {
    /// Splits `x[R, C]` into matrices of these widths.
    pub fn split_columns(&mut self, x: &Var, widths: &[usize]) -> Result<Vec<Var>> {
        let outputs = self.device.backend().split_columns(x.value(), widths)?;
        let outputs: Vec<Var> =
            outputs.into_iter().map(|out| self.output(out, x.needs_grad())).collect();
        let outs: Vec<_> = outputs.iter().map(|out| (out.slot, out.value.shape())).collect();
        let (x_slot, device) = (x.slot, self.device.clone());
        self.push(move |flow| {
            let Some(grads) = flow.take_all(&outs, &device)? else { return Ok(()) };
            flow.add(x_slot, device.backend().join_columns(&grads)?)
        });
        Ok(outputs)
    }
}

impl ColumnOps for Naive {
    fn split_columns(&self, x: &Tensor, widths: &[usize]) -> Result<Vec<Tensor>> {
        check_split_columns(self, x, widths)?;
        let (data, mut first) = (matrix(x)?, 0);
        let mut slice = |&width: &usize| {
            let rows = (0..data.rows).flat_map(|r| &data.row(r)[first..first + width]);
            let values = rows.copied().collect();
            first += width;
            self.tensor(x.device(), values, [data.rows, width])
        };
        Ok(widths.iter().map(&mut slice).collect())
    }

    fn join_columns(&self, matrices: &[Tensor]) -> Result<Tensor> {
        check_join_columns(self, matrices)?;
        let data = matrices.iter().map(matrix).collect::<Result<Vec<_>>>()?;
        let (rows, width) = (data[0].rows, data.iter().map(|m| m.cols).sum());
        let row = |r: usize| data.iter().flat_map(move |m| m.row(r));
        let values = (0..rows).flat_map(row).copied().collect();
        Ok(self.tensor(matrices[0].device(), values, [rows, width]))
    }
}

pub(crate) fn cases() -> Vec<Case> {
    vec![columns()]
}

/// One of the slices gets no gradient.
fn columns() -> Case {
    Case::new("columns/113x40", |tape, args| {
        let slices = tape.split_columns(args.var("x")?, &[7, 1, 24, 8])?;
        let mut names = ["a", "b", "c"].into_iter();
        let used = slices.into_iter().enumerate().filter(|(n, _)| *n != 1);
        Ok(used.map(|(_, slice)| Output::Var(names.next().unwrap_or("d"), slice)).collect())
    })
    .normal("x", &[113, 40])
}
