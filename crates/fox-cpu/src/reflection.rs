//! Reflections of PaTH attention.

use fox_tensor::{
    ReflectionInputs, ReflectionOps, Result, Tensor, check_reflection_bwd, check_reflection_fwd,
};
use rayon::prelude::*;

use crate::Cpu;
use crate::rows::rows_per_task;
use crate::simd::{dot, map, simd_fn};

impl ReflectionOps for Cpu {
    fn reflection_fwd(&self, inputs: &ReflectionInputs<'_>) -> Result<Tensor> {
        check_reflection_fwd(self, inputs)?;
        let (y, z, level) = (self.real(inputs.y), self.real(inputs.z), self.level());
        let (width, heads) = (inputs.y.cols(), inputs.z.cols());
        let (d, rows) = (width / heads, rows_per_task(width));
        self.produce(inputs.y.shape(), inputs.y.device(), |u| {
            let tasks = u.par_chunks_mut(rows * width).zip(y.par_chunks(rows * width));
            tasks.zip(z.par_chunks(rows * heads)).for_each(|((u, y), z)| {
                for ((u, y), z) in u.chunks_mut(d).zip(y.chunks(d)).zip(z) {
                    head_fwd(level, y, strength(*z), inputs.eps, u);
                }
            });
        })
    }

    fn reflection_bwd(
        &self,
        du: &Tensor,
        inputs: &ReflectionInputs<'_>,
    ) -> Result<(Tensor, Tensor)> {
        check_reflection_bwd(self, du, inputs)?;
        let (y, z, du) = (self.real(inputs.y), self.real(inputs.z), self.real(du));
        let (width, heads, level) = (inputs.y.cols(), inputs.z.cols(), self.level());
        let (d, rows) = (width / heads, rows_per_task(width));
        let (mut dy, mut dz) = (self.pool().take(y.len())?, self.pool().take(z.len())?);
        self.run(|| {
            let tasks = dy.par_chunks_mut(rows * width).zip(dz.par_chunks_mut(rows * heads));
            tasks.enumerate().for_each(|(n, (dy, dz))| {
                let first = n * rows * heads;
                for (h, (dy, dz)) in dy.chunks_mut(d).zip(dz).enumerate() {
                    let (at, z) = ((first + h) * d, z[first + h]);
                    let strength = strength(z);
                    let along =
                        head_bwd(level, &y[at..][..d], &du[at..][..d], strength, inputs.eps, dy);
                    // The slope of sqrt(2 sigmoid(z)) is half of it times 1 - sigmoid(z).
                    *dz = (0.5 * sigmoid(-z) * strength) * along;
                }
            });
        });
        let device = inputs.y.device();
        Ok((self.tensor(dy, inputs.y.shape(), device), self.tensor(dz, inputs.z.shape(), device)))
    }
}

fn sigmoid(z: f32) -> f32 {
    1.0 / (1.0 + (-z).exp())
}

/// `sqrt(2 sigmoid(z))`.
fn strength(z: f32) -> f32 {
    (2.0 * sigmoid(z)).sqrt()
}

simd_fn! {
    /// `u = strength y / sqrt(sum y^2 + eps)`.
    fn head_fwd<'k, S>(s, y: &'k [f32], strength: f32, eps: f32, u: &'k mut [f32]) {
        let factor = s.splat(strength / (dot(s, y, y) + eps).sqrt());
        map(s, [y], u, |[y]| s.mul(factor, y));
    }
}

simd_fn! {
    /// Writes the gradient of `y`; returns `<du, y> / sqrt(sum y^2 + eps)`.
    fn head_bwd<'k, S>(
        s, y: &'k [f32], du: &'k [f32], strength: f32, eps: f32, dy: &'k mut [f32],
    ) -> f32 {
        let r = 1.0 / (dot(s, y, y) + eps).sqrt();
        let along = dot(s, y, du) * r;
        let (factor, along_r) = (s.splat(strength * r), s.splat(-(along * r)));
        map(s, [y, du], dy, |[y, du]| s.mul(factor, s.mul_add(along_r, y, du)));
        along
    }
}
