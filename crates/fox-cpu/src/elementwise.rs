//! Pointwise ops: gated linear unit, log gates, sums, the optimizer.

use fox_tensor::{Activation, AdamW};
use rayon::prelude::*;

use crate::gated_norm::activate;
use crate::rows::rows_per_task;
use crate::simd::{Level, dot, map, map_two, simd_fn, update};

simd_fn! {
    fn glu_rows<'k, S>(s, x: &'k [f32], inner: usize, act: Activation, y: &'k mut [f32]) {
        for (x, y) in x.chunks_exact(2 * inner).zip(y.chunks_exact_mut(inner)) {
            let (g, u) = x.split_at(inner);
            map(s, [g, u], y, |[g, u]| s.mul(activate(s, act, g).0, u));
        }
    }
}

/// `y[R, I] = act(g) * u` for `x = [g | u]`.
pub fn glu_fwd(level: Level, x: &[f32], inner: usize, act: Activation, y: &mut [f32]) {
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
pub fn glu_bwd(level: Level, dy: &[f32], x: &[f32], inner: usize, act: Activation, dx: &mut [f32]) {
    let step = rows_per_task(inner);
    dx.par_chunks_mut(step * 2 * inner)
        .zip(x.par_chunks(step * 2 * inner))
        .zip(dy.par_chunks(step * inner))
        .for_each(|((dx, x), dy)| glu_grad_rows(level, dy, x, inner, act, dx));
}

/// `logsigmoid(x) = -ln(1 + e^-x)`, without overflow on either side.
fn log_sigmoid(x: f32) -> f32 {
    x.min(0.0) - (-x.abs()).exp().ln_1p()
}

/// `y[R, H] = logsigmoid(z + bias)`.
pub fn log_gate_fwd(z: Option<&[f32]>, bias: Option<&[f32]>, heads: usize, y: &mut [f32]) {
    let step = rows_per_task(heads) / 8 + 1;
    y.par_chunks_mut(step * heads).enumerate().for_each(|(at, y)| {
        for (n, y) in y.iter_mut().enumerate() {
            *y = log_sigmoid(logit(z, bias, at * step * heads + n, heads));
        }
    });
}

/// `dz[R, H] = dy * sigmoid(-(z + bias))`.
pub fn log_gate_bwd(
    dy: &[f32],
    z: Option<&[f32]>,
    bias: Option<&[f32]>,
    heads: usize,
    dz: &mut [f32],
) {
    let step = rows_per_task(heads) / 8 + 1;
    dz.par_chunks_mut(step * heads).enumerate().for_each(|(at, dz)| {
        for (n, dz) in dz.iter_mut().enumerate() {
            let i = at * step * heads + n;
            *dz = dy[i] / (1.0 + logit(z, bias, i, heads).exp());
        }
    });
}

fn logit(z: Option<&[f32]>, bias: Option<&[f32]>, i: usize, heads: usize) -> f32 {
    z.map_or(0.0, |z| z[i]) + bias.map_or(0.0, |bias| bias[i % heads])
}

simd_fn! {
    fn add_to<'k, S>(s, x: &'k [f32], y: &'k mut [f32]) {
        update(s, [x], y, |[x], y| s.add(x, y));
    }
}

/// `y += x`.
pub fn add(level: Level, x: &[f32], y: &mut [f32]) {
    let step = rows_per_task(1);
    y.par_chunks_mut(step).zip(x.par_chunks(step)).for_each(|(y, x)| add_to(level, x, y));
}

simd_fn! {
    fn square_sum<'k, S>(s, x: &'k [f32]) -> f64 {
        // Short stretches in f32, their sums in f64.
        x.chunks(1024).map(|x| dot(s, x, x) as f64).sum()
    }
}

/// `sum x^2`, in a fixed order.
pub fn sum_squares(level: Level, x: &[f32]) -> f64 {
    let parts: Vec<f64> = x.par_chunks(rows_per_task(1)).map(|x| square_sum(level, x)).collect();
    parts.iter().sum()
}

simd_fn! {
    fn adamw_part<'k, S>(
        s, param: &'k mut [f32], grad: &'k [f32], m: &'k mut [f32], v: &'k mut [f32],
        step: &'k AdamW,
    ) {
        let scale = s.splat(step.grad_scale);
        let (beta1, rest1) = (s.splat(step.beta1), s.splat(1.0 - step.beta1));
        let (beta2, rest2) = (s.splat(step.beta2), s.splat(1.0 - step.beta2));
        update(s, [grad], m, |[g], m| s.mul_add(rest1, s.mul(g, scale), s.mul(beta1, m)));
        update(s, [grad], v, |[g], v| {
            let g = s.mul(g, scale);
            s.mul_add(s.mul(rest2, g), g, s.mul(beta2, v))
        });
        let correct1 = 1.0 - (step.beta1 as f64).powf(step.step as f64);
        let correct2 = 1.0 - (step.beta2 as f64).powf(step.step as f64);
        let rate = s.splat((step.lr as f64 / correct1) as f32);
        let root = s.splat((1.0 / correct2.sqrt()) as f32);
        let (decay, eps) = (s.splat(1.0 - step.lr * step.weight_decay), s.splat(step.eps));
        update(s, [m, v], param, |[m, v], p| {
            let size = s.mul_add(s.sqrt(v), root, eps);
            s.sub(s.mul(p, decay), s.mul(rate, s.div(m, size)))
        });
    }
}

/// One AdamW update.
pub fn adamw(
    level: Level,
    param: &mut [f32],
    grad: &[f32],
    m: &mut [f32],
    v: &mut [f32],
    step: &AdamW,
) {
    let size = rows_per_task(1);
    param
        .par_chunks_mut(size)
        .zip(grad.par_chunks(size))
        .zip(m.par_chunks_mut(size))
        .zip(v.par_chunks_mut(size))
        .for_each(|(((p, g), m), v)| adamw_part(level, p, g, m, v, step));
}
