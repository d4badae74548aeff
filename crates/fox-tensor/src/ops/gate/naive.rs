//! Log forget gates.

use crate::naive::{Naive, log_sigmoid, maybe_matrix, maybe_real, real, sigmoid};
use crate::{GateInputs, GateOps, Result, Tensor};

impl GateOps for Naive {
    fn log_gate_fwd(&self, inputs: &GateInputs<'_>) -> Result<Tensor> {
        let y = logits(inputs)?.into_iter().map(log_sigmoid).collect();
        Ok(self.tensor(inputs.device, y, [inputs.rows, inputs.heads]))
    }

    /// `dz = dy (1 - sigmoid(z + bias))`.
    fn log_gate_bwd(&self, dy: &Tensor, inputs: &GateInputs<'_>) -> Result<Tensor> {
        // sigmoid(-x) rather than 1 - sigmoid(x): no cancellation for gates near 1.
        let slope = |(x, dy): (&f64, &f64)| dy * sigmoid(-x);
        let dz = logits(inputs)?.iter().zip(real(dy)?).map(slope).collect();
        Ok(self.like(dy, dz))
    }
}

/// The gate's logit at every row and head: `z + bias`, either optional.
fn logits(inputs: &GateInputs<'_>) -> Result<Vec<f64>> {
    let (z, bias) = (maybe_matrix(inputs.z)?, maybe_real(inputs.bias)?);
    let logit = |i: usize| z.map_or(0.0, |z| z.data[i]) + bias.map_or(0.0, |b| b[i % inputs.heads]);
    Ok((0..inputs.rows * inputs.heads).map(logit).collect())
}
