//! Time steps of Mamba2.

use fox_tensor::{
    Result, Tensor, TimeStepInputs, TimeStepOps, check_time_step_bwd, check_time_step_fwd,
};
use rayon::prelude::*;

use crate::Cpu;
use crate::rows::rows_per_task;

impl TimeStepOps for Cpu {
    fn time_step_fwd(&self, inputs: &TimeStepInputs<'_>) -> Result<(Tensor, Tensor)> {
        check_time_step_fwd(self, inputs)?;
        self.run(|| forward(self, inputs))
    }

    fn time_step_bwd(
        &self,
        ddt: Option<&Tensor>,
        dlog_decay: Option<&Tensor>,
        inputs: &TimeStepInputs<'_>,
    ) -> Result<(Tensor, Tensor)> {
        check_time_step_bwd(self, ddt, dlog_decay, inputs)?;
        self.run(|| backward(self, ddt, dlog_decay, inputs))
    }
}

/// `ln(1 + e^x)`, without overflow on either side.
fn softplus_of(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// `(dt, log_decay)`.
fn forward(cpu: &Cpu, inputs: &TimeStepInputs<'_>) -> Result<(Tensor, Tensor)> {
    let (z, bias, a_log) = (cpu.real(inputs.z), cpu.real(inputs.bias), cpu.real(inputs.a_log));
    let (heads, (low, high)) = (bias.len(), inputs.limits);
    let rates: Vec<f32> = a_log.iter().map(|a| -a.exp()).collect();
    let (mut dt, mut decay) = (cpu.pool().take(z.len())?, cpu.pool().take(z.len())?);
    let step = (rows_per_task(heads) / 8 + 1) * heads;
    dt.par_chunks_mut(step).zip(decay.par_chunks_mut(step)).zip(z.par_chunks(step)).for_each(
        |((dt, decay), z)| {
            for i in 0..z.len() {
                dt[i] = softplus_of(z[i] + bias[i % heads]).clamp(low, high);
                decay[i] = rates[i % heads] * dt[i];
            }
        },
    );
    let (shape, device) = (inputs.z.shape(), inputs.z.device());
    Ok((cpu.tensor(dt, shape, device), cpu.tensor(decay, shape, device)))
}

/// `(dz, da_log)`.
fn backward(
    cpu: &Cpu,
    ddt: Option<&Tensor>,
    dlog_decay: Option<&Tensor>,
    inputs: &TimeStepInputs<'_>,
) -> Result<(Tensor, Tensor)> {
    let (z, bias, a_log) = (cpu.real(inputs.z), cpu.real(inputs.bias), cpu.real(inputs.a_log));
    let (ddt, ddecay) = (ddt.map(|x| cpu.real(x)), dlog_decay.map(|x| cpu.real(x)));
    let (heads, (low, high)) = (bias.len(), inputs.limits);
    let rates: Vec<f32> = a_log.iter().map(|a| -a.exp()).collect();
    let mut dz = cpu.pool().take(z.len())?;
    let step = (rows_per_task(heads) / 8 + 1) * heads;
    let one = |(at, dz): (usize, &mut [f32])| {
        let mut da_log = vec![0.0f64; heads];
        for (n, dz) in dz.iter_mut().enumerate() {
            let (i, h) = (at * step + n, n % heads);
            let logit = z[i] + bias[h];
            let raw = softplus_of(logit);
            let ddecay = ddecay.map_or(0.0, |d| d[i]);
            da_log[h] += f64::from(ddecay) * f64::from(rates[h] * raw.clamp(low, high));
            let total = ddt.map_or(0.0, |d| d[i]) + ddecay * rates[h];
            let inside = (low..=high).contains(&raw);
            *dz = if inside { total / (1.0 + (-logit).exp()) } else { 0.0 };
        }
        da_log
    };
    let parts: Vec<Vec<f64>> = dz.par_chunks_mut(step).enumerate().map(one).collect();
    let mut da_log = cpu.pool().take(heads)?;
    for (h, da) in da_log.iter_mut().enumerate() {
        *da = parts.iter().map(|part| part[h]).sum::<f64>() as f32;
    }
    let device = inputs.z.device();
    Ok((cpu.tensor(dz, inputs.z.shape(), device), cpu.tensor(da_log, inputs.a_log.shape(), device)))
}
