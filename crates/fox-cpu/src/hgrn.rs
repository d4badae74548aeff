//! Gates of HGRN2 and their lower bounds.

use fox_tensor::{
    HgrnGates, HgrnGrads, HgrnInputs, HgrnOps, Result, Tensor, check_hgrn_gates_bwd,
    check_hgrn_gates_fwd, check_lower_bound_bwd, check_lower_bound_fwd,
};
use rayon::prelude::*;

use crate::Cpu;
use crate::gated_norm::activate;
use crate::rows::{rows_per_task, sum_partials};
use crate::simd::{exp, map, sigmoid, simd_fn, softplus, update};

impl HgrnOps for Cpu {
    fn hgrn_gates_fwd(&self, inputs: &HgrnInputs<'_>) -> Result<HgrnGates> {
        check_hgrn_gates_fwd(self, inputs)?;
        self.run(|| hgrn_fwd(self, inputs))
    }

    fn hgrn_gates_bwd(&self, d_out: &HgrnGates, inputs: &HgrnInputs<'_>) -> Result<HgrnGrads> {
        check_hgrn_gates_bwd(self, d_out, inputs)?;
        self.run(|| hgrn_bwd(self, d_out, inputs))
    }

    fn lower_bound_fwd(&self, table: &Tensor, layer: usize) -> Result<Tensor> {
        check_lower_bound_fwd(self, table, layer)?;
        lower_bound_fwd(self, table, layer)
    }

    fn lower_bound_bwd(&self, dy: &Tensor, table: &Tensor, layer: usize) -> Result<Tensor> {
        check_lower_bound_bwd(self, dy, table, layer)?;
        lower_bound_bwd(self, dy, table, layer)
    }
}

/// Per channel: `1 - lower` and `ln lower`.
struct Bounds {
    free: Vec<f32>,
    log: Vec<f32>,
}

impl Bounds {
    fn new(cpu: &Cpu, inputs: &HgrnInputs<'_>) -> Self {
        let width = inputs.z.cols();
        match inputs.lower {
            None => Bounds { free: vec![1.0; width], log: vec![f32::NEG_INFINITY; width] },
            Some(lower) => {
                let lower = cpu.real(lower);
                Bounds {
                    free: lower.iter().map(|lb| 1.0 - lb).collect(),
                    log: lower.iter().map(|lb| lb.ln()).collect(),
                }
            }
        }
    }
}

simd_fn! {
    fn hgrn_rows<'k, S>(
        s, q: &'k [f32], z: &'k [f32], bounds: &'k Bounds,
        out: (&'k mut [f32], &'k mut [f32], &'k mut [f32]),
    ) {
        let (q_out, k, log_f) = out;
        let width = bounds.free.len();
        map(s, [q], q_out, |[q]| activate(s, fox_tensor::Activation::Silu, q).0);
        let zero = s.splat(0.0);
        for (r, z) in z.chunks_exact(width).enumerate() {
            let row = r * width..(r + 1) * width;
            map(s, [z, &bounds.free], &mut k[row.clone()], |[z, free]| {
                s.mul(free, sigmoid(s, s.sub(zero, z)))
            });
            // f = (1 + lb e^-z) / (1 + e^-z).
            map(s, [z, &bounds.log], &mut log_f[row], |[z, log]| {
                s.sub(softplus(s, s.sub(log, z)), softplus(s, s.sub(zero, z)))
            });
        }
    }
}

/// `(silu(q), 1 - f, ln f)`.
fn hgrn_fwd(cpu: &Cpu, inputs: &HgrnInputs<'_>) -> Result<HgrnGates> {
    let (raw, z, bounds) = (cpu.real(inputs.q), cpu.real(inputs.z), Bounds::new(cpu, inputs));
    let mut q = cpu.pool().take(z.len())?;
    let (mut k, mut log_f) = (cpu.pool().take(z.len())?, cpu.pool().take(z.len())?);
    let step = rows_per_task(inputs.z.cols()) * inputs.z.cols();
    q.par_chunks_mut(step)
        .zip(k.par_chunks_mut(step))
        .zip(log_f.par_chunks_mut(step))
        .zip(raw.par_chunks(step).zip(z.par_chunks(step)))
        .for_each(|(((q, k), log_f), (raw, z))| {
            hgrn_rows(cpu.level(), raw, z, &bounds, (q, k, log_f));
        });
    let tensor = |data| cpu.tensor(data, inputs.q.shape(), inputs.q.device());
    Ok(HgrnGates { q: tensor(q), k: tensor(k), log_f: tensor(log_f) })
}

/// Rows of the operands of the backward pass.
struct HgrnRows<'a> {
    q: &'a [f32],
    z: &'a [f32],
    dq: &'a [f32],
    dk: &'a [f32],
    dlog_f: &'a [f32],
}

/// Above this, `e^x` is as good as infinite; `0 * e^x` must stay 0.
const LARGE: f32 = 80.0;

simd_fn! {
    fn hgrn_grad_rows<'k, S>(
        s, rows: HgrnRows<'k>, bounds: &'k Bounds,
        dq: &'k mut [f32], dz: &'k mut [f32], dlower: &'k mut [f32],
    ) {
        let width = bounds.free.len();
        map(s, [rows.q, rows.dq], dq, |[q, d]| {
            s.mul(d, activate(s, fox_tensor::Activation::Silu, q).1)
        });
        let (zero, one) = (s.splat(0.0), s.splat(1.0));
        for (r, z) in rows.z.chunks_exact(width).enumerate() {
            let row = r * width..(r + 1) * width;
            let (dk, dlog_f) = (&rows.dk[row.clone()], &rows.dlog_f[row.clone()]);
            let (free, log) = (&bounds.free[..], &bounds.log[..]);
            map(s, [z, dk, dlog_f, free, log], &mut dz[row], |[z, dk, dlog_f, free, log]| {
                let minus = s.sub(zero, z);
                let (open, shut) = (sigmoid(s, z), sigmoid(s, minus));
                // f / ((1 - lb) open) = 1 + lb / (1 - lb) (1 + e^-z).
                let large = s.add(one, exp(s, s.min(minus, s.splat(LARGE))));
                let ratio = s.mul_add(s.div(exp(s, log), free), large, one);
                let through_k = s.mul(dk, s.mul(free, open));
                s.mul(shut, s.sub(s.div(dlog_f, ratio), through_k))
            });
            if !dlower.is_empty() {
                update(s, [z, dk, dlog_f, free, log], dlower, |[z, dk, dlog_f, free, log], sum| {
                    let (open, shut) = (sigmoid(s, z), sigmoid(s, s.sub(zero, z)));
                    let f = s.mul_add(free, open, exp(s, log));
                    s.mul_add(shut, s.sub(s.div(dlog_f, f), dk), sum)
                });
            }
        }
    }
}

/// Gradients of the raw queries, the logits and the bounds.
fn hgrn_bwd(cpu: &Cpu, d_out: &HgrnGates, inputs: &HgrnInputs<'_>) -> Result<HgrnGrads> {
    let (width, len) = (inputs.z.cols(), inputs.z.len());
    let bounds = Bounds::new(cpu, inputs);
    let (q, z) = (cpu.real(inputs.q), cpu.real(inputs.z));
    let (dq_out, dk, dlog_f) = (cpu.real(&d_out.q), cpu.real(&d_out.k), cpu.real(&d_out.log_f));
    let (mut dq, mut dz) = (cpu.pool().take(len)?, cpu.pool().take(len)?);
    let step = rows_per_task(width) * width;
    let part_len = if inputs.lower.is_some() { width } else { 0 };
    let mut parts = cpu.pool().zeros(len.div_ceil(step) * part_len)?;
    let mut dlowers: Vec<&mut [f32]> = match part_len {
        0 => (0..len.div_ceil(step)).map(|_| Default::default()).collect(),
        n => parts.chunks_exact_mut(n).collect(),
    };
    dq.par_chunks_mut(step).zip(dz.par_chunks_mut(step)).zip(&mut dlowers).enumerate().for_each(
        |(at, ((dq, dz), dlower))| {
            let part = |x: &'_ [f32]| at * step..(at * step + step).min(x.len());
            let rows = HgrnRows {
                q: &q[part(q)],
                z: &z[part(z)],
                dq: &dq_out[part(q)],
                dk: &dk[part(q)],
                dlog_f: &dlog_f[part(q)],
            };
            hgrn_grad_rows(cpu.level(), rows, &bounds, dq, dz, dlower);
        },
    );
    let device = inputs.q.device();
    let dlower = match inputs.lower {
        None => None,
        Some(lower) => {
            let mut sum = cpu.pool().zeros(width)?;
            sum_partials(&parts, &mut sum);
            Some(cpu.tensor(sum, lower.shape(), device))
        }
    };
    Ok(HgrnGrads {
        dq: cpu.tensor(dq, inputs.q.shape(), device),
        dz: cpu.tensor(dz, inputs.z.shape(), device),
        dlower,
    })
}

/// `(lb[C], softmax over layers [L * C])`; a table is small, so f64 costs nothing.
fn lower_bound(table: &[f32], width: usize, layer: usize) -> (Vec<f64>, Vec<f64>) {
    let layers = table.len() / width.max(1);
    let (mut bound, mut softmax) = (vec![0.0; width], vec![0.0; table.len()]);
    for c in 0..width {
        let column = || (0..layers).map(|m| f64::from(table[m * width + c]));
        let max = column().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = column().map(|x| (x - max).exp()).sum();
        for (m, x) in column().enumerate() {
            softmax[m * width + c] = (x - max).exp() / sum;
        }
        bound[c] = (1..=layer).map(|m| softmax[m * width + c]).sum();
    }
    (bound, softmax)
}

/// The bounds of one layer.
fn lower_bound_fwd(cpu: &Cpu, table: &Tensor, layer: usize) -> Result<Tensor> {
    let (bound, _) = lower_bound(cpu.real(table), table.cols(), layer);
    table.device().from_f64(&bound, [table.cols()])
}

/// Gradient of the table.
fn lower_bound_bwd(cpu: &Cpu, dy: &Tensor, table: &Tensor, layer: usize) -> Result<Tensor> {
    let (width, dy) = (table.cols(), cpu.real(dy));
    let (bound, softmax) = lower_bound(cpu.real(table), width, layer);
    let grad = |(i, p): (usize, &f64)| {
        let inside = if (1..=layer).contains(&(i / width)) { 1.0 } else { 0.0 };
        p * (inside - bound[i % width]) * f64::from(dy[i % width])
    };
    let dtable: Vec<f64> = softmax.iter().enumerate().map(grad).collect();
    table.device().from_f64(&dtable, table.shape())
}
