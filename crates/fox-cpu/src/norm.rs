//! The residual stream: `h' = h + delta` and its RMS norm, in one pass.

use std::sync::Arc;

use fox_tensor::{
    DType, NormGrads, NormInputs, NormOps, NormOut, NormSaved, Result, Tensor,
    check_add_rms_norm_bwd, check_add_rms_norm_fwd,
};
use rayon::prelude::*;

use crate::Cpu;
use crate::pool::{Buffer, Pool};
use crate::rows::{rows_per_task, sum_partials};
use crate::simd::{Level, dot, map, simd_fn, sum, update};

impl NormOps for Cpu {
    fn add_rms_norm_fwd(&self, inputs: &NormInputs<'_>) -> Result<NormOut> {
        check_add_rms_norm_fwd(self, inputs)?;
        let NormInputs { h, delta, w, eps } = *inputs;
        let (x, delta, w) = (self.real(h), delta.map(|x| self.real(x)), self.real(w));
        let (sum, y, rstd) = self.run(|| forward(self.level(), self.pool(), x, delta, w, eps))?;
        let (shape, device) = (h.shape(), h.device());
        Ok(NormOut {
            sum: sum.map_or_else(|| h.clone(), |sum| self.tensor(sum, shape, device)),
            y: self.tensor(y, shape, device),
            rstd: self.tensor(rstd, [h.rows()], device),
        })
    }

    fn add_rms_norm_bwd(
        &self,
        dy: &Tensor,
        dsum: Option<Tensor>,
        saved: &NormSaved<'_>,
        dw_acc: Option<Tensor>,
    ) -> Result<NormGrads> {
        check_add_rms_norm_bwd(self, dy, dsum.as_ref(), saved, dw_acc.as_ref())?;
        let NormSaved { sum, rstd, w, .. } = *saved;
        let add = dsum.is_some();
        let mut dh = match dsum {
            Some(dh) => dh,
            None => sum.device().uninit(sum.shape(), DType::F32)?,
        };
        let (dy, x, weights, stats) =
            (self.real(dy), self.real(sum), self.real(w), self.real(rstd));
        let dx = self.buffer_mut(&mut dh)?;
        let dw = self.accumulate(dw_acc, w.shape(), sum.device(), |dw| {
            backward(self.level(), self.pool(), dy, x, weights, stats, add, dx, dw)
        })?;
        Ok(NormGrads { dh, dw })
    }
}

simd_fn! {
    /// Some rows of the forward pass; without `delta`, `total` is empty and `h` is normalised as it is.
    fn forward_rows<'k, S>(
        s, h: &'k [f32], delta: Option<&'k [f32]>, w: &'k [f32], eps: f32,
        total: &'k mut [f32], y: &'k mut [f32], rstd: &'k mut [f32],
    ) {
        let c = w.len();
        for (r, (y, rstd)) in y.chunks_exact_mut(c).zip(rstd).enumerate() {
            let mut row = &h[r * c..][..c];
            if let Some(delta) = delta {
                let total = &mut total[r * c..][..c];
                map(s, [row, &delta[r * c..][..c]], total, |[a, b]| s.add(a, b));
                row = total;
            }
            *rstd = 1.0 / (dot(s, row, row) / c as f32 + eps).sqrt();
            let scale = s.splat(*rstd);
            map(s, [row, w], y, |[x, w]| s.mul(s.mul(x, scale), w));
        }
    }
}

/// `(h', y, rstd)`; `h'` is `None` without `delta`.
pub fn forward(
    level: Level,
    pool: &Arc<Pool>,
    h: &[f32],
    delta: Option<&[f32]>,
    w: &[f32],
    eps: f32,
) -> Result<(Option<Buffer>, Buffer, Buffer)> {
    let (c, rows) = (w.len(), h.len() / w.len());
    let mut total = pool.take(if delta.is_some() { h.len() } else { 0 })?;
    let (mut y, mut rstd) = (pool.take(h.len())?, pool.take(rows)?);
    let step = rows_per_task(c);
    let run = |at: usize, total: &mut [f32], y: &mut [f32], rstd: &mut [f32]| {
        let part = at * step * c..at * step * c + y.len();
        let delta = delta.map(|delta| &delta[part.clone()]);
        forward_rows(level, &h[part.clone()], delta, w, eps, total, y, rstd);
    };
    let outputs = y.par_chunks_mut(step * c).zip(rstd.par_chunks_mut(step));
    if delta.is_some() {
        let outputs = outputs.zip(total.par_chunks_mut(step * c)).enumerate();
        outputs.for_each(|(at, ((y, rstd), total))| run(at, total, y, rstd));
    } else {
        outputs.enumerate().for_each(|(at, (y, rstd))| run(at, &mut [], y, rstd));
    }
    Ok((delta.is_some().then_some(total), y, rstd))
}

simd_fn! {
    /// Some rows of the backward pass: `dh`, accumulated with `add`, and this task's partial `dw`.
    fn backward_rows<'k, S>(
        s, dy: &'k [f32], h: &'k [f32], w: &'k [f32], rstd: &'k [f32], add: bool,
        dh: &'k mut [f32], dw: &'k mut [f32],
    ) {
        let c = w.len();
        dw.fill(0.0);
        for (r, dh) in dh.chunks_exact_mut(c).enumerate() {
            let (dy, h, rstd) = (&dy[r * c..][..c], &h[r * c..][..c], rstd[r]);
            let along = sum(s, [dy, w, h], |[dy, w, h], sum| s.mul_add(s.mul(dy, w), h, sum));
            let scale = s.splat(rstd);
            let slope = s.splat(-along * rstd * rstd * rstd / c as f32);
            let dx = |dy, w, h| s.mul_add(slope, h, s.mul(scale, s.mul(dy, w)));
            if add {
                update(s, [dy, w, h], dh, |[dy, w, h], dh| s.add(dh, dx(dy, w, h)));
            } else {
                map(s, [dy, w, h], dh, |[dy, w, h]| dx(dy, w, h));
            }
            update(s, [dy, h], dw, |[dy, h], dw| s.mul_add(s.mul(dy, h), scale, dw));
        }
    }
}

/// Adds to `dh` (with `add`, else overwrites it) and to `dw`.
pub fn backward(
    level: Level,
    pool: &Arc<Pool>,
    dy: &[f32],
    h: &[f32],
    w: &[f32],
    rstd: &[f32],
    add: bool,
    dh: &mut [f32],
    dw: &mut [f32],
) -> Result<()> {
    let c = w.len();
    let step = rows_per_task(c);
    let mut parts = pool.take(rstd.len().div_ceil(step) * c)?;
    dh.par_chunks_mut(step * c).zip(parts.par_chunks_mut(c)).enumerate().for_each(
        |(at, (dh, dw))| {
            let part = at * step * c..at * step * c + dh.len();
            let rstd = &rstd[at * step..];
            backward_rows(level, &dy[part.clone()], &h[part], w, rstd, add, dh, dw);
        },
    );
    sum_partials(&parts, dw);
    Ok(())
}
