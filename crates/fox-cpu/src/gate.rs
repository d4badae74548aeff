//! Log forget gates.

use fox_tensor::{GateInputs, GateOps, Result, Tensor, check_log_gate_bwd, check_log_gate_fwd};
use rayon::prelude::*;

use crate::Cpu;
use crate::rows::rows_per_task;

impl GateOps for Cpu {
    fn log_gate_fwd(&self, inputs: &GateInputs<'_>) -> Result<Tensor> {
        check_log_gate_fwd(self, inputs)?;
        let (z, bias) = (inputs.z.map(|x| self.real(x)), inputs.bias.map(|x| self.real(x)));
        self.produce([inputs.rows, inputs.heads], inputs.device, |y| {
            forward(z, bias, inputs.heads, inputs.factor, y);
        })
    }

    fn log_gate_bwd(&self, dy: &Tensor, inputs: &GateInputs<'_>) -> Result<Tensor> {
        check_log_gate_bwd(self, dy, inputs)?;
        let (z, bias) = (inputs.z.map(|x| self.real(x)), inputs.bias.map(|x| self.real(x)));
        let data = self.real(dy);
        self.produce(dy.shape(), dy.device(), |dz| {
            backward(data, z, bias, inputs.heads, inputs.factor, dz);
        })
    }
}

/// `logsigmoid(x) = -ln(1 + e^-x)`, without overflow on either side.
fn log_sigmoid(x: f32) -> f32 {
    x.min(0.0) - (-x.abs()).exp().ln_1p()
}

/// `y[R, H] = factor logsigmoid(z + bias)`.
fn forward(z: Option<&[f32]>, bias: Option<&[f32]>, heads: usize, factor: f32, y: &mut [f32]) {
    let step = rows_per_task(heads) / 8 + 1;
    y.par_chunks_mut(step * heads).enumerate().for_each(|(at, y)| {
        for (n, y) in y.iter_mut().enumerate() {
            *y = factor * log_sigmoid(logit(z, bias, at * step * heads + n, heads));
        }
    });
}

/// `dz[R, H] = factor * dy * sigmoid(-(z + bias))`.
fn backward(
    dy: &[f32],
    z: Option<&[f32]>,
    bias: Option<&[f32]>,
    heads: usize,
    factor: f32,
    dz: &mut [f32],
) {
    let step = rows_per_task(heads) / 8 + 1;
    dz.par_chunks_mut(step * heads).enumerate().for_each(|(at, dz)| {
        for (n, dz) in dz.iter_mut().enumerate() {
            let i = at * step * heads + n;
            *dz = factor * dy[i] / (1.0 + logit(z, bias, i, heads).exp());
        }
    });
}

fn logit(z: Option<&[f32]>, bias: Option<&[f32]>, i: usize, heads: usize) -> f32 {
    z.map_or(0.0, |z| z[i]) + bias.map_or(0.0, |bias| bias[i % heads])
}
