//! Gates of the recurrent models.

use super::super::pointwise::{Act, log_sigmoid, sigmoid};
use super::super::storage::Matrix;
use crate::Activation;

/// Operands of the time step.
pub(super) struct TimeStep<'a> {
    pub z: Matrix<'a>,
    pub bias: &'a [f64],
    pub a_log: &'a [f64],
    pub limits: (f64, f64),
}

impl TimeStep<'_> {
    /// `softplus(z + bias)` before the clamp.
    fn raw(&self, i: usize) -> f64 {
        -log_sigmoid(-self.logit(i))
    }

    fn logit(&self, i: usize) -> f64 {
        self.z.data[i] + self.bias[i % self.z.cols]
    }

    fn rate(&self, i: usize) -> f64 {
        -self.a_log[i % self.z.cols].exp()
    }

    /// `(dt, log_decay)`.
    pub(super) fn forward(&self) -> (Vec<f64>, Vec<f64>) {
        let step = |i| self.raw(i).clamp(self.limits.0, self.limits.1);
        let dt: Vec<f64> = (0..self.z.data.len()).map(step).collect();
        let decay = dt.iter().enumerate().map(|(i, dt)| self.rate(i) * dt).collect();
        (dt, decay)
    }

    /// `(dz, da_log)`.
    pub(super) fn backward(
        &self,
        ddt: Option<Matrix<'_>>,
        ddecay: Option<Matrix<'_>>,
    ) -> (Vec<f64>, Vec<f64>) {
        let mut da_log = vec![0.0; self.z.cols];
        let (dt, _) = self.forward();
        let grad = |i: usize| {
            let ddecay = ddecay.map_or(0.0, |d| d.data[i]);
            da_log[i % self.z.cols] += ddecay * self.rate(i) * dt[i];
            let inside = (self.limits.0..=self.limits.1).contains(&self.raw(i));
            let ddt = ddt.map_or(0.0, |d| d.data[i]) + ddecay * self.rate(i);
            if inside { ddt * sigmoid(self.logit(i)) } else { 0.0 }
        };
        let dz = (0..self.z.data.len()).map(grad).collect();
        (dz, da_log)
    }
}

/// Operands of HGRN2's gates.
pub(super) struct Hgrn<'a> {
    pub q: Matrix<'a>,
    pub z: Matrix<'a>,
    pub lower: Option<&'a [f64]>,
}

impl Hgrn<'_> {
    fn bound(&self, i: usize) -> f64 {
        self.lower.map_or(0.0, |lower| lower[i % self.z.cols])
    }

    /// `(q, k, ln f)`.
    pub(super) fn forward(&self) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
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
    pub(super) fn backward(
        &self,
        dq: &[f64],
        dk: &[f64],
        dlog_f: &[f64],
    ) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
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
pub(super) fn lower_bound(table: Matrix<'_>, layer: usize) -> (Vec<f64>, Vec<f64>) {
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
