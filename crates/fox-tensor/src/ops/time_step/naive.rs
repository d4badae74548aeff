//! Time steps of Mamba2.

use crate::naive::{Matrix, Naive, log_sigmoid, matrix, maybe_matrix, real, sigmoid};
use crate::{Result, Tensor, TimeStepInputs, TimeStepOps};

impl TimeStepOps for Naive {
    fn time_step_fwd(&self, inputs: &TimeStepInputs<'_>) -> Result<(Tensor, Tensor)> {
        let (dt, decay) = time_step(inputs)?.forward();
        Ok((self.like(inputs.z, dt), self.like(inputs.z, decay)))
    }

    fn time_step_bwd(
        &self,
        ddt: Option<&Tensor>,
        dlog_decay: Option<&Tensor>,
        inputs: &TimeStepInputs<'_>,
    ) -> Result<(Tensor, Tensor)> {
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
    pub z: Matrix<'a>,
    pub bias: &'a [f64],
    pub a_log: &'a [f64],
    pub limits: (f64, f64),
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
