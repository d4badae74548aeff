//! Time steps and log decays of Mamba2.

use crate::cases::{Case, Output};
use crate::check::Operands;
use crate::naive::{Matrix, Naive, log_sigmoid, matrix, maybe_matrix, real, sigmoid};
use crate::tape::{Tape, Var};
use crate::{Backend, Result, Tensor};

/// Operands of the time step: `dt = clamp(softplus(z + bias))`, `log_decay = -exp(a_log) dt`.
#[derive(Clone, Debug)]
pub struct TimeStepInputs<'a> {
    /// `[R, H]`.
    pub z: &'a Tensor,
    /// `[H]`.
    pub bias: &'a Tensor,
    /// `[H]`.
    pub a_log: &'a Tensor,
    /// Smallest and largest time step.
    pub limits: (f32, f32),
}

/// Time steps of Mamba2 on a device.
pub trait TimeStepOps {
    /// `(dt, log_decay)`, both `[R, H]`.
    fn time_step_fwd(&self, inputs: &TimeStepInputs<'_>) -> Result<(Tensor, Tensor)>;
    /// `(dz[R, H], da_log[H])` from the gradients of `dt` and `log_decay`, each optional. The gradient of
    /// the bias is the column sums of `dz`.
    fn time_step_bwd(
        &self,
        ddt: Option<&Tensor>,
        dlog_decay: Option<&Tensor>,
        inputs: &TimeStepInputs<'_>,
    ) -> Result<(Tensor, Tensor)>;
}

/// Validates the operands of [`TimeStepOps::time_step_fwd`].
pub fn check_time_step_fwd(backend: &dyn Backend, inputs: &TimeStepInputs<'_>) -> Result<()> {
    let (operands, (low, high)) = (Operands::new("time_step", backend), inputs.limits);
    let (_, heads) = operands.matrix("z", inputs.z)?;
    operands.require(heads > 0, || "z has no columns".into())?;
    operands.real("bias", inputs.bias, &[heads])?;
    operands.real("a_log", inputs.a_log, &[heads])?;
    // A negative step would grow the state; NaN compares as false.
    operands.require(low >= 0.0 && low <= high, || {
        format!(
            "the limits of the time step are {low} and {high}, but must satisfy 0 <= low <= high"
        )
    })
}

/// Validates the operands of [`TimeStepOps::time_step_bwd`].
pub fn check_time_step_bwd(
    backend: &dyn Backend,
    ddt: Option<&Tensor>,
    dlog_decay: Option<&Tensor>,
    inputs: &TimeStepInputs<'_>,
) -> Result<()> {
    check_time_step_fwd(backend, inputs)?;
    let operands = Operands::new("time_step_bwd", backend);
    operands.maybe("ddt", ddt, inputs.z.dims())?;
    operands.maybe("dlog_decay", dlog_decay, inputs.z.dims())
}

impl Tape<'_> {
    /// Time steps `dt = clamp(softplus(z[R, H] + bias[H]))` and log decays `-exp(a_log[H]) dt`.
    pub fn time_step(
        &mut self,
        z: &Var,
        bias: &Var,
        a_log: &Var,
        limits: (f32, f32),
    ) -> Result<(Var, Var)> {
        let inputs =
            TimeStepInputs { z: z.value(), bias: bias.value(), a_log: a_log.value(), limits };
        let (dt, decay) = self.device.backend().time_step_fwd(&inputs)?;
        let needs_grad = z.needs_grad() || bias.needs_grad() || a_log.needs_grad();
        let (dt, decay) = (self.output(dt, needs_grad), self.output(decay, needs_grad));
        let (z_slot, b_slot, a_slot) = (z.slot, bias.slot, a_log.slot);
        let (dt_slot, decay_slot, device) = (dt.slot, decay.slot, self.device.clone());
        let (z, bias, a_log) = (z.value.clone(), bias.value.clone(), a_log.value.clone());
        self.push(move |flow| {
            let (ddt, ddecay) = (flow.take(dt_slot), flow.take(decay_slot));
            if ddt.is_none() && ddecay.is_none() {
                return Ok(());
            }
            let inputs = TimeStepInputs { z: &z, bias: &bias, a_log: &a_log, limits };
            let backend = device.backend();
            let (dz, da_log) = backend.time_step_bwd(ddt.as_ref(), ddecay.as_ref(), &inputs)?;
            flow.update(b_slot, |acc| backend.linear_bwd_bias(&dz, acc))?;
            flow.add(a_slot, da_log)?;
            flow.add(z_slot, dz)
        });
        Ok((dt, decay))
    }
}

impl TimeStepOps for Naive {
    fn time_step_fwd(&self, inputs: &TimeStepInputs<'_>) -> Result<(Tensor, Tensor)> {
        check_time_step_fwd(self, inputs)?;
        let (dt, decay) = time_step(inputs)?.forward();
        Ok((self.like(inputs.z, dt), self.like(inputs.z, decay)))
    }

    fn time_step_bwd(
        &self,
        ddt: Option<&Tensor>,
        dlog_decay: Option<&Tensor>,
        inputs: &TimeStepInputs<'_>,
    ) -> Result<(Tensor, Tensor)> {
        check_time_step_bwd(self, ddt, dlog_decay, inputs)?;
        let step = time_step(inputs)?;
        let (dz, da_log) = step.backward(maybe_matrix(ddt)?, maybe_matrix(dlog_decay)?);
        Ok((self.like(inputs.z, dz), self.like(inputs.a_log, da_log)))
    }
}

fn time_step<'a>(inputs: &TimeStepInputs<'a>) -> Result<TimeStep<'a>> {
    Ok(TimeStep {
        z: matrix(inputs.z)?,
        bias: real(inputs.bias)?,
        a_log: real(inputs.a_log)?,
        limits: (f64::from(inputs.limits.0), f64::from(inputs.limits.1)),
    })
}

/// Operands of the time step.
struct TimeStep<'a> {
    z: Matrix<'a>,
    bias: &'a [f64],
    a_log: &'a [f64],
    limits: (f64, f64),
}

impl TimeStep<'_> {
    /// `softplus(z + bias)` before the clamp.
    fn raw(&self, i: usize) -> f64 {
        -log_sigmoid(-self.logit(i))
    }

    fn logit(&self, i: usize) -> f64 {
        self.z.data[i] + self.bias[i % self.z.cols]
    }

    fn rate(&self, i: usize) -> f64 {
        -self.a_log[i % self.z.cols].exp()
    }

    /// `(dt, log_decay)`.
    fn forward(&self) -> (Vec<f64>, Vec<f64>) {
        let step = |i| self.raw(i).clamp(self.limits.0, self.limits.1);
        let dt: Vec<f64> = (0..self.z.data.len()).map(step).collect();
        let decay = dt.iter().enumerate().map(|(i, dt)| self.rate(i) * dt).collect();
        (dt, decay)
    }

    /// `(dz, da_log)`.
    fn backward(
        &self,
        ddt: Option<Matrix<'_>>,
        ddecay: Option<Matrix<'_>>,
    ) -> (Vec<f64>, Vec<f64>) {
        let mut da_log = vec![0.0; self.z.cols];
        let (dt, _) = self.forward();
        let grad = |i: usize| {
            let ddecay = ddecay.map_or(0.0, |d| d.data[i]);
            da_log[i % self.z.cols] += ddecay * self.rate(i) * dt[i];
            let inside = (self.limits.0..=self.limits.1).contains(&self.raw(i));
            let ddt = ddt.map_or(0.0, |d| d.data[i]) + ddecay * self.rate(i);
            if inside { ddt * sigmoid(self.logit(i)) } else { 0.0 }
        };
        let dz = (0..self.z.data.len()).map(grad).collect();
        (dz, da_log)
    }
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, heads) in [(1, 1), (113, 3), (65, 24)] {
        cases.push(case(rows, heads, (0.0, f32::INFINITY)));
        cases.push(case(rows, heads, (0.5, 1.5)));
    }
    cases
}

fn case(rows: usize, heads: usize, limits: (f32, f32)) -> Case {
    let name = format!("time_step/{limits:?}/{rows}x{heads}");
    let case = Case::new(name, move |tape, args| {
        let (z, bias, a_log) = (args.var("z")?, args.var("bias")?, args.var("a_log")?);
        let (dt, decay) = tape.time_step(z, bias, a_log, limits)?;
        Ok(vec![Output::Var("dt", dt), Output::Var("log_decay", decay)])
    });
    case.normal("z", &[rows, heads]).normal("bias", &[heads]).normal("a_log", &[heads])
}
