//! Linear layers: `product` is the general matrix product in f32, `thin` the one for few rows; `packed` has weights in
//! bf16 and int8, and `panels` the products with them.

pub mod packed;
mod panels;
mod product;
pub mod thin;

use std::sync::Arc;

use fox_tensor::{
    BATCH_INVARIANT_ROWS, Device, LinearOps, PackOps, Result, Tensor, WeightFormat,
    check_linear_bwd_bias, check_linear_bwd_input, check_linear_bwd_weight, check_linear_fwd,
    check_linear_split_bwd_input, check_linear_split_bwd_weight, check_linear_split_fwd,
    check_pack_weight, linear_split_bwd_input_by_copies, linear_split_bwd_weight_by_copies,
    linear_split_fwd_by_copies,
};

use crate::Cpu;
use packed::Packed;
use product::add_column_sums;
pub use product::{Matrix, multiply, multiply_here};
use thin::multiply_thin;

impl LinearOps for Cpu {
    fn linear_fwd(&self, x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        check_linear_fwd(self, x, w, bias)?;
        let (rows, inner, width) = (x.rows(), x.cols(), w.rows());
        let (level, pool, device) = (self.level(), self.pool(), x.device());
        let (x, bias) = (self.real(x), bias.map(|bias| self.real(bias)));
        let packed = w.storage::<Packed>();
        let mut y = self.pool().take(rows * width)?;
        self.run(|| -> Result<()> {
            if let Some(packed) = packed {
                return packed.multiply(level, pool, x, bias, &mut y);
            }
            let w = self.real(w);
            if rows <= BATCH_INVARIANT_ROWS && inner > 0 {
                multiply_thin(level, w, x, inner, bias, &mut y, width);
                return Ok(());
            }
            if let Some(bias) = bias {
                y.chunks_exact_mut(width).for_each(|y| y.copy_from_slice(bias));
            }
            let b = Matrix::new(w, width, inner).t();
            multiply(Matrix::new(x, rows, inner), b, &mut y, bias.is_some());
            Ok(())
        })?;
        Ok(self.tensor(y, [rows, width], device))
    }

    fn linear_bwd_input(&self, dy: &Tensor, w: &Tensor, acc: Option<Tensor>) -> Result<Tensor> {
        check_linear_bwd_input(self, dy, w, acc.as_ref())?;
        let (rows, width, inner) = (dy.rows(), dy.cols(), w.cols());
        let a = Matrix::new(self.real(dy), rows, width);
        let b = Matrix::new(self.real(w), width, inner);
        self.sum_product(a, b, [rows, inner], acc, dy.device())
    }

    fn linear_bwd_weight(&self, dy: &Tensor, x: &Tensor, acc: Option<Tensor>) -> Result<Tensor> {
        check_linear_bwd_weight(self, dy, x, acc.as_ref())?;
        let (rows, width, inner) = (dy.rows(), dy.cols(), x.cols());
        let a = Matrix::new(self.real(dy), rows, width).t();
        let b = Matrix::new(self.real(x), rows, inner);
        self.sum_product(a, b, [width, inner], acc, dy.device())
    }

    fn linear_bwd_bias(&self, dy: &Tensor, acc: Option<Tensor>) -> Result<Tensor> {
        check_linear_bwd_bias(self, dy, acc.as_ref())?;
        let x = self.real(dy);
        self.accumulate(acc, [dy.cols()], dy.device(), |sum| add_column_sums(x, sum))
    }

    fn linear_split_fwd(&self, x: &Tensor, w: &Tensor, widths: &[usize]) -> Result<Vec<Tensor>> {
        check_linear_split_fwd(self, x, w, widths)?;
        linear_split_fwd_by_copies(self, x, w, widths)
    }

    fn linear_split_bwd_input(
        &self,
        dys: &[Tensor],
        w: &Tensor,
        acc: Option<Tensor>,
    ) -> Result<Tensor> {
        check_linear_split_bwd_input(self, dys, w, acc.as_ref())?;
        linear_split_bwd_input_by_copies(self, dys, w, acc)
    }

    fn linear_split_bwd_weight(
        &self,
        dys: &[Tensor],
        x: &Tensor,
        acc: Option<Tensor>,
    ) -> Result<Tensor> {
        check_linear_split_bwd_weight(self, dys, x, acc.as_ref())?;
        linear_split_bwd_weight_by_copies(self, dys, x, acc)
    }
}

impl PackOps for Cpu {
    fn pack_weight(&self, w: &Tensor, format: WeightFormat) -> Result<Option<Tensor>> {
        check_pack_weight(self, w)?;
        let data = self.real(w);
        let packed = self.run(|| Packed::new(self.pool(), data, w.rows(), w.cols(), format))?;
        Ok(Some(match packed {
            Some(packed) => {
                Tensor::from_storage(Arc::new(packed), w.shape(), w.dtype(), w.device().clone())
            }
            None => w.clone(),
        }))
    }
}

impl Cpu {
    /// `a b + acc`.
    fn sum_product(
        &self,
        a: Matrix<'_>,
        b: Matrix<'_>,
        shape: [usize; 2],
        acc: Option<Tensor>,
        device: &Device,
    ) -> Result<Tensor> {
        match acc {
            None => self.produce(shape, device, |c| multiply(a, b, c, false)),
            Some(mut acc) => {
                let sum = self.buffer_mut(&mut acc)?;
                self.run(|| multiply(a, b, sum, true));
                Ok(acc)
            }
        }
    }
}
