//! Gates of HGRN2.

use crate::naive::{Act, Matrix, Naive, log_sigmoid, matrix, maybe_real, real, sigmoid};
use crate::{Activation, HgrnGates, HgrnGrads, HgrnInputs, HgrnOps, Result, Tensor};

impl HgrnOps for Naive {
    fn hgrn_gates_fwd(&self, inputs: &HgrnInputs<'_>) -> Result<HgrnGates> {
        let (q, k, log_f) = hgrn(inputs)?.forward();
        let like = |values| self.like(inputs.q, values);
        Ok(HgrnGates { q: like(q), k: like(k), log_f: like(log_f) })
    }

    fn hgrn_gates_bwd(&self, d_out: &HgrnGates, inputs: &HgrnInputs<'_>) -> Result<HgrnGrads> {
        let (dk, dlog_f) = (real(&d_out.k)?, real(&d_out.log_f)?);
        let (dq, dz, dlower) = hgrn(inputs)?.backward(real(&d_out.q)?, dk, dlog_f);
        Ok(HgrnGrads {
            dq: self.like(inputs.q, dq),
            dz: self.like(inputs.z, dz),
            dlower: inputs.lower.map(|lower| self.like(lower, dlower)),
        })
    }

    fn lower_bound_fwd(&self, table: &Tensor, layer: usize) -> Result<Tensor> {
        let (bound, _) = lower_bound(matrix(table)?, layer);
        Ok(self.tensor(table.device(), bound, [table.cols()]))
    }

    fn lower_bound_bwd(&self, dy: &Tensor, table: &Tensor, layer: usize) -> Result<Tensor> {
        let values = matrix(table)?;
        let (bound, softmax) = lower_bound(values, layer);
        let (dy, width) = (real(dy)?, values.cols);
        let grad = |i: usize| {
            let (m, c) = (i / width, i % width);
            let inside = if (1..=layer).contains(&m) { 1.0 } else { 0.0 };
            softmax[i] * (inside - bound[c]) * dy[c]
        };
        Ok(self.like(table, (0..values.data.len()).map(grad).collect()))
    }
}

fn hgrn<'a>(inputs: &HgrnInputs<'a>) -> Result<Hgrn<'a>> {
    Ok(Hgrn { q: matrix(inputs.q)?, z: matrix(inputs.z)?, lower: maybe_real(inputs.lower)? })
}

/// Operands of HGRN2's gates.
struct Hgrn<'a> {
    pub q: Matrix<'a>,
    pub z: Matrix<'a>,
    pub lower: Option<&'a [f64]>,
}

impl Hgrn<'_> {
    fn bound(&self, i: usize) -> f64 {
        self.lower.map_or(0.0, |lower| lower[i % self.z.cols])
    }

    /// `(q, k, ln f)`.
    fn forward(&self) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
        let all = 0..self.z.data.len();
        let q = self.q.data.iter().map(|&x| Act(Activation::Silu).value(x)).collect();
        // sigmoid(-z) rather than 1 - sigmoid(z): no cancellation for gates near 1.
        let k = all.clone().map(|i| (1.0 - self.bound(i)) * sigmoid(-self.z.data[i])).collect();
        // f = (1 + lb e^-z) / (1 + e^-z), whatever the sign of z.
        let log_f = |i: usize| match self.bound(i) {
            0.0 => log_sigmoid(self.z.data[i]),
            lb => log_sigmoid(self.z.data[i]) - log_sigmoid(self.z.data[i] - lb.ln()),
        };
        (q, k, all.map(log_f).collect())
    }

    /// `(dq, dz, dlower)`.
    fn backward(&self, dq: &[f64], dk: &[f64], dlog_f: &[f64]) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
        let mut dlower = vec![0.0; self.lower.map_or(0, <[f64]>::len)];
        let slope = |(&x, d): (&f64, &f64)| Act(Activation::Silu).slope(x) * d;
        let dq = self.q.data.iter().zip(dq).map(slope).collect();
        let grad = |i: usize| {
            let (z, lb) = (self.z.data[i], self.bound(i));
            let (open, shut) = (sigmoid(z), sigmoid(-z));
            if !dlower.is_empty() {
                // df / dlb = 1 - sigmoid(z).
                let df = dlog_f[i] / (lb + (1.0 - lb) * open) - dk[i];
                dlower[i % self.z.cols] += df * shut;
            }
            // d ln f / dz = shut * (1 - lb) open / f; the ratio is 1 without a bound.
            let ratio = if lb == 0.0 { 1.0 } else { (1.0 - lb) * open / (lb + (1.0 - lb) * open) };
            dlog_f[i] * ratio * shut - dk[i] * (1.0 - lb) * open * shut
        };
        let dz = (0..self.z.data.len()).map(grad).collect();
        (dq, dz, dlower)
    }
}

/// `(lb[C], softmax over layers [L * C])`.
fn lower_bound(table: Matrix<'_>, layer: usize) -> (Vec<f64>, Vec<f64>) {
    let (mut bound, mut softmax) = (vec![0.0; table.cols], vec![0.0; table.data.len()]);
    for c in 0..table.cols {
        let column = || (0..table.rows).map(|m| table.row(m)[c]);
        let max = column().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = column().map(|x| (x - max).exp()).sum();
        for (m, x) in column().enumerate() {
            softmax[m * table.cols + c] = (x - max).exp() / sum;
        }
        bound[c] = (1..=layer).map(|m| softmax[m * table.cols + c]).sum();
    }
    (bound, softmax)
}
