//! Output of a mixer, `rms_groups(x; norm) * act(gate)`, norm and gate optional, in one pass.

use fox_tensor::{
    Activation, GatedNormGrads, GatedNormInputs, GatedNormOps, Result, Tensor,
    check_gated_norm_bwd, check_gated_norm_fwd, gate_then_norm_bwd, gate_then_norm_fwd,
};
use rayon::prelude::*;

use crate::backend::Cpu;
use crate::rows::{rows_per_task, sum_partials};
use crate::simd::{Level, Simd, dot, map, map_two, sigmoid, simd_fn, sum, update};

impl GatedNormOps for Cpu {
    fn gated_norm_fwd(&self, inputs: &GatedNormInputs<'_>) -> Result<Tensor> {
        check_gated_norm_fwd(self, inputs)?;
        if inputs.normalizes_gated() {
            return gate_then_norm_fwd(self, inputs);
        }
        self.produce(inputs.x.shape(), inputs.x.device(), |y| forward(self, inputs, y))
    }

    fn gated_norm_bwd(&self, dy: &Tensor, inputs: &GatedNormInputs<'_>) -> Result<GatedNormGrads> {
        check_gated_norm_bwd(self, dy, inputs)?;
        if inputs.normalizes_gated() {
            return gate_then_norm_bwd(self, dy, inputs);
        }
        self.run(|| backward(self, dy, inputs))
    }
}

/// Operands of one call as slices.
struct Operands<'a> {
    level: Level,
    x: &'a [f32],
    norm: Option<&'a [f32]>,
    gate: Option<&'a [f32]>,
    width: usize,
    group: usize,
    eps: f32,
    act: Activation,
}

impl<'a> Operands<'a> {
    fn new(cpu: &'a Cpu, inputs: &GatedNormInputs<'a>) -> Self {
        let width = inputs.x.cols();
        Operands {
            level: cpu.level(),
            x: cpu.real(inputs.x),
            norm: inputs.norm.map(|x| cpu.real(x)),
            gate: inputs.gate.map(|x| cpu.real(x)),
            width,
            group: width / inputs.groups,
            eps: inputs.eps,
            act: inputs.act,
        }
    }
}

/// `act(z)` and its derivative.
#[inline(always)]
pub fn activate<S: Simd>(s: S, act: Activation, z: S::V) -> (S::V, S::V) {
    let gate = sigmoid(s, z);
    let slope = s.mul(gate, s.sub(s.splat(1.0), gate));
    match act {
        Activation::Sigmoid => (gate, slope),
        Activation::Silu => (s.mul(z, gate), s.mul_add(z, slope, gate)),
    }
}

simd_fn! {
    /// Some rows of the forward pass, from row `first` on.
    fn forward_rows<'k, S>(s, ops: &'k Operands<'k>, first: usize, y: &'k mut [f32]) {
        let g = ops.group;
        for (n, y) in y.chunks_exact_mut(g).enumerate() {
            let at = first * ops.width + n * g;
            let x = &ops.x[at..][..g];
            match ops.norm {
                None => y.copy_from_slice(x),
                Some(norm) => {
                    let w = &norm[at % norm.len()..][..g];
                    let scale = s.splat(1.0 / (dot(s, x, x) / g as f32 + ops.eps).sqrt());
                    map(s, [x, w], y, |[x, w]| s.mul(s.mul(x, scale), w));
                }
            }
            if let Some(gate) = ops.gate {
                update(s, [&gate[at..][..g]], y, |[z], y| s.mul(y, activate(s, ops.act, z).0));
            }
        }
    }
}

/// The forward pass, `[R, C]`.
pub fn forward(cpu: &Cpu, inputs: &GatedNormInputs<'_>, y: &mut [f32]) {
    let ops = Operands::new(cpu, inputs);
    let step = rows_per_task(ops.width);
    y.par_chunks_mut(step * ops.width)
        .enumerate()
        .for_each(|(at, y)| forward_rows(ops.level, &ops, at * step, y));
}

simd_fn! {
    /// Some rows of the backward pass, from row `first` on; `dgate` is empty without a gate.
    fn backward_rows<'k, S>(
        s, ops: &'k Operands<'k>, first: usize, dy: &'k [f32],
        dx: &'k mut [f32], dgate: &'k mut [f32], dnorm: &'k mut [f32],
    ) {
        let g = ops.group;
        dnorm.fill(0.0);
        for (n, dx) in dx.chunks_exact_mut(g).enumerate() {
            let at = first * ops.width + n * g;
            let (x, dy) = (&ops.x[at..][..g], &dy[at..][..g]);
            let weights = ops.norm.map(|norm| &norm[at % norm.len()..][..g]);
            let rstd = match weights {
                Some(_) => 1.0 / (dot(s, x, x) / g as f32 + ops.eps).sqrt(),
                None => 1.0,
            };
            let scale = s.splat(rstd);
            // First the gate: `dx` takes the gradient of the norm's output.
            match ops.gate {
                None => dx.copy_from_slice(dy),
                Some(gate) => {
                    let (z, dgate) = (&gate[at..][..g], &mut dgate[n * g..][..g]);
                    match weights {
                        Some(w) => map_two(s, [dy, x, w, z], dgate, dx, |[dy, x, w, z]| {
                            let (value, slope) = activate(s, ops.act, z);
                            let normed = s.mul(s.mul(x, scale), w);
                            (s.mul(s.mul(dy, normed), slope), s.mul(dy, value))
                        }),
                        None => map_two(s, [dy, x, z], dgate, dx, |[dy, x, z]| {
                            let (value, slope) = activate(s, ops.act, z);
                            (s.mul(s.mul(dy, x), slope), s.mul(dy, value))
                        }),
                    }
                }
            }
            if let Some(w) = weights {
                let len = dnorm.len();
                let dnorm = &mut dnorm[at % len..][..g];
                update(s, [dx, x], dnorm, |[dn, x], n| s.mul_add(s.mul(dn, x), scale, n));
                let along = sum(s, [dx, w, x], |[dn, w, x], sum| s.mul_add(s.mul(dn, w), x, sum));
                let slope = s.splat(-along * rstd * rstd * rstd / g as f32);
                update(s, [w, x], dx, |[w, x], dn| s.mul_add(slope, x, s.mul(scale, s.mul(dn, w))));
            }
        }
    }
}

/// The backward pass.
pub fn backward(cpu: &Cpu, dy: &Tensor, inputs: &GatedNormInputs<'_>) -> Result<GatedNormGrads> {
    let ops = Operands::new(cpu, inputs);
    let (width, dy, len) = (ops.width, cpu.real(dy), inputs.x.len());
    let step = rows_per_task(width);
    let mut dx = cpu.pool().take(len)?;
    let mut dgate = cpu.pool().take(if ops.gate.is_some() { len } else { 0 })?;
    // Norm weights, which the groups may share.
    let weights = ops.norm.map_or(width, <[f32]>::len);
    let mut parts = cpu.pool().take(inputs.x.rows().div_ceil(step) * weights)?;
    let outputs = dx.par_chunks_mut(step * width).zip(parts.par_chunks_mut(weights));
    if ops.gate.is_some() {
        let outputs = outputs.zip(dgate.par_chunks_mut(step * width)).enumerate();
        outputs.for_each(|(at, ((dx, dnorm), dgate))| {
            backward_rows(ops.level, &ops, at * step, dy, dx, dgate, dnorm);
        });
    } else {
        outputs.enumerate().for_each(|(at, (dx, dnorm))| {
            backward_rows(ops.level, &ops, at * step, dy, dx, &mut [], dnorm);
        });
    }
    let device = inputs.x.device();
    let dnorm = match inputs.norm {
        None => None,
        Some(norm) => {
            let mut dnorm = cpu.pool().zeros(weights)?;
            sum_partials(&parts, &mut dnorm);
            Some(cpu.tensor(dnorm, norm.shape(), device))
        }
    };
    Ok(GatedNormGrads {
        dx: cpu.tensor(dx, inputs.x.shape(), device),
        dgate: inputs.gate.map(|gate| cpu.tensor(dgate, gate.shape(), device)),
        dnorm,
    })
}
