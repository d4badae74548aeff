//! Several narrow linear layers of one input (gates, shifts) as one GEMM. Separately, each would read the input and, in
//! the backward, read and write its gradient again.

use fox_tensor::{DType, LinearGroupOps, Tensor};

use super::{GATE_WIDTH, GemmShape, plain, transposed};
use crate::Result;
use crate::backend::storage::{Data, expect_f32};
use crate::backend::{Cuda, Operand};
use crate::ops::columns::{ColumnBlock, JoinedColumns};

/// Maximum number of weights in a group.
const MAX_WEIGHTS: usize = 4;

/// Total columns of a group, padded to a multiple of 8 for aligned GEMM operands.
fn padded(widths: impl Iterator<Item = usize>) -> usize {
    widths.sum::<usize>().next_multiple_of(8)
}

impl Cuda {
    /// Whether these weights are computed as one GEMM.
    pub(crate) fn is_group(&self, x: &Tensor, weights: &[&Tensor]) -> bool {
        let narrow = weights.iter().all(|w| w.rows() <= GATE_WIDTH);
        // The copy kernels count elements in 31 bits.
        let small = x.rows().max(x.cols()) < (i32::MAX as usize) / (MAX_WEIGHTS * GATE_WIDTH);
        let several = (2..=MAX_WEIGHTS).contains(&weights.len());
        several && narrow && small && !self.is_thin(x.rows(), x.cols())
    }

    /// `y_i[R, N_i]` in f32.
    pub(crate) fn group_forward(&self, x: &Tensor, weights: &[&Tensor]) -> Result<Vec<Tensor>> {
        let (rows, inner) = (x.rows(), x.cols());
        let widths = || weights.iter().map(|w| w.rows());
        let n = padded(widths());
        let joined = self.joined_weights(weights, n, inner)?;
        let y = Data::alloc(&self.gpu, rows * n, DType::F32)?;
        let x_at = self.activation(x)?;
        let sizes = GemmShape { m: rows, n, k: inner };
        let (left, right) = (plain(x_at.address()), transposed(joined.address()));
        // SAFETY: the operands are validated at entry; `joined` and `y` are allocated with the sizes of the product.
        unsafe { self.multiply(left, right, y.address(), sizes, DType::F32, false)? };
        let (mut outs, mut blocks) = (Vec::new(), Vec::new());
        for width in widths() {
            let (out, address) = self.output([rows, width], DType::F32, x.device())?;
            outs.push(out);
            blocks.push(ColumnBlock { address, width, add: false });
        }
        let columns = JoinedColumns { address: y.address(), dtype: DType::F32, rows, width: n };
        // SAFETY: `y` has `n` columns, at least as many as the outputs together.
        unsafe { self.split_into(&columns, &blocks)? };
        Ok(outs)
    }

    /// Concatenated gradients `[R, n]` in the type of activations, and `n`.
    fn joined_gradients(&self, dys: &[&Tensor]) -> Result<(Data, usize)> {
        let widths = || dys.iter().map(|dy| dy.cols());
        let (rows, n, dtype) = (dys[0].rows(), padded(widths()), self.activations());
        let joined = Data::alloc(&self.gpu, rows * n, dtype)?;
        let columns = JoinedColumns { address: joined.address(), dtype, rows, width: n };
        // SAFETY: `joined` has `rows` rows of `n` values, and `n` is at least the sum of the widths.
        unsafe { self.join_f32(dys, columns)? };
        Ok((joined, n))
    }

    /// Stacked weights `[n, inner]`, zero-padded.
    fn joined_weights(&self, weights: &[&Tensor], n: usize, inner: usize) -> Result<Data> {
        let dtype = self.activations();
        let joined = Data::alloc(&self.gpu, n * inner, dtype)?;
        let columns = JoinedColumns { address: joined.address(), dtype, rows: 1, width: n * inner };
        // In the type of operands: trained weights need no conversion.
        let own = weights.iter().map(|w| self.weights(w)).collect::<Result<Vec<_>>>()?;
        let block = |(w, operand): (&&Tensor, &Operand<'_>)| ColumnBlock {
            address: operand.address(),
            width: w.len(),
            add: false,
        };
        let blocks: Vec<ColumnBlock> = weights.iter().zip(&own).map(block).collect();
        // SAFETY: `joined` has `n` rows of `inner` values, and `n` is at least the number of rows of the weights.
        unsafe { self.join_from(&columns, &blocks, dtype)? };
        Ok(joined)
    }

    /// Copies matrices, converted to f32 first, to the columns of `joined`.
    ///
    /// # Safety
    /// `joined` must be a live matrix, at least as wide as all matrices together.
    unsafe fn join_f32(&self, matrices: &[&Tensor], joined: JoinedColumns) -> Result<()> {
        let own = matrices.iter().map(|x| self.real(x)).collect::<Result<Vec<_>>>()?;
        let block = |(x, operand): (&&Tensor, &Operand<'_>)| ColumnBlock {
            address: operand.address(),
            width: x.len() / joined.rows.max(1),
            add: false,
        };
        let blocks: Vec<ColumnBlock> = matrices.iter().zip(&own).map(block).collect();
        // SAFETY: the caller's promise.
        unsafe { self.join_from(&joined, &blocks, DType::F32) }
    }
}

impl LinearGroupOps for Cuda {
    fn linear_group_fwd(
        &self,
        x: &Tensor,
        weights: &[&Tensor],
    ) -> fox_tensor::Result<Option<Vec<Tensor>>> {
        fox_tensor::check_linear_group_fwd(self, x, weights)?;
        if !self.is_group(x, weights) {
            return Ok(None);
        }
        Ok(Some(self.timed("narrow linear fwd", || self.group_forward(x, weights))?))
    }

    fn linear_group_bwd_input(
        &self,
        dys: &[&Tensor],
        weights: &[&Tensor],
        acc: Option<Tensor>,
    ) -> fox_tensor::Result<Tensor> {
        fox_tensor::check_linear_group_bwd_input(self, dys, weights, acc.as_ref())?;
        let _span = self.span("narrow linear bwd input")?;
        let (dy, n) = self.joined_gradients(dys)?;
        let (rows, inner) = (dys[0].rows(), weights[0].cols());
        let joined = self.joined_weights(weights, n, inner)?;
        let (dx, at, add) = self.sum_of(acc, [rows, inner], self.activations(), dys[0].device())?;
        let sizes = GemmShape { m: rows, n: inner, k: n };
        let (left, right) = (plain(dy.address()), plain(joined.address()));
        // SAFETY: the operands are validated at entry; `dy` and `joined` are allocated with the sizes of the product.
        unsafe { self.multiply(left, right, at, sizes, dx.dtype(), add)? };
        Ok(dx)
    }

    fn linear_group_bwd_weight(
        &self,
        dys: &[&Tensor],
        x: &Tensor,
        accs: Vec<Option<Tensor>>,
    ) -> fox_tensor::Result<Vec<Tensor>> {
        fox_tensor::check_linear_group_bwd_weight(self, dys, x, &accs)?;
        let mut present = accs.iter().flatten();
        present.try_for_each(|acc| expect_f32("linear_group_bwd_weight", "acc", acc))?;
        let _span = self.span("narrow linear bwd weight")?;
        let (dy, n) = self.joined_gradients(dys)?;
        let (rows, inner) = (x.rows(), x.cols());
        let joined = Data::alloc(&self.gpu, n * inner, DType::F32)?;
        let x_at = self.activation(x)?;
        let sizes = GemmShape { m: n, n: inner, k: rows };
        let (left, right) = (transposed(dy.address()), plain(x_at.address()));
        // SAFETY: the operands are validated at entry; `dy` and `joined` are allocated with the sizes of the product.
        unsafe { self.multiply(left, right, joined.address(), sizes, DType::F32, false)? };
        // Stacked weights are contiguous: column blocks of a single row.
        let (mut dws, mut blocks) = (Vec::with_capacity(dys.len()), Vec::new());
        for (dy, acc) in dys.iter().zip(accs) {
            let (dw, address, add) =
                self.sum_of(acc, [dy.cols(), inner], DType::F32, x.device())?;
            blocks.push(ColumnBlock { address, width: dw.len(), add });
            dws.push(dw);
        }
        let (address, width) = (joined.address(), n * inner);
        let columns = JoinedColumns { address, dtype: DType::F32, rows: 1, width };
        // SAFETY: the gradients have at most `n` rows of `inner` values together.
        unsafe { self.split_into(&columns, &blocks)? };
        Ok(dws)
    }
}
