//! Attention sinks.

use fox_tensor::{Result, SinkOps, Tensor, check_sink_bwd, check_sink_fwd};
use rayon::prelude::*;

use crate::Cpu;
use crate::rows::rows_per_task;

impl SinkOps for Cpu {
    fn sink_fwd(&self, o: &Tensor, lse: &Tensor, sinks: &Tensor) -> Result<(Tensor, Tensor)> {
        check_sink_fwd(self, o, lse, sinks)?;
        self.run(|| forward(self, o, lse, sinks))
    }

    fn sink_bwd(&self, d_out: &Tensor, o: &Tensor, lse: &Tensor, sinks: &Tensor) -> Result<Tensor> {
        check_sink_bwd(self, d_out, o, lse, sinks)?;
        self.run(|| backward(self, d_out, o, lse, sinks))
    }
}

/// `(o', lse')`.
pub fn forward(cpu: &Cpu, o: &Tensor, lse: &Tensor, sinks: &Tensor) -> Result<(Tensor, Tensor)> {
    let (heads, width) = (sinks.len(), o.cols());
    let (old, sums, b) = (cpu.real(o), cpu.real(lse), cpu.real(sinks));
    let (mut new, mut new_sums) = (cpu.pool().take(old.len())?, cpu.pool().take(sums.len())?);
    let rows = rows_per_task(width);
    let parts = new.par_chunks_mut(rows * width).zip(new_sums.par_chunks_mut(rows * heads));
    parts.enumerate().for_each(|(part, (new, new_sums))| {
        let (first, d) = (part * rows * heads, width / heads);
        for (i, (new, new_sum)) in new.chunks_mut(d).zip(new_sums).enumerate() {
            let (unit, sink) = (first + i, b[i % heads]);
            let (old, sum) = (&old[unit * d..][..d], sums[unit]);
            if sum == f32::NEG_INFINITY {
                new.copy_from_slice(old);
                *new_sum = sum;
                continue;
            }
            let share = 1.0 / (1.0 + (sink - sum).exp());
            new.iter_mut().zip(old).for_each(|(new, old)| *new = share * old);
            *new_sum = sum.max(sink) + (-(sum - sink).abs()).exp().ln_1p();
        }
    });
    let device = o.device();
    Ok((cpu.tensor(new, o.shape(), device), cpu.tensor(new_sums, lse.shape(), device)))
}

/// The gradient of the sinks: sums of the rows of a task in f64, then of the tasks in order.
fn backward(cpu: &Cpu, d_out: &Tensor, o: &Tensor, lse: &Tensor, sinks: &Tensor) -> Result<Tensor> {
    let (heads, width) = (sinks.len(), o.cols());
    let (grads, values) = (cpu.real(d_out), cpu.real(o));
    let (sums, b) = (cpu.real(lse), cpu.real(sinks));
    let (rows, d) = (rows_per_task(width), width / heads);
    let one = |(part, (grads, values)): (usize, (&[f32], &[f32]))| {
        let mut found = vec![0.0f64; heads];
        for (i, (grads, values)) in grads.chunks(d).zip(values.chunks(d)).enumerate() {
            let (h, sum) = (i % heads, sums[part * rows * heads + i]);
            if sum > f32::NEG_INFINITY {
                let product: f32 = grads.iter().zip(values).map(|(g, x)| g * x).sum();
                found[h] -= f64::from((b[h] - sum).exp()) * f64::from(product);
            }
        }
        found
    };
    let parts = grads.par_chunks(rows * width).zip(values.par_chunks(rows * width));
    let parts: Vec<Vec<f64>> = parts.enumerate().map(one).collect();
    let mut d_sinks = cpu.pool().take(heads)?;
    for (h, d_sink) in d_sinks.iter_mut().enumerate() {
        *d_sink = parts.iter().map(|part| part[h]).sum::<f64>() as f32;
    }
    Ok(cpu.tensor(d_sinks, sinks.shape(), sinks.device()))
}
