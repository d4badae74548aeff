//! Columns of a matrix, apart and side by side.

pub(crate) mod cases;
mod naive;
mod tape;

use crate::{Result, Tensor};

/// A device's copies of columns.
pub trait ColumnOps {
    /// Columns of `x[R, C]`, cut into parts of these widths, which add up to `C`.
    fn split_columns(&self, x: &Tensor, widths: &[usize]) -> Result<Vec<Tensor>>;
    /// Parts of equal row count side by side: the inverse, and the gradient, of `split_columns`.
    fn join_columns(&self, parts: &[Tensor]) -> Result<Tensor>;
}
