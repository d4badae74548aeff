//! Gated linear units.

use crate::naive::{Act, Matrix, Naive, matrix};
use crate::{Activation, GluOps, Result, Tensor};

impl GluOps for Naive {
    fn glu_fwd(&self, x: &Tensor, act: Activation) -> Result<Tensor> {
        let y = forward(matrix(x)?, Act(act));
        Ok(self.tensor(x.device(), y, [x.rows(), x.cols() / 2]))
    }

    fn glu_bwd(&self, dy: &Tensor, x: &Tensor, act: Activation) -> Result<Tensor> {
        Ok(self.like(x, backward(matrix(dy)?, matrix(x)?, Act(act))))
    }
}

/// `act(g) * u` for rows `[g | u]`.
fn forward(x: Matrix<'_>, act: Act) -> Vec<f64> {
    let half = x.cols / 2;
    let mut y = Vec::with_capacity(x.rows * half);
    for r in 0..x.rows {
        let (g, u) = x.row(r).split_at(half);
        y.extend(g.iter().zip(u).map(|(&g, u)| act.value(g) * u));
    }
    y
}

/// `[dg | du]`.
fn backward(dy: Matrix<'_>, x: Matrix<'_>, act: Act) -> Vec<f64> {
    let half = x.cols / 2;
    let mut dx = Vec::with_capacity(x.data.len());
    for r in 0..x.rows {
        let ((g, u), dy) = (x.row(r).split_at(half), dy.row(r));
        dx.extend((0..half).map(|c| dy[c] * u[c] * act.slope(g[c])));
        dx.extend((0..half).map(|c| dy[c] * act.value(g[c])));
    }
    dx
}
