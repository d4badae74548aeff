//! RMS norms: the residual stream's, and the grouped one with an output gate.

use super::linear::dot;
use super::pointwise::Act;
use super::storage::Matrix;

/// `1 / sqrt(mean(x^2) + eps)`.
pub(super) fn rstd(x: &[f64], eps: f64) -> f64 {
    1.0 / (dot(x, x) / x.len() as f64 + eps).sqrt()
}

/// Gradient of `x r w` where `r = rstd(x)`, for `g = w dy`: `dx = r (g - xh mean(xh g))`, `xh = x r`.
pub(super) fn rms_backward(x: &[f64], r: f64, g: &[f64]) -> Vec<f64> {
    let mean = x.iter().zip(g).map(|(x, g)| x * r * g).sum::<f64>() / x.len() as f64;
    x.iter().zip(g).map(|(x, g)| r * (g - x * r * mean)).collect()
}

/// `(h', y, rstd)`: `h' = h + delta`, `y = h' rstd(h') w`.
pub(super) fn add_forward(
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

/// `(dh, dw)`; `h` is the sum that was normalised, `dh_out` what comes down the residual stream.
pub(super) fn add_backward(
    dy: Matrix<'_>,
    dh_out: Option<Matrix<'_>>,
    h: Matrix<'_>,
    w: &[f64],
    rstd: &[f64],
) -> (Vec<f64>, Vec<f64>) {
    let (mut dh, mut dw) = (Vec::with_capacity(h.data.len()), vec![0.0; h.cols]);
    for r in 0..h.rows {
        let g: Vec<f64> = dy.row(r).iter().zip(w).map(|(dy, w)| dy * w).collect();
        let dx = rms_backward(h.row(r), rstd[r], &g);
        for c in 0..h.cols {
            dh.push(dx[c] + dh_out.map_or(0.0, |d| d.row(r)[c]));
            dw[c] += dy.row(r)[c] * h.row(r)[c] * rstd[r];
        }
    }
    (dh, dw)
}

/// Operands of the gated norm: `y = rms_groups(x; norm) * act(gate)`.
pub(super) struct Gated<'a> {
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

    pub(super) fn forward(&self) -> Vec<f64> {
        let mut y = Vec::with_capacity(self.x.data.len());
        for r in 0..self.x.rows {
            let (n, _) = self.normed(r);
            y.extend((0..self.x.cols).map(|c| n[c] * self.gate(r, c)));
        }
        y
    }

    /// `(dx, dgate, dnorm)`; the last two only where the operand exists.
    pub(super) fn backward(&self, dy: Matrix<'_>) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
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
