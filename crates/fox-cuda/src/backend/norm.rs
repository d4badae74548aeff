//! Residual sum and RMS norm.

use fox_tensor::{DType, Tensor};

use super::launcher::{Op, Variant};
use super::storage::memory;
use super::{Cuda, Replaced, address, int};
use crate::{Buffer, Result, Source};

impl Cuda {
    /// `(h', y, rstd)`.
    pub(super) fn norm_forward(
        &self,
        h: &Tensor,
        delta: Option<&Tensor>,
        w: &Tensor,
        eps: f32,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let (rows, width, device) = (h.rows(), h.cols(), h.device());
        let dtype = self.activations();
        let (y, y_at) = self.output(h.shape(), dtype, device)?;
        let (rstd, rstd_at) = self.output([rows], DType::F32, device)?;
        let (sum, sum_at) = match delta {
            Some(_) => self.output(h.shape(), dtype, device)?,
            None => (h.clone(), 0),
        };
        let (x, weights) = (self.activation(h)?, self.real(w)?);
        let delta = delta.map(|x| self.activation(x)).transpose()?;
        let variant = Variant::rows(dtype, width);
        let args = [
            sum_at.into(),
            y_at.into(),
            rstd_at.into(),
            x.address().into(),
            address(&delta).into(),
            weights.address().into(),
            int(rows).into(),
            int(width).into(),
            eps.into(),
        ];
        let op = Op {
            source: Source::NORM,
            entry: "add_rms_norm_fwd",
            variant,
            grid: [rows, 1],
            block: 32 * variant.lanes,
            shared: 0,
            args: &args,
        };
        // SAFETY: parameters as declared in norm.cu; the tape checked the shapes.
        unsafe { self.launch(&op)? };
        Ok((sum, y, rstd))
    }

    /// `(dh, dw)`; with `y`, also the output once more, into it.
    pub(super) fn norm_backward(
        &self,
        dy: &Tensor,
        dh_out: Option<Tensor>,
        h: &Tensor,
        w: &Tensor,
        rstd: &Tensor,
        dw_acc: Option<Tensor>,
        y: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor)> {
        let (rows, width, device) = (h.rows(), h.cols(), h.device().clone());
        let dtype = self.activations();
        let (g, x, weights, stats) =
            (self.activation(dy)?, self.activation(h)?, self.real(w)?, self.real(rstd)?);
        let (dh, dh_at, before_at, _before) = match dh_out {
            Some(dh_out) => {
                let Replaced { out, to, from, old } = self.replaced(dh_out)?;
                (out, to, from, old)
            }
            None => {
                let (dh, at) = self.output(h.shape(), dtype, &device)?;
                (dh, at, 0, None)
            }
        };
        let y_at = y.map_or(Ok(0), |y| memory(y).map(|held| held.data.address()))?;
        let variant = Variant::rows(dtype, width);
        // A block keeps its sums for the weights in registers: no more blocks than run at once.
        let blocks = rows.min(self.gpu.processors() as usize * (20 / variant.lanes).max(1));
        let partial: Buffer<f32> = self.gpu.alloc(blocks * width)?;
        let args = [
            dh_at.into(),
            y_at.into(),
            partial.address().into(),
            g.address().into(),
            before_at.into(),
            x.address().into(),
            weights.address().into(),
            stats.address().into(),
            int(rows).into(),
            int(width).into(),
        ];
        let op = Op {
            source: Source::NORM,
            entry: "add_rms_norm_bwd",
            variant,
            grid: [blocks, 1],
            block: 32 * variant.lanes,
            shared: 0,
            args: &args,
        };
        // SAFETY: parameters as declared in norm.cu; the tape checked the shapes.
        unsafe { self.launch(&op)? };
        let dw = self.column_sums(partial.address(), DType::F32, blocks, width, dw_acc, &device)?;
        Ok((dh, dw))
    }
}
