//! What the optimizer does: sums of squares, AdamW, blends.

use fox_tensor::{
    AdamW, Blend, Result, Tensor, UpdateOps, check_adamw, check_blend, check_sum_squares,
};
use rayon::prelude::*;

use crate::Cpu;
use crate::rows::rows_per_task;
use crate::simd::{Level, dot, simd_fn, update};

impl UpdateOps for Cpu {
    fn sum_squares(&self, tensors: &[&Tensor]) -> Result<f64> {
        check_sum_squares(self, tensors)?;
        let level = self.level();
        Ok(tensors
            .iter()
            .map(|x| {
                let x = self.real(x);
                self.run(|| sum_squares(level, x))
            })
            .sum())
    }

    fn adamw(
        &self,
        param: &mut Tensor,
        grad: &Tensor,
        m: &mut Tensor,
        v: &mut Tensor,
        step: &AdamW,
    ) -> Result<()> {
        check_adamw(self, param, grad, m, v)?;
        let (level, grad) = (self.level(), self.real(grad));
        let param = self.buffer_mut(param)?;
        let (m, v) = (self.buffer_mut(m)?, self.buffer_mut(v)?);
        self.run(|| adamw(level, param, grad, m, v, step));
        Ok(())
    }

    fn blend(&self, blends: &mut [Blend<'_>]) -> Result<()> {
        check_blend(self, blends)?;
        let (level, step) = (self.level(), rows_per_task(1));
        for blend in blends {
            let (keep, add) = blend.factors();
            let (x, y) = blend.pair();
            let (x, y) = (self.real(x), self.buffer_mut(y)?);
            self.run(|| {
                y.par_chunks_mut(step)
                    .zip(x.par_chunks(step))
                    .for_each(|(y, x)| blend_part(level, x, y, keep, add));
            });
        }
        Ok(())
    }
}

simd_fn! {
    fn square_sum<'k, S>(s, x: &'k [f32]) -> f64 {
        // Short stretches in f32, their sums in f64.
        x.chunks(1024).map(|x| dot(s, x, x) as f64).sum()
    }
}

/// `sum x^2`, in a fixed order.
fn sum_squares(level: Level, x: &[f32]) -> f64 {
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

simd_fn! {
    fn blend_part<'k, S>(s, x: &'k [f32], y: &'k mut [f32], keep: f32, add: f32) {
        let (keep, add) = (s.splat(keep), s.splat(add));
        update(s, [x], y, |[x], y| s.mul_add(add, x, s.mul(keep, y)));
    }
}

/// One AdamW update.
fn adamw(
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
