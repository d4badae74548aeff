//! Products with weights and their gradients, sums over rows.

use fox_tensor::{DType, Device, Tensor};

use super::launcher::{Op, Variant};
use super::{Cuda, int};
use crate::gemm::{Matrix, Product};
use crate::{Buffer, Result, Source};

/// Projections up to this wide are logits of gates, which stay in f32.
pub(super) const GATE_WIDTH: usize = 64;

/// `c[m, n] = a[m, k] b[k, n]`.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
}

pub(super) fn plain(address: u64) -> Matrix {
    Matrix { address, transposed: false }
}

pub(super) fn transposed(address: u64) -> Matrix {
    Matrix { address, transposed: true }
}

impl Cuda {
    pub(super) fn linear(&self, x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let sizes = Sizes { m: x.rows(), n: w.rows(), k: x.cols() };
        let wide = x.dtype() == DType::F32 || sizes.n <= GATE_WIDTH;
        let dtype = if wide { DType::F32 } else { self.activations() };
        let (y, at) = self.output([sizes.m, sizes.n], dtype, x.device())?;
        let (x, w) = (self.activation(x)?, self.weights(w)?);
        if self.is_thin(sizes.m, sizes.k) {
            self.thin_product(&x, &w, at, [sizes.m, sizes.n, sizes.k], wide)?;
        } else {
            self.multiply(plain(x.address()), transposed(w.address()), at, sizes, dtype, false)?;
        }
        if let Some(bias) = bias {
            let bias = self.real(bias)?;
            let (count, width) = (y.len(), int(sizes.n));
            let args = [at.into(), bias.address().into(), count.into(), width.into()];
            // SAFETY: parameters as declared in columns.cu; the tape checked the shapes.
            unsafe {
                let variant = Variant::plain(dtype, 1);
                self.launch_flat(Source::COLUMNS, "add_bias", variant, count, &args)?;
            }
        }
        Ok(y)
    }

    pub(super) fn linear_input_gradient(
        &self,
        dy: &Tensor,
        w: &Tensor,
        acc: Option<Tensor>,
    ) -> Result<Tensor> {
        let sizes = Sizes { m: dy.rows(), n: w.cols(), k: dy.cols() };
        let (dx, at, add) =
            self.sum_of(acc, [sizes.m, sizes.n], self.activations(), dy.device())?;
        let (dy, w) = (self.activation(dy)?, self.weights(w)?);
        self.multiply(plain(dy.address()), plain(w.address()), at, sizes, dx.dtype(), add)?;
        Ok(dx)
    }

    pub(super) fn linear_weight_gradient(
        &self,
        dy: &Tensor,
        x: &Tensor,
        acc: Option<Tensor>,
    ) -> Result<Tensor> {
        let sizes = Sizes { m: dy.cols(), n: x.cols(), k: dy.rows() };
        let (dw, at, add) = self.sum_of(acc, [sizes.m, sizes.n], DType::F32, dy.device())?;
        let (dy, x) = (self.activation(dy)?, self.activation(x)?);
        self.multiply(transposed(dy.address()), plain(x.address()), at, sizes, dw.dtype(), add)?;
        Ok(dw)
    }

    /// Where a product goes: a sum that exists, or a new tensor; and whether it adds.
    pub(super) fn sum_of(
        &self,
        acc: Option<Tensor>,
        shape: [usize; 2],
        dtype: DType,
        device: &Device,
    ) -> Result<(Tensor, u64, bool)> {
        match acc {
            Some(mut acc) => {
                let at = self.writable(&mut acc)?.write().address();
                Ok((acc, at, true))
            }
            None => {
                let (out, at) = self.output(shape, dtype, device)?;
                Ok((out, at, false))
            }
        }
    }

    /// A product of operands in the type of activations. Sizes that the library cannot do in bf16 are
    /// left to it to refuse.
    pub(super) fn multiply(
        &self,
        a: Matrix,
        b: Matrix,
        c: u64,
        sizes: Sizes,
        result: DType,
        accumulate: bool,
    ) -> Result<()> {
        let product = Product {
            m: sizes.m,
            n: sizes.n,
            k: sizes.k,
            a,
            b,
            c,
            wide_operands: self.activations() == DType::F32,
            wide_result: result == DType::F32,
            accumulate,
        };
        // SAFETY: the callers' operands have the sizes of the product.
        unsafe { self.gemm.run(&self.gpu, &product) }
    }

    pub(super) fn bias_gradient(&self, dy: &Tensor, acc: Option<Tensor>) -> Result<Tensor> {
        let (rows, width, dtype) = (dy.rows(), dy.cols(), dy.dtype());
        let x = self.operand(dy, dtype)?;
        self.column_sums(x.address(), dtype, rows, width, acc, dy.device())
    }

    /// Sums of `rows` rows of `width`, on top of `acc`, in f32 and in fixed order.
    pub(super) fn column_sums(
        &self,
        x: u64,
        dtype: DType,
        rows: usize,
        width: usize,
        acc: Option<Tensor>,
        device: &Device,
    ) -> Result<Tensor> {
        let acc_at = match &acc {
            Some(acc) => self.real(acc)?.address(),
            None => 0,
        };
        // Enough slices to fill the GPU, each long enough to be worth a block.
        let wanted = 4 * self.gpu.processors() as usize / width.div_ceil(32).max(1);
        // One launch where a column is short: a second one costs more than it saves.
        let slices = if rows <= 2048 { 1 } else { wanted.min(rows / 512).max(1) };
        let (out, at) = self.output([width], DType::F32, device)?;
        if slices == 1 {
            self.sum_slices(at, acc_at, x, dtype, rows, width, 1)?;
            return Ok(out);
        }
        let partial: Buffer<f32> = self.gpu.alloc(slices * width)?;
        self.sum_slices(partial.address(), 0, x, dtype, rows, width, slices)?;
        self.sum_slices(at, acc_at, partial.address(), DType::F32, slices, width, 1)?;
        Ok(out)
    }

    fn sum_slices(
        &self,
        out: u64,
        acc: u64,
        x: u64,
        dtype: DType,
        rows: usize,
        width: usize,
        slices: usize,
    ) -> Result<()> {
        let per_slice = rows.div_ceil(slices);
        let args = [
            out.into(),
            acc.into(),
            x.into(),
            int(rows).into(),
            int(width).into(),
            int(per_slice).into(),
        ];
        let op = Op {
            source: Source::COLUMNS,
            entry: "column_sums",
            variant: Variant::plain(dtype, 1),
            grid: [width.div_ceil(32), slices],
            block: 1024,
            shared: 0,
            args: &args,
        };
        // SAFETY: parameters as declared in columns.cu; the caller's sizes.
        unsafe { self.launch(&op) }
    }
}
