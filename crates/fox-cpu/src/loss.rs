//! The output projection and its cross-entropy, a chunk of rows at a time.
//!
//! The logits of a whole batch would be the largest tensor of a language model by far. Only one chunk of them exists at a
//! time: it becomes losses, then gradients, then is overwritten by the next.

use std::sync::Arc;

use fox_tensor::{IGNORE_LABEL, LossInputs, LossOps, LossOut, Result, check_linear_cross_entropy};
use rayon::prelude::*;

use crate::Cpu;
use crate::linear::{Matrix, multiply};
use crate::pool::{Buffer, Pool};
use crate::simd::{Level, exp, simd_fn, sum, update};

impl LossOps for Cpu {
    fn linear_cross_entropy(&self, inputs: &LossInputs<'_>) -> Result<LossOut> {
        check_linear_cross_entropy(self, inputs)?;
        let LossInputs { x, w, labels, weights, teacher } = *inputs;
        let (data, table, labels) = (self.real(x), self.real(w), self.buffer(labels).as_i32());
        let weights = weights.map(|weights| self.real(weights));
        let teacher = teacher.map(|t| (self.real(t.x), self.real(t.w), t.weight));
        let mut losses = self.pool().take(labels.len())?;
        let grads = self.run(|| {
            let (level, pool) = (self.level(), self.pool());
            let targets = Targets { labels, weights, teacher };
            linear_cross_entropy(level, pool, data, table, &targets, &mut losses)
        })?;
        let device = x.device();
        Ok(LossOut {
            loss: self.tensor(losses, [labels.len()], device),
            grads: grads.map(|grads| {
                let dx = self.tensor(grads.dx, x.shape(), device);
                (dx, self.tensor(grads.dw, w.shape(), device))
            }),
        })
    }
}

/// Logits per chunk: 64 MiB, enough rows for an efficient product at any vocabulary.
const LOGITS: usize = 16 << 20;

/// Gradients of the objective with respect to `x` and to the projection.
pub struct Grads {
    pub dx: Buffer,
    pub dw: Buffer,
}

/// The largest value, by independent lanes, so that the comparisons are pipelined.
#[inline(always)]
fn largest(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 16];
    for part in x.chunks(lanes.len()) {
        for (lane, x) in lanes.iter_mut().zip(part) {
            *lane = if *x > *lane { *x } else { *lane };
        }
    }
    lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
}

simd_fn! {
    /// The loss of one row; its logits become `weight * (softmax - onehot)`, or are left in an
    /// unspecified state without a weight.
    fn row_loss<'k, S>(s, logits: &'k mut [f32], label: i32, weight: Option<f32>) -> f32 {
        if label == IGNORE_LABEL {
            logits.fill(0.0);
            return 0.0;
        }
        let target = logits[label as usize];
        let maximum = largest(logits);
        let shift = s.splat(maximum);
        update(s, [], logits, |[], x| exp(s, s.sub(x, shift)));
        let mut total = 0.0_f64;
        for part in logits.chunks(256) {
            total += sum(s, [part], |[x], sum| s.add(sum, x)) as f64;
        }
        if let Some(weight) = weight {
            let scale = s.splat((weight as f64 / total) as f32);
            update(s, [], logits, |[], x| s.mul(x, scale));
            logits[label as usize] -= weight;
        }
        (total.ln() + (maximum as f64 - target as f64)) as f32
    }
}

/// Labels, weights and teacher of the loss.
pub struct Targets<'a> {
    /// `[R]`.
    pub labels: &'a [i32],
    /// `[R]`, where gradients are wanted.
    pub weights: Option<&'a [f32]>,
    /// States `[R, C']`, projection `[V, C']` and weight of a teacher.
    pub teacher: Option<(&'a [f32], &'a [f32], f32)>,
}

/// Subtracts a teacher's term from the student's gradient of the logits of the rows from `first` on: with
/// `g = softmax - onehot` of either, the total is `weight (g_student - a g_teacher)`.
fn teach(
    level: Level,
    pool: &Arc<Pool>,
    (x, w, a): (&[f32], &[f32], f32),
    (first, labels, weights): (usize, &[i32], &[f32]),
    d_logits: &mut [f32],
) -> Result<()> {
    let count = labels.len();
    let vocab = d_logits.len() / count.max(1);
    let width = w.len() / vocab.max(1);
    let mut logits = pool.take(count * vocab)?;
    let x = Matrix::new(&x[first * width..(first + count) * width], count, width);
    multiply(x, Matrix::new(w, vocab, width).t(), &mut logits, false);
    let rows = logits.par_chunks_mut(vocab).zip(d_logits.par_chunks_mut(vocab)).enumerate();
    rows.for_each(|(r, (logits, d_logits))| {
        row_loss(level, logits, labels[r], Some(a * weights[r]));
        d_logits.iter_mut().zip(logits).for_each(|(d, taught)| *d -= *taught);
    });
    Ok(())
}

/// Losses `[R]` of `x[R, C]` against `labels[R]`, and the gradient of their weighted sum when there
/// are `weights[R]`.
pub fn linear_cross_entropy(
    level: Level,
    pool: &Arc<Pool>,
    x: &[f32],
    w: &[f32],
    targets: &Targets<'_>,
    losses: &mut [f32],
) -> Result<Option<Grads>> {
    let Targets { labels, weights, teacher } = *targets;
    let rows = labels.len();
    let width = x.len() / rows.max(1);
    let vocab = w.len() / width.max(1);
    let step = (LOGITS / vocab.max(1)).next_multiple_of(64).min(rows.max(1));
    let mut logits = pool.take(step * vocab)?;
    let mut grads = match weights {
        Some(_) => Some(Grads { dx: pool.take(x.len())?, dw: pool.zeros(w.len())? }),
        None => None,
    };
    let w = Matrix::new(w, vocab, width);
    for first in (0..rows).step_by(step) {
        let count = step.min(rows - first);
        let part = first * width..(first + count) * width;
        let x = Matrix::new(&x[part.clone()], count, width);
        let logits = &mut logits[..count * vocab];
        multiply(x, w.t(), logits, false);
        logits.par_chunks_mut(vocab).zip(&mut losses[first..first + count]).enumerate().for_each(
            |(r, (logits, loss))| {
                let weight = weights.map(|weights| weights[first + r]);
                *loss = row_loss(level, logits, labels[first + r], weight);
            },
        );
        if let (Some(weights), Some(teacher)) = (weights, teacher) {
            let labels = &labels[first..first + count];
            let weights = &weights[first..first + count];
            teach(level, pool, teacher, (first, labels, weights), logits)?;
        }
        if let Some(Grads { dx, dw }) = &mut grads {
            let d_logits = Matrix::new(logits, count, vocab);
            multiply(d_logits, w, &mut dx[part], false);
            multiply(d_logits.t(), x, dw, true);
        }
    }
    Ok(grads)
}
