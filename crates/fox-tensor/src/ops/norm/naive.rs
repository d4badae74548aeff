//! The residual stream and its RMS norm.

use crate::naive::{Matrix, Naive, matrix, maybe_matrix, real, rms_backward, rstd};
use crate::{NormGrads, NormInputs, NormOps, NormOut, NormSaved, Result, Tensor};

impl NormOps for Naive {
    fn add_rms_norm_fwd(&self, inputs: &NormInputs<'_>) -> Result<NormOut> {
        let NormInputs { h, delta, w, eps } = *inputs;
        let (sum, y, rstd) = forward(matrix(h)?, maybe_matrix(delta)?, real(w)?, f64::from(eps));
        Ok(NormOut {
            sum: if delta.is_some() { self.like(h, sum) } else { h.clone() },
            y: self.like(h, y),
            rstd: self.tensor(h.device(), rstd, [h.rows()]),
        })
    }

    fn add_rms_norm_bwd(
        &self,
        dy: &Tensor,
        dsum: Option<Tensor>,
        saved: &NormSaved<'_>,
        dw_acc: Option<Tensor>,
    ) -> Result<NormGrads> {
        let NormSaved { sum, rstd, w, .. } = *saved;
        let dsum = maybe_matrix(dsum.as_ref())?;
        let (dh, dw) = backward(matrix(dy)?, dsum, matrix(sum)?, real(w)?, real(rstd)?);
        Ok(NormGrads { dh: self.like(sum, dh), dw: self.plus(dw_acc, self.like(w, dw))? })
    }
}

/// `(h', y, rstd)`: `h' = h + delta`, `y = h' rstd(h') w`.
fn forward(
    h: Matrix<'_>,
    delta: Option<Matrix<'_>>,
    w: &[f64],
    eps: f64,
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let sum: Vec<f64> = match delta {
        Some(delta) => h.data.iter().zip(delta.data).map(|(a, b)| a + b).collect(),
        None => h.data.to_vec(),
    };
    let (mut y, mut rstds) = (Vec::with_capacity(sum.len()), Vec::with_capacity(h.rows));
    for r in 0..h.rows {
        let row = &sum[r * h.cols..][..h.cols];
        let scale = rstd(row, eps);
        y.extend(row.iter().zip(w).map(|(x, w)| x * scale * w));
        rstds.push(scale);
    }
    (sum, y, rstds)
}

/// `(dh, dw)`; `h` is the sum that was normalised, `dsum` what comes down the residual stream.
fn backward(
    dy: Matrix<'_>,
    dsum: Option<Matrix<'_>>,
    h: Matrix<'_>,
    w: &[f64],
    rstd: &[f64],
) -> (Vec<f64>, Vec<f64>) {
    let (mut dh, mut dw) = (Vec::with_capacity(h.data.len()), vec![0.0; h.cols]);
    for r in 0..h.rows {
        let g: Vec<f64> = dy.row(r).iter().zip(w).map(|(dy, w)| dy * w).collect();
        let dx = rms_backward(h.row(r), rstd[r], &g);
        for c in 0..h.cols {
            dh.push(dx[c] + dsum.map_or(0.0, |d| d.row(r)[c]));
            dw[c] += dy.row(r)[c] * h.row(r)[c] * rstd[r];
        }
    }
    (dh, dw)
}
