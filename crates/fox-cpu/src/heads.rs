//! Token shift, per-head RMS norm and RoPE of a projection, in one pass.

use std::sync::Arc;

use fox_tensor::{
    HeadGrads, HeadInputs, HeadOps, HeadSpec, Result, Tensor, check_prepare_heads_bwd,
    check_prepare_heads_fwd,
};
use rayon::prelude::*;

use crate::backend::Cpu;
use crate::rope::Table;
use crate::rows::{RowChunk, row_chunks, rows_per_task, sum_partials};
use crate::shared::Shared;
use crate::simd::{Level, Simd, dot, map, simd_fn, sum, update};

impl HeadOps for Cpu {
    fn prepare_heads_fwd(&self, inputs: &HeadInputs<'_>, spec: &HeadSpec) -> Result<Tensor> {
        check_prepare_heads_fwd(self, inputs, spec)?;
        let mut y = self.pool().zeros(inputs.u.len())?;
        self.run(|| forward(self, inputs, spec, &mut y))?;
        Ok(self.tensor(y, inputs.u.shape(), inputs.u.device()))
    }

    fn prepare_heads_bwd(
        &self,
        dy: &Tensor,
        inputs: &HeadInputs<'_>,
        spec: &HeadSpec,
    ) -> Result<HeadGrads> {
        check_prepare_heads_bwd(self, dy, inputs, spec)?;
        self.run(|| backward(self, dy, inputs, spec))
    }
}

/// Operands of one call as slices.
struct Operands<'a> {
    level: Level,
    heads: usize,
    head_dim: usize,
    eps: f32,
    u: &'a [f32],
    shift: Option<&'a [f32]>,
    prev: Option<&'a [f32]>,
    norm: Option<&'a [f32]>,
    rope: Option<Arc<Table>>,
}

impl<'a> Operands<'a> {
    fn new(cpu: &'a Cpu, inputs: &HeadInputs<'a>, spec: &HeadSpec) -> Self {
        let positions = spec.segments.as_slice().iter().map(|s| s.k_len).max().unwrap_or(0);
        Operands {
            level: cpu.level(),
            heads: spec.heads,
            head_dim: spec.head_dim,
            eps: spec.norm_eps,
            u: cpu.real(inputs.u),
            shift: inputs.shift.map(|x| cpu.real(x)),
            prev: inputs.prev.map(|x| cpu.real(x)),
            norm: inputs.norm.map(|x| cpu.real(x)),
            rope: spec.rope.map(|rope| cpu.rope(rope, spec.head_dim, positions)),
        }
    }

    fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Norm weights of a head.
    fn weights(&self, head: usize) -> Option<&'a [f32]> {
        let d = self.head_dim;
        self.norm.map(|w| if w.len() == d { w } else { &w[head * d..][..d] })
    }

    /// The raw row before row `t` of a chunk; `None` means zeros.
    fn before(&self, chunk: &RowChunk, t: usize) -> Option<&'a [f32]> {
        let width = self.width();
        if t == 0 && chunk.first {
            return self.prev.map(|prev| &prev[chunk.segment * width..][..width]);
        }
        Some(&self.u[(chunk.row + t - 1) * width..][..width])
    }
}

/// `sigmoid` in plain f32, for the one coefficient per head and row.
fn coefficient(logit: f32) -> f32 {
    1.0 / (1.0 + (-logit).exp())
}

/// `y = a * before + (1 - a) * u`.
#[inline(always)]
fn shift<S: Simd>(s: S, u: &[f32], before: Option<&[f32]>, a: f32, y: &mut [f32]) {
    let (a, rest) = (s.splat(a), s.splat(1.0 - a));
    match before {
        Some(before) => map(s, [u, before], y, |[u, b]| s.mul_add(a, b, s.mul(rest, u))),
        None => map(s, [u], y, |[u]| s.mul(rest, u)),
    }
}

simd_fn! {
    /// One chunk of the forward pass; `y` holds the chunk's rows.
    fn forward_chunk<'k, S>(s, ops: &'k Operands<'k>, chunk: &'k RowChunk, y: &'k mut [f32]) {
        let (d, width) = (ops.head_dim, ops.width());
        for (t, y) in y.chunks_exact_mut(width).enumerate() {
            let row = chunk.row + t;
            let before = ops.before(chunk, t);
            for (h, y) in y.chunks_exact_mut(d).enumerate() {
                let u = &ops.u[row * width + h * d..][..d];
                match ops.shift {
                    None => y.copy_from_slice(u),
                    Some(logits) => {
                        let a = coefficient(logits[row * ops.heads + h]);
                        shift(s, u, before.map(|b| &b[h * d..][..d]), a, y);
                    }
                }
                if let Some(w) = ops.weights(h) {
                    let scale = s.splat(1.0 / (dot(s, y, y) / d as f32 + ops.eps).sqrt());
                    update(s, [w], y, |[w], y| s.mul(s.mul(y, scale), w));
                }
                if let Some(rope) = &ops.rope {
                    let (cosines, sines) = rope.at(chunk.position + t);
                    rotate(y, cosines, sines, 1.0);
                }
            }
        }
    }
}

/// Rotates the pairs `(y[m], y[m + d/2])`, backwards for `sign = -1`.
#[inline(always)]
fn rotate(y: &mut [f32], cosines: &[f32], sines: &[f32], sign: f32) {
    let (low, high) = y.split_at_mut(cosines.len());
    for (((a, b), cos), sin) in low.iter_mut().zip(high).zip(cosines).zip(sines) {
        let sin = sign * sin;
        (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
    }
}

/// The forward pass, `[R, H * d]`.
pub fn forward(cpu: &Cpu, inputs: &HeadInputs<'_>, spec: &HeadSpec, y: &mut [f32]) -> Result<()> {
    let ops = Operands::new(cpu, inputs, spec);
    let width = ops.width();
    let y = Shared::new(y);
    // In decoding, chunks have one row: a task processes several.
    let chunks = row_chunks(&spec.segments, width);
    let rows: usize = chunks.iter().map(|chunk| chunk.len).sum();
    let together = rows_per_task(width) * chunks.len() / rows.max(1);
    chunks.par_iter().with_min_len(together.max(1)).for_each(|chunk| {
        // SAFETY: chunks have disjoint rows, because segments are disjoint.
        let y = unsafe { y.slice(chunk.row * width, chunk.len * width) };
        forward_chunk(ops.level, &ops, chunk, y);
    });
    Ok(())
}

simd_fn! {
    /// One chunk of the backward pass. `du` and `dshift` hold the chunk's rows; `dnorm` is this chunk's partial
    /// gradient of the norm weights, always `[H * d]`.
    fn backward_chunk<'k, S>(
        s, ops: &'k Operands<'k>, chunk: &'k RowChunk, dy: &'k [f32],
        du: &'k mut [f32], dshift: &'k mut [f32], dnorm: &'k mut [f32], scratch: &'k mut [f32],
    ) {
        let (d, width) = (ops.head_dim, ops.width());
        let (shifted, rest) = scratch.split_at_mut(d);
        let (grad, carry) = rest.split_at_mut(d);
        let carry = &mut carry[..width];
        // `carry` is `a[t+1] * dv[t+1]`, the term of row `t`'s gradient from its successor. At the end of a chunk
        // it comes from the first row of the next chunk, which is recomputed.
        carry.fill(0.0);
        let ahead = usize::from(ops.shift.is_some() && !chunk.last);
        for t in (0..chunk.len + ahead).rev() {
            let row = chunk.row + t;
            let before = ops.before(chunk, t);
            for h in 0..ops.heads {
                let at = row * width + h * d;
                let u = &ops.u[at..][..d];
                let before = before.map(|b| &b[h * d..][..d]);
                let a = ops.shift.map(|logits| coefficient(logits[row * ops.heads + h]));
                grad.copy_from_slice(&dy[at..][..d]);
                if let Some(rope) = &ops.rope {
                    let (cosines, sines) = rope.at(chunk.position + t);
                    rotate(grad, cosines, sines, -1.0);
                }
                if let Some(w) = ops.weights(h) {
                    let v: &[f32] = match a {
                        None => u,
                        Some(a) => {
                            shift(s, u, before, a, shifted);
                            shifted
                        }
                    };
                    let rstd = 1.0 / (dot(s, v, v) / d as f32 + ops.eps).sqrt();
                    let scale = s.splat(rstd);
                    if t < chunk.len {
                        let dnorm = &mut dnorm[h * d..][..d];
                        update(s, [grad, v], dnorm, |[g, v], n| s.mul_add(s.mul(g, v), scale, n));
                    }
                    let along = sum(s, [grad, w, v], |[g, w, v], sum| s.mul_add(s.mul(g, w), v, sum));
                    let slope = s.splat(-along * rstd * rstd * rstd / d as f32);
                    update(s, [w, v], grad, |[w, v], g| {
                        s.mul_add(slope, v, s.mul(scale, s.mul(g, w)))
                    });
                }
                let carry = &mut carry[h * d..][..d];
                match a {
                    None => du[t * width + h * d..][..d].copy_from_slice(grad),
                    Some(a) => {
                        if t < chunk.len {
                            let rest = s.splat(1.0 - a);
                            let du = &mut du[t * width + h * d..][..d];
                            map(s, [grad, carry], du, |[g, c]| s.mul_add(rest, g, c));
                            let own = dot(s, grad, u);
                            let other = before.map_or(0.0, |b| dot(s, grad, b));
                            dshift[t * ops.heads + h] = (other - own) * a * (1.0 - a);
                        }
                        let a = s.splat(a);
                        map(s, [grad], carry, |[g]| s.mul(a, g));
                    }
                }
            }
        }
    }
}

/// The backward pass.
pub fn backward(
    cpu: &Cpu,
    dy: &Tensor,
    inputs: &HeadInputs<'_>,
    spec: &HeadSpec,
) -> Result<HeadGrads> {
    let ops = Operands::new(cpu, inputs, spec);
    let (width, heads, rows) = (ops.width(), ops.heads, inputs.u.rows());
    let dy = cpu.real(dy);
    let mut du = cpu.pool().zeros(rows * width)?;
    let mut dshift = cpu.pool().zeros(if ops.shift.is_some() { rows * heads } else { 0 })?;
    let chunks = row_chunks(&spec.segments, width);
    let mut parts = cpu.pool().zeros(chunks.len() * width)?;
    {
        let (du, dshift) = (Shared::new(&mut du), Shared::new(&mut dshift));
        chunks.par_iter().zip(parts.par_chunks_mut(width)).try_for_each(|(chunk, part)| {
            let mut scratch = cpu.pool().take(2 * ops.head_dim + width)?;
            let shift_rows = if ops.shift.is_some() { chunk.len * heads } else { 0 };
            let shift_start = if ops.shift.is_some() { chunk.row * heads } else { 0 };
            // SAFETY: chunks have disjoint rows, because segments are disjoint.
            let (du, dshift) = unsafe {
                (
                    du.slice(chunk.row * width, chunk.len * width),
                    dshift.slice(shift_start, shift_rows),
                )
            };
            backward_chunk(ops.level, &ops, chunk, dy, du, dshift, part, &mut scratch);
            Ok::<_, fox_tensor::Error>(())
        })?;
    }
    let device = inputs.u.device();
    let dnorm = match inputs.norm {
        None => None,
        Some(weights) => {
            let mut dnorm = cpu.pool().zeros(weights.len())?;
            // Weights shared by the heads are a shorter period of the same sum.
            sum_partials(&parts, &mut dnorm);
            Some(cpu.tensor(dnorm, weights.shape(), device))
        }
    };
    Ok(HeadGrads {
        du: cpu.tensor(du, inputs.u.shape(), device),
        dshift: inputs.shift.map(|shift| cpu.tensor(dshift, shift.shape(), device)),
        dnorm,
    })
}
