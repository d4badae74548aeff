//! Log forget gates.

pub(crate) mod cases;
mod naive;
mod tape;

use crate::{Device, Error, Result, Tensor};

/// Operands of `log_gate`: `logsigmoid(z + bias)`. At least one of the two is there.
#[derive(Clone, Copy, Debug)]
pub struct GateInputs<'a> {
    /// Logits `[R, H]`.
    pub z: Option<&'a Tensor>,
    /// `[H]`; without `z` it is repeated for every row.
    pub bias: Option<&'a Tensor>,
    /// Rows `R`.
    pub rows: usize,
    /// Heads `H`.
    pub heads: usize,
    /// Where they live.
    pub device: &'a Device,
}

impl<'a> GateInputs<'a> {
    /// Operands for `rows` rows; an error when there is neither logits nor a bias.
    pub fn new(z: Option<&'a Tensor>, bias: Option<&'a Tensor>, rows: usize) -> Result<Self> {
        let (heads, device) = match (z, bias) {
            (Some(z), _) => (z.cols(), z.device()),
            (None, Some(bias)) => (bias.len(), bias.device()),
            (None, None) => return Err(Error::argument("log_gate", "neither logits nor a bias")),
        };
        Ok(GateInputs { z, bias, rows, heads, device })
    }
}

/// A device's log forget gates.
pub trait GateOps {
    /// `logsigmoid(z + bias)`, `[R, H]`.
    fn log_gate_fwd(&self, inputs: &GateInputs<'_>) -> Result<Tensor>;
    /// `dz[R, H]`, the gradient before the sum over rows that gives the bias its own.
    fn log_gate_bwd(&self, dy: &Tensor, inputs: &GateInputs<'_>) -> Result<Tensor>;
}
