//! Linear layers whose outputs are separate matrices: a product for each, with its rows of the weight, instead of one
//! product and copies of columns. The copies would take as long as the narrower products do.

use fox_tensor::{
    DType, Tensor, linear_split_bwd_input_by_copies, linear_split_bwd_weight_by_copies,
    linear_split_fwd_by_copies,
};

use super::{GATE_WIDTH, GemmShape, plain, transposed};
use crate::backend::Cuda;

/// Alignment of operands that the heuristic of cuBLASLt assumes, in bytes.
const ALIGNMENT: usize = 256;

/// Whether the first rows of these outputs in a weight `[N, inner]` are aligned, in bf16 and so in f32.
fn is_aligned(widths: impl Iterator<Item = usize>, inner: usize) -> bool {
    widths
        .scan(0, |first, width| {
            let own = *first;
            *first += width;
            Some(own)
        })
        .all(|first| (first * inner * DType::Bf16.size()).is_multiple_of(ALIGNMENT))
}

impl Cuda {
    /// Expects validated operands.
    pub(super) fn split_forward(
        &self,
        x: &Tensor,
        w: &Tensor,
        widths: &[usize],
    ) -> fox_tensor::Result<Vec<Tensor>> {
        let (rows, inner) = (x.rows(), x.cols());
        if self.is_thin(rows, inner) || !is_aligned(widths.iter().copied(), inner) {
            return linear_split_fwd_by_copies(self, x, w, widths);
        }
        let _span = self.span("linear split fwd")?;
        let device = x.device();
        let (x, w) = (self.activation(x)?, self.weights(w)?);
        let (mut outs, mut from) = (Vec::with_capacity(widths.len()), w.address());
        for &width in widths {
            let dtype = if width <= GATE_WIDTH { DType::F32 } else { self.activations() };
            let (y, at) = self.output([rows, width], dtype, device)?;
            let sizes = GemmShape { m: rows, n: width, k: inner };
            // SAFETY: the widths add up to the rows of `w`; the output has the sizes of the product.
            unsafe {
                self.multiply(plain(x.address()), transposed(from), at, sizes, dtype, false)?
            };
            outs.push(y);
            from += (width * inner * self.activations().size()) as u64;
        }
        Ok(outs)
    }

    /// Expects validated operands.
    pub(super) fn split_input_gradient(
        &self,
        dys: &[Tensor],
        w: &Tensor,
        acc: Option<Tensor>,
    ) -> fox_tensor::Result<Tensor> {
        let (rows, inner) = (dys[0].rows(), w.cols());
        if !is_aligned(dys.iter().map(Tensor::cols), inner) {
            return linear_split_bwd_input_by_copies(self, dys, w, acc);
        }
        let _span = self.span("linear split bwd input")?;
        let (dx, at, mut add) =
            self.sum_of(acc, [rows, inner], self.activations(), dys[0].device())?;
        let w = self.weights(w)?;
        let mut from = w.address();
        for dy in dys {
            let sizes = GemmShape { m: rows, n: inner, k: dy.cols() };
            let operand = self.activation(dy)?;
            // SAFETY: the gradients have as many columns together as `w` has rows; the result has the product's sizes.
            unsafe {
                let (left, right) = (plain(operand.address()), plain(from));
                self.multiply(left, right, at, sizes, dx.dtype(), add)?;
            }
            add = true;
            from += (dy.cols() * inner * self.activations().size()) as u64;
        }
        Ok(dx)
    }

    /// Expects validated operands.
    pub(super) fn split_weight_gradient(
        &self,
        dys: &[Tensor],
        x: &Tensor,
        acc: Option<Tensor>,
    ) -> fox_tensor::Result<Tensor> {
        let (rows, inner) = (x.rows(), x.cols());
        let width = dys.iter().map(Tensor::cols).sum();
        if !is_aligned(dys.iter().map(Tensor::cols), inner) {
            return linear_split_bwd_weight_by_copies(self, dys, x, acc);
        }
        let _span = self.span("linear split bwd weight")?;
        let (dw, mut at, add) = self.sum_of(acc, [width, inner], DType::F32, x.device())?;
        let x = self.activation(x)?;
        for dy in dys {
            let sizes = GemmShape { m: dy.cols(), n: inner, k: rows };
            let operand = self.activation(dy)?;
            // SAFETY: the result has as many rows as the gradients have columns together.
            unsafe {
                let (left, right) = (transposed(operand.address()), plain(x.address()));
                self.multiply(left, right, at, sizes, dw.dtype(), add)?;
            }
            at += (dy.cols() * inner * dw.dtype().size()) as u64;
        }
        Ok(dw)
    }
}
