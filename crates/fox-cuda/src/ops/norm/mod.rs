//! Residual sum and RMS norm.

use fox_tensor::{DType, NormGrads, NormInputs, NormOps, NormOut, NormSaved, Tensor};

use crate::backend::launcher::{Op, Variant};
use crate::backend::storage::memory;
use crate::backend::{Cuda, Replaced, address};
use crate::params::{ConstPtr, Ptr, Real, kernel_params};
use crate::source::source;
use crate::{Buffer, Result, Source};

const NORM: Source = source!("norm", [], [NormForward, NormBackward]);

kernel_params! {
    list struct NormForward {
        /// `h + delta`, `[R, C]`; null without `delta`.
        sum: Ptr<Real>,
        /// `[R, C]`.
        y: Ptr<Real>,
        /// `[R]`.
        rstd: Ptr<f32>,
        /// `[R, C]`.
        h: ConstPtr<Real>,
        /// `[R, C]`, or null.
        delta: ConstPtr<Real>,
        /// `[C]`.
        w: ConstPtr<f32>,
        rows: usize,
        width: usize,
        eps: f32,
    }

    list struct NormBackward {
        /// `[R, C]`.
        dh: Ptr<Real>,
        /// Recomputed output `[R, C]`, or null.
        y: Ptr<Real>,
        /// Partial gradients of the weights `[blocks, C]`.
        partial: Ptr<f32>,
        /// `[R, C]`.
        dy: ConstPtr<Real>,
        /// Added to `dh`, `[R, C]`; null, or aliases `dh`.
        dh_out: ConstPtr<Real>,
        /// `[R, C]`.
        h: ConstPtr<Real>,
        /// `[C]`.
        w: ConstPtr<f32>,
        /// `[R]`.
        rstd: ConstPtr<f32>,
        rows: usize,
        width: usize,
    }
}

/// Typical variants, for compilation checks.
pub(crate) fn variants() -> Vec<(Source, Vec<String>)> {
    let of = |dtype| [768, 1536, 203].map(|width| (NORM, Variant::rows(dtype, width).defines()));
    [DType::F32, DType::Bf16].into_iter().flat_map(of).collect()
}

/// A grid-stride launch over rows.
fn over_rows(entry: &'static str, variant: Variant, blocks: usize) -> Op {
    let block = 32 * variant.warps;
    Op::new(NORM, entry, variant, [blocks, 1], block)
}

impl Cuda {
    /// Gradients; with `y`, also recomputes the output into it.
    pub(crate) fn norm_backward(
        &self,
        dy: &Tensor,
        dsum: Option<Tensor>,
        saved: &NormSaved<'_>,
        dw_acc: Option<Tensor>,
        y: Option<&Tensor>,
    ) -> Result<NormGrads> {
        let NormSaved { sum: h, rstd, w, .. } = *saved;
        let (rows, width, device) = (h.rows(), h.cols(), h.device().clone());
        let dtype = self.activations();
        let (g, x, weights, stats) =
            (self.activation(dy)?, self.activation(h)?, self.real(w)?, self.real(rstd)?);
        let (dh, dh_at, before_at, _before) = match dsum {
            Some(dsum) => {
                let Replaced { out, to, from, old } = self.replaced(dsum)?;
                (out, to, from, old)
            }
            None => {
                let (dh, at) = self.output(h.shape(), dtype, &device)?;
                (dh, at, 0, None)
            }
        };
        let y_at = y.map_or(Ok(0), |y| memory(y).map(|held| held.data.address()))?;
        let variant = Variant::rows(dtype, width);
        // A block accumulates weight gradients in registers: one wave of blocks.
        let blocks = rows.min(self.gpu.processors() as usize * (20 / variant.warps).max(1));
        let partial: Buffer<f32> = self.gpu.alloc(blocks * width)?;
        let params = NormBackward {
            dh: dh_at.into(),
            y: y_at.into(),
            partial: partial.address().into(),
            dy: g.address().into(),
            dh_out: before_at.into(),
            h: x.address().into(),
            w: weights.address().into(),
            rstd: stats.address().into(),
            rows,
            width,
        };
        // SAFETY: the operands are validated at entry; outputs and scratch are allocated from their shapes.
        unsafe { self.launch(&over_rows("add_rms_norm_bwd", variant, blocks), params)? };
        let dw = self.column_sums(&partial, [blocks, width], dw_acc, &device)?;
        Ok(NormGrads { dh, dw })
    }
}

impl NormOps for Cuda {
    fn add_rms_norm_fwd(&self, inputs: &NormInputs<'_>) -> fox_tensor::Result<NormOut> {
        fox_tensor::check_add_rms_norm_fwd(self, inputs)?;
        let _span = self.span("add_rms_norm fwd")?;
        let NormInputs { h, delta, w, eps } = *inputs;
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
        let params = NormForward {
            sum: sum_at.into(),
            y: y_at.into(),
            rstd: rstd_at.into(),
            h: x.address().into(),
            delta: address(&delta).into(),
            w: weights.address().into(),
            rows,
            width,
            eps,
        };
        // SAFETY: the operands are validated at entry; outputs and scratch are allocated from their shapes.
        unsafe { self.launch(&over_rows("add_rms_norm_fwd", variant, rows), params)? };
        Ok(NormOut { sum, y, rstd })
    }

    fn add_rms_norm_bwd(
        &self,
        dy: &Tensor,
        dsum: Option<Tensor>,
        saved: &NormSaved<'_>,
        dw_acc: Option<Tensor>,
    ) -> fox_tensor::Result<NormGrads> {
        fox_tensor::check_add_rms_norm_bwd(self, dy, dsum.as_ref(), saved, dw_acc.as_ref())?;
        let work = || self.norm_backward(dy, dsum, saved, dw_acc, None);
        Ok(self.timed("add_rms_norm bwd", work)?)
    }
}
