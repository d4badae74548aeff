//! The grouped RMS norm with an output gate.

use crate::naive::{Act, Matrix, Naive, matrix, maybe_matrix, maybe_real, rms_backward, rstd};
use crate::{GatedNormGrads, GatedNormInputs, GatedNormOps, Result, Tensor};

impl GatedNormOps for Naive {
    fn gated_norm_fwd(&self, inputs: &GatedNormInputs<'_>) -> Result<Tensor> {
        Ok(self.like(inputs.x, gated(inputs)?.forward()))
    }

    fn gated_norm_bwd(&self, dy: &Tensor, inputs: &GatedNormInputs<'_>) -> Result<GatedNormGrads> {
        let (dx, dgate, dnorm) = gated(inputs)?.backward(matrix(dy)?);
        Ok(GatedNormGrads {
            dx: self.like(inputs.x, dx),
            dgate: inputs.gate.map(|z| self.like(z, dgate)),
            dnorm: inputs.norm.map(|w| self.like(w, dnorm)),
        })
    }
}

fn gated<'a>(inputs: &GatedNormInputs<'a>) -> Result<Gated<'a>> {
    Ok(Gated {
        x: matrix(inputs.x)?,
        norm: maybe_real(inputs.norm)?,
        gate: maybe_matrix(inputs.gate)?,
        groups: inputs.groups,
        eps: f64::from(inputs.eps),
        act: Act(inputs.act),
    })
}

/// Operands of the gated norm: `y = rms_groups(x; norm) * act(gate)`.
struct Gated<'a> {
    pub x: Matrix<'a>,
    pub norm: Option<&'a [f64]>,
    pub gate: Option<Matrix<'a>>,
    pub groups: usize,
    pub eps: f64,
    pub act: Act,
}

impl Gated<'_> {
    /// `x` normalised (if it is), before the gate, and the scale of every channel of row `r`.
    fn normed(&self, r: usize) -> (Vec<f64>, Vec<f64>) {
        let (x, Some(w)) = (self.x.row(r), self.norm) else {
            return (self.x.row(r).to_vec(), vec![1.0; self.x.cols]);
        };
        let width = self.x.cols / self.groups;
        let scale: Vec<f64> =
            (0..self.x.cols).map(|c| rstd(&x[c / width * width..][..width], self.eps)).collect();
        ((0..x.len()).map(|c| x[c] * scale[c] * w[c]).collect(), scale)
    }

    /// `act(gate)` at one place; 1 without a gate.
    fn gate(&self, r: usize, c: usize) -> f64 {
        self.gate.map_or(1.0, |z| self.act.value(z.row(r)[c]))
    }

    fn forward(&self) -> Vec<f64> {
        let mut y = Vec::with_capacity(self.x.data.len());
        for r in 0..self.x.rows {
            let (n, _) = self.normed(r);
            y.extend((0..self.x.cols).map(|c| n[c] * self.gate(r, c)));
        }
        y
    }

    /// `(dx, dgate, dnorm)`; the last two only where the operand exists.
    fn backward(&self, dy: Matrix<'_>) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
        let (mut dx, mut dgate, mut dnorm) = (Vec::new(), Vec::new(), vec![0.0; self.x.cols]);
        for r in 0..self.x.rows {
            let (x, (n, scale)) = (self.x.row(r), self.normed(r));
            let dn: Vec<f64> = (0..x.len()).map(|c| dy.row(r)[c] * self.gate(r, c)).collect();
            if let Some(z) = self.gate {
                dgate.extend(
                    (0..x.len()).map(|c| dy.row(r)[c] * n[c] * self.act.slope(z.row(r)[c])),
                );
            }
            let Some(w) = self.norm else {
                dx.extend(dn);
                continue;
            };
            for c in 0..x.len() {
                dnorm[c] += dn[c] * x[c] * scale[c];
            }
            let g: Vec<f64> = dn.iter().zip(w).map(|(d, w)| d * w).collect();
            let width = x.len() / self.groups;
            for c in (0..x.len()).step_by(width) {
                dx.extend(rms_backward(&x[c..][..width], scale[c], &g[c..][..width]));
            }
        }
        (dx, dgate, dnorm)
    }
}
