//! Log decays per channel of Kimi Delta Attention.

use fox_tensor::{
    ChannelDecayInputs, ChannelDecayOps, Result, Tensor, check_channel_decay_bwd,
    check_channel_decay_fwd,
};
use rayon::prelude::*;

use crate::Cpu;
use crate::rows::{rows_per_task, sum_partials};
use crate::simd::{map, sigmoid, simd_fn, softplus};

impl ChannelDecayOps for Cpu {
    fn channel_decay_fwd(&self, inputs: &ChannelDecayInputs<'_>) -> Result<Tensor> {
        check_channel_decay_fwd(self, inputs)?;
        self.run(|| forward(self, inputs))
    }

    fn channel_decay_bwd(
        &self,
        dlog_decay: &Tensor,
        inputs: &ChannelDecayInputs<'_>,
    ) -> Result<(Tensor, Tensor)> {
        check_channel_decay_bwd(self, dlog_decay, inputs)?;
        self.run(|| backward(self, dlog_decay, inputs))
    }
}

simd_fn! {
    /// Log decays of the channels of one head.
    fn head_fwd<'k, S>(
        s, z: &'k [f32], bias: &'k [f32], rate: f32, bound: Option<f32>, out: &'k mut [f32],
    ) {
        match bound {
            None => {
                let rate = s.splat(-rate);
                map(s, [z, bias], out, |[z, b]| s.mul(rate, softplus(s, s.add(z, b))));
            }
            Some(bound) => {
                let (rate, bound) = (s.splat(rate), s.splat(bound));
                map(s, [z, bias], out, |[z, b]| s.mul(bound, sigmoid(s, s.mul(rate, s.add(z, b)))));
            }
        }
    }
}

/// `[R, H * C]`.
fn forward(cpu: &Cpu, inputs: &ChannelDecayInputs<'_>) -> Result<Tensor> {
    let (z, bias) = (cpu.real(inputs.z), cpu.real(inputs.bias));
    let rates: Vec<f32> = cpu.real(inputs.a_log).iter().map(|a| a.exp()).collect();
    let (width, level) = (bias.len(), cpu.level());
    let channels = width / rates.len();
    let mut out = cpu.pool().take(z.len())?;
    let step = rows_per_task(width) * width;
    out.par_chunks_mut(step).zip(z.par_chunks(step)).for_each(|(out, z)| {
        for (i, (out, z)) in out.chunks_mut(channels).zip(z.chunks(channels)).enumerate() {
            let head = i % rates.len();
            let bias = &bias[head * channels..][..channels];
            head_fwd(level, z, bias, rates[head], inputs.bound, out);
        }
    });
    Ok(cpu.tensor(out, inputs.z.shape(), inputs.z.device()))
}

/// `1 / (1 + e^-x)`.
fn logistic(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `(dz, da_log)`.
fn backward(
    cpu: &Cpu,
    dlog_decay: &Tensor,
    inputs: &ChannelDecayInputs<'_>,
) -> Result<(Tensor, Tensor)> {
    let (z, bias, d_out) = (cpu.real(inputs.z), cpu.real(inputs.bias), cpu.real(dlog_decay));
    let rates: Vec<f32> = cpu.real(inputs.a_log).iter().map(|a| a.exp()).collect();
    let (width, heads) = (bias.len(), rates.len());
    let channels = width / heads;
    let mut dz = cpu.pool().take(z.len())?;
    let step = rows_per_task(width) * width;
    let mut partials = cpu.pool().zeros(z.len().div_ceil(step) * heads)?;
    dz.par_chunks_mut(step).zip(partials.par_chunks_mut(heads)).enumerate().for_each(
        |(at, (dz, da_log))| {
            for (n, dz) in dz.iter_mut().enumerate() {
                let (i, column) = (at * step + n, n % width);
                let (head, u, d) = (column / channels, z[i] + bias[column], d_out[i]);
                let rate = rates[head];
                match inputs.bound {
                    None => {
                        *dz = -d * rate * logistic(u);
                        da_log[head] -= d * rate * (u.max(0.0) + (-u.abs()).exp().ln_1p());
                    }
                    Some(bound) => {
                        *dz = d * bound * rate * logistic(rate * u) * logistic(-rate * u);
                        da_log[head] += *dz * u;
                    }
                }
            }
        },
    );
    let mut da_log = cpu.pool().zeros(heads)?;
    sum_partials(&partials, &mut da_log);
    let device = inputs.z.device();
    Ok((cpu.tensor(dz, inputs.z.shape(), device), cpu.tensor(da_log, inputs.a_log.shape(), device)))
}
