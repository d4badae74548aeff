//! Gated linear units.

use fox_tensor::{Activation, GluOps, Result, Tensor, check_glu_bwd, check_glu_fwd};
use rayon::prelude::*;

use crate::Cpu;
use crate::gated_norm::activate;
use crate::rows::rows_per_task;
use crate::simd::{Level, map, map_two, simd_fn};

impl GluOps for Cpu {
    fn glu_fwd(&self, x: &Tensor, act: Activation) -> Result<Tensor> {
        check_glu_fwd(self, x)?;
        let (level, inner, data) = (self.level(), x.cols() / 2, self.real(x));
        self.produce([x.rows(), inner], x.device(), |y| {
            forward(level, data, inner, act, y);
        })
    }

    fn glu_bwd(&self, dy: &Tensor, x: &Tensor, act: Activation) -> Result<Tensor> {
        check_glu_bwd(self, dy, x)?;
        let (level, inner) = (self.level(), x.cols() / 2);
        let (dy, data) = (self.real(dy), self.real(x));
        self.produce(x.shape(), x.device(), |dx| {
            backward(level, dy, data, inner, act, dx);
        })
    }
}

simd_fn! {
    fn glu_rows<'k, S>(s, x: &'k [f32], inner: usize, act: Activation, y: &'k mut [f32]) {
        for (x, y) in x.chunks_exact(2 * inner).zip(y.chunks_exact_mut(inner)) {
            let (g, u) = x.split_at(inner);
            map(s, [g, u], y, |[g, u]| s.mul(activate(s, act, g).0, u));
        }
    }
}

/// `y[R, I] = act(g) * u` for `x = [g | u]`.
fn forward(level: Level, x: &[f32], inner: usize, act: Activation, y: &mut [f32]) {
    let step = rows_per_task(inner);
    y.par_chunks_mut(step * inner)
        .zip(x.par_chunks(step * 2 * inner))
        .for_each(|(y, x)| glu_rows(level, x, inner, act, y));
}

simd_fn! {
    fn glu_grad_rows<'k, S>(
        s, dy: &'k [f32], x: &'k [f32], inner: usize, act: Activation, dx: &'k mut [f32],
    ) {
        for (r, dx) in dx.chunks_exact_mut(2 * inner).enumerate() {
            let dy = &dy[r * inner..][..inner];
            let (g, u) = x[r * 2 * inner..][..2 * inner].split_at(inner);
            let (dg, du) = dx.split_at_mut(inner);
            map_two(s, [dy, g, u], dg, du, |[dy, g, u]| {
                let (value, slope) = activate(s, act, g);
                (s.mul(s.mul(dy, u), slope), s.mul(dy, value))
            });
        }
    }
}

/// `dx[R, 2 I]`.
fn backward(level: Level, dy: &[f32], x: &[f32], inner: usize, act: Activation, dx: &mut [f32]) {
    let step = rows_per_task(inner);
    dx.par_chunks_mut(step * 2 * inner)
        .zip(x.par_chunks(step * 2 * inner))
        .zip(dy.par_chunks(step * inner))
        .for_each(|((dx, x), dy)| glu_grad_rows(level, dy, x, inner, act, dx));
}
