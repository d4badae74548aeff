//! Linear layers and their gradients.

use fox_tensor::{DType, Device, LinearOps, Tensor};

mod gemm;
mod group;
mod split;
pub(crate) mod thin;

pub(crate) use gemm::{Gemm, GemmOperand, GemmProblem};

use crate::Result;
use crate::backend::Cuda;
use crate::backend::storage::Data;

/// Projections up to this width are gate logits, whose results stay in f32.
pub(crate) const GATE_WIDTH: usize = 64;

/// `c[m, n] = a[m, k] b[k, n]`.
#[derive(Clone, Copy)]
pub(crate) struct GemmShape {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
}

pub(crate) fn plain(address: u64) -> GemmOperand {
    GemmOperand { address, transposed: false }
}

pub(crate) fn transposed(address: u64) -> GemmOperand {
    GemmOperand { address, transposed: true }
}

impl Cuda {
    /// Destination of a product, its address, and whether the product accumulates: `acc`, or a new tensor.
    pub(crate) fn sum_of(
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

    /// A product of operands in the type of activations.
    ///
    /// # Safety
    /// Operands and result must be live matrices of the sizes of the product.
    pub(crate) unsafe fn multiply(
        &self,
        a: GemmOperand,
        b: GemmOperand,
        c: u64,
        sizes: GemmShape,
        result: DType,
        accumulate: bool,
    ) -> Result<()> {
        let product = GemmProblem {
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
        // SAFETY: the caller's promise.
        unsafe { self.gemm.run(&self.gpu, &product) }
    }
}

impl LinearOps for Cuda {
    fn linear_fwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        bias: Option<&Tensor>,
    ) -> fox_tensor::Result<Tensor> {
        fox_tensor::check_linear_fwd(self, x, w, bias)?;
        let op = if w.rows() <= GATE_WIDTH { "narrow linear fwd" } else { "linear fwd" };
        let _span = self.span(op)?;
        let sizes = GemmShape { m: x.rows(), n: w.rows(), k: x.cols() };
        let wide = x.dtype() == DType::F32 || sizes.n <= GATE_WIDTH;
        let dtype = if wide { DType::F32 } else { self.activations() };
        let (y, at) = self.output([sizes.m, sizes.n], dtype, x.device())?;
        let (x, w) = (self.activation(x)?, self.weights(w)?);
        let bias = bias.map(|bias| self.real(bias)).transpose()?;
        let (left, right) = (plain(x.address()), transposed(w.address()));
        // SAFETY: the operands are validated at entry, and the output has the sizes of the product.
        unsafe {
            match self.is_thin(sizes.m, sizes.k) {
                true => self.thin_product(&x, &w, at, [sizes.m, sizes.n, sizes.k], wide)?,
                false => self.multiply(left, right, at, sizes, dtype, false)?,
            }
            if let Some(bias) = bias {
                self.add_bias(at, dtype, bias.address(), sizes.m, sizes.n)?;
            }
        }
        Ok(y)
    }

    fn linear_bwd_input(
        &self,
        dy: &Tensor,
        w: &Tensor,
        acc: Option<Tensor>,
    ) -> fox_tensor::Result<Tensor> {
        fox_tensor::check_linear_bwd_input(self, dy, w, acc.as_ref())?;
        let op =
            if w.rows() <= GATE_WIDTH { "narrow linear bwd input" } else { "linear bwd input" };
        let _span = self.span(op)?;
        let sizes = GemmShape { m: dy.rows(), n: w.cols(), k: dy.cols() };
        let (dx, at, add) =
            self.sum_of(acc, [sizes.m, sizes.n], self.activations(), dy.device())?;
        let (dy, w) = (self.activation(dy)?, self.weights(w)?);
        let (left, right) = (plain(dy.address()), plain(w.address()));
        // SAFETY: the operands are validated at entry, and the result has the sizes of the product.
        unsafe { self.multiply(left, right, at, sizes, dx.dtype(), add)? };
        Ok(dx)
    }

    fn linear_bwd_weight(
        &self,
        dy: &Tensor,
        x: &Tensor,
        acc: Option<Tensor>,
    ) -> fox_tensor::Result<Tensor> {
        fox_tensor::check_linear_bwd_weight(self, dy, x, acc.as_ref())?;
        let op =
            if dy.cols() <= GATE_WIDTH { "narrow linear bwd weight" } else { "linear bwd weight" };
        let _span = self.span(op)?;
        let sizes = GemmShape { m: dy.cols(), n: x.cols(), k: dy.rows() };
        let (dw, at, add) = self.sum_of(acc, [sizes.m, sizes.n], DType::F32, dy.device())?;
        let (dy, x) = (self.activation(dy)?, self.activation(x)?);
        let (left, right) = (transposed(dy.address()), plain(x.address()));
        // SAFETY: the operands are validated at entry, and the result has the sizes of the product.
        unsafe { self.multiply(left, right, at, sizes, dw.dtype(), add)? };
        Ok(dw)
    }

    fn linear_bwd_bias(&self, dy: &Tensor, acc: Option<Tensor>) -> fox_tensor::Result<Tensor> {
        fox_tensor::check_linear_bwd_bias(self, dy, acc.as_ref())?;
        let _span = self.span("linear bwd bias")?;
        let (sizes, device) = ([dy.rows(), dy.cols()], dy.device());
        let x = self.operand(dy, dy.dtype())?;
        Ok(match x.data() {
            Some(Data::Bf16(x)) => self.column_sums(x, sizes, acc, device)?,
            Some(Data::F32(x)) => self.column_sums(x, sizes, acc, device)?,
            _ => return Err(fox_tensor::Error::argument("linear_bwd_bias", format!("{dy:?}"))),
        })
    }

    fn linear_split_fwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        widths: &[usize],
    ) -> fox_tensor::Result<Vec<Tensor>> {
        fox_tensor::check_linear_split_fwd(self, x, w, widths)?;
        self.split_forward(x, w, widths)
    }

    fn linear_split_bwd_input(
        &self,
        dys: &[Tensor],
        w: &Tensor,
        acc: Option<Tensor>,
    ) -> fox_tensor::Result<Tensor> {
        fox_tensor::check_linear_split_bwd_input(self, dys, w, acc.as_ref())?;
        self.split_input_gradient(dys, w, acc)
    }

    fn linear_split_bwd_weight(
        &self,
        dys: &[Tensor],
        x: &Tensor,
        acc: Option<Tensor>,
    ) -> fox_tensor::Result<Tensor> {
        fox_tensor::check_linear_split_bwd_weight(self, dys, x, acc.as_ref())?;
        self.split_weight_gradient(dys, x, acc)
    }
}
