//! Nonlinearities, forget gates and gated linear units.

use super::storage::Matrix;
use crate::Activation;

/// `1 / (1 + e^-x)`, without overflow.
pub(super) fn sigmoid(x: f64) -> f64 {
    if x >= 0.0 { 1.0 / (1.0 + (-x).exp()) } else { x.exp() / (1.0 + x.exp()) }
}

/// `ln sigmoid(x) = -softplus(-x)`, without overflow and exact for large `x`.
pub(super) fn log_sigmoid(x: f64) -> f64 {
    x.min(0.0) - (-x.abs()).exp().ln_1p()
}

/// An activation with its derivative.
#[derive(Clone, Copy)]
pub(super) struct Act(pub Activation);

impl Act {
    pub(super) fn value(self, x: f64) -> f64 {
        match self.0 {
            Activation::Sigmoid => sigmoid(x),
            Activation::Silu => x * sigmoid(x),
        }
    }

    pub(super) fn slope(self, x: f64) -> f64 {
        let s = sigmoid(x);
        match self.0 {
            Activation::Sigmoid => s * (1.0 - s),
            Activation::Silu => s + x * s * (1.0 - s),
        }
    }
}

/// The gate's logit at every row and head: `z + bias`, either optional.
fn gate_logits(z: Option<Matrix<'_>>, bias: Option<&[f64]>, rows: usize) -> Vec<f64> {
    let heads = z.map_or_else(|| bias.map_or(0, <[f64]>::len), |z| z.cols);
    let logit = |i: usize| z.map_or(0.0, |z| z.data[i]) + bias.map_or(0.0, |b| b[i % heads]);
    (0..rows * heads).map(logit).collect()
}

/// `logsigmoid(z + bias)`, `[R, H]`.
pub(super) fn log_gate_forward(
    z: Option<Matrix<'_>>,
    bias: Option<&[f64]>,
    rows: usize,
) -> Vec<f64> {
    gate_logits(z, bias, rows).into_iter().map(log_sigmoid).collect()
}

/// `dz = dy (1 - sigmoid(z + bias))`.
pub(super) fn log_gate_backward(
    dy: Matrix<'_>,
    z: Option<Matrix<'_>>,
    bias: Option<&[f64]>,
) -> Vec<f64> {
    // sigmoid(-x) rather than 1 - sigmoid(x): no cancellation for gates near 1.
    gate_logits(z, bias, dy.rows).iter().zip(dy.data).map(|(x, dy)| dy * sigmoid(-x)).collect()
}

/// `act(g) * u` for rows `[g | u]`.
pub(super) fn glu_forward(x: Matrix<'_>, act: Act) -> Vec<f64> {
    let half = x.cols / 2;
    let mut y = Vec::with_capacity(x.rows * half);
    for r in 0..x.rows {
        let (g, u) = x.row(r).split_at(half);
        y.extend(g.iter().zip(u).map(|(&g, u)| act.value(g) * u));
    }
    y
}

/// `[dg | du]`.
pub(super) fn glu_backward(dy: Matrix<'_>, x: Matrix<'_>, act: Act) -> Vec<f64> {
    let half = x.cols / 2;
    let mut dx = Vec::with_capacity(x.data.len());
    for r in 0..x.rows {
        let ((g, u), dy) = (x.row(r).split_at(half), dy.row(r));
        dx.extend((0..half).map(|c| dy[c] * u[c] * act.slope(g[c])));
        dx.extend((0..half).map(|c| dy[c] * act.value(g[c])));
    }
    dx
}
