//! Log forget gates.

use crate::cases::{Case, Output, round};
use crate::check::Operands;
use crate::naive::{Naive, log_sigmoid, maybe_matrix, maybe_real, real, sigmoid};
use crate::tape::{Tape, Var, slot_of, value_of, wants};
use crate::{Backend, Device, Error, Result, Tensor};

/// Operands of `log_gate`: `factor logsigmoid(z + bias)`. At least one of the two is given.
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
    /// Factor on the logarithm, 1 by default.
    pub factor: f32,
    /// The device of both.
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
        Ok(GateInputs { z, bias, rows, heads, factor: 1.0, device })
    }
}

/// Log forget gates on a device.
pub trait GateOps {
    /// `factor logsigmoid(z + bias)`, `[R, H]`.
    fn log_gate_fwd(&self, inputs: &GateInputs<'_>) -> Result<Tensor>;
    /// `dz[R, H]`; its column sums are the gradient of the bias.
    fn log_gate_bwd(&self, dy: &Tensor, inputs: &GateInputs<'_>) -> Result<Tensor>;
}

/// Validates the operands of [`GateOps::log_gate_fwd`].
pub fn check_log_gate_fwd(backend: &dyn Backend, inputs: &GateInputs<'_>) -> Result<()> {
    let (operands, heads) = (Operands::new("log_gate", backend), inputs.heads);
    operands.require(heads > 0 && (inputs.z.is_some() || inputs.bias.is_some()), || {
        "neither logits nor a bias".into()
    })?;
    operands.require(std::ptr::addr_eq(inputs.device.backend(), backend), || {
        format!("the device is {}, not {}", inputs.device, backend.name())
    })?;
    operands.maybe("z", inputs.z, &[inputs.rows, heads])?;
    operands.maybe("bias", inputs.bias, &[heads])
}

/// Validates the operands of [`GateOps::log_gate_bwd`].
pub fn check_log_gate_bwd(
    backend: &dyn Backend,
    dy: &Tensor,
    inputs: &GateInputs<'_>,
) -> Result<()> {
    check_log_gate_fwd(backend, inputs)?;
    Operands::new("log_gate_bwd", backend).real("dy", dy, &[inputs.rows, inputs.heads])
}

impl Tape<'_> {
    /// Log forget gates `logsigmoid(z[R, H] + bias[H])`; without `z`, the bias alone for `rows` rows.
    pub fn log_gate(&mut self, z: Option<&Var>, bias: Option<&Var>, rows: usize) -> Result<Var> {
        self.scaled_log_gate(z, bias, rows, 1.0)
    }

    /// [`Tape::log_gate`] times a constant.
    pub fn scaled_log_gate(
        &mut self,
        z: Option<&Var>,
        bias: Option<&Var>,
        rows: usize,
        factor: f32,
    ) -> Result<Var> {
        let inputs = GateInputs::new(z.map(Var::value), bias.map(Var::value), rows)?;
        let inputs = GateInputs { factor, ..inputs };
        let y = self.device.backend().log_gate_fwd(&inputs)?;
        let needs_grad = wants(z) || wants(bias);
        let out = self.output(y, needs_grad);
        let (z_slot, b_slot, out_slot) = (slot_of(z), slot_of(bias), out.slot);
        let (device, z, bias) = (self.device.clone(), value_of(z), value_of(bias));
        self.push(move |flow| {
            let Some(dy) = flow.take(out_slot) else { return Ok(()) };
            let backend = device.backend();
            let inputs = GateInputs::new(z.as_ref(), bias.as_ref(), rows)?;
            let inputs = GateInputs { factor, ..inputs };
            let dz = backend.log_gate_bwd(&dy, &inputs)?;
            flow.update(b_slot, |acc| backend.linear_bwd_bias(&dz, acc))?;
            flow.add(z_slot, dz)
        });
        Ok(out)
    }
}

impl GateOps for Naive {
    fn log_gate_fwd(&self, inputs: &GateInputs<'_>) -> Result<Tensor> {
        check_log_gate_fwd(self, inputs)?;
        let factor = f64::from(inputs.factor);
        let y = logits(inputs)?.into_iter().map(|x| factor * log_sigmoid(x)).collect();
        Ok(self.tensor(inputs.device, y, [inputs.rows, inputs.heads]))
    }

    /// `dz = factor dy (1 - sigmoid(z + bias))`.
    fn log_gate_bwd(&self, dy: &Tensor, inputs: &GateInputs<'_>) -> Result<Tensor> {
        check_log_gate_bwd(self, dy, inputs)?;
        // sigmoid(-x) rather than 1 - sigmoid(x): no cancellation for gates near 1.
        let factor = f64::from(inputs.factor);
        let slope = |(x, dy): (&f64, &f64)| factor * dy * sigmoid(-x);
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

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, heads) in [(1, 1), (113, 3), (799, 5), (65, 16)] {
        for (z, bias) in [(true, true), (true, false), (false, true)] {
            cases.push(log_gate(rows, heads, z, bias, 1.0));
        }
    }
    cases.push(log_gate(113, 3, true, true, 0.125));
    cases.push(far());
    cases
}

/// Logits at both ends of f32, and a sum that leaves it. No gradient: differences would find none.
fn far() -> Case {
    let z = vec![-3e38, 3e38, -3e38, 3e38, -1e4, 1e4, 0.0, -100.0];
    Case::new("log_gate/far/4x2", |tape, args| {
        Ok(vec![Output::Var("y", tape.log_gate(args.get("z"), args.get("bias"), 4)?)])
    })
    .constant("z", &[4, 2], z.into_iter().map(round).collect())
    .constant("bias", &[2], vec![0.0, 1.0])
}

fn log_gate(rows: usize, heads: usize, z: bool, bias: bool, factor: f32) -> Case {
    let kind = match (z, bias) {
        (true, true) => "z+bias",
        (true, false) => "z",
        _ => "bias",
    };
    let scaled = if factor == 1.0 { String::new() } else { format!("x{factor}") };
    let name = format!("log_gate/{kind}{scaled}/{rows}x{heads}");
    let mut case = Case::new(name, move |tape, args| {
        let y = tape.scaled_log_gate(args.get("z"), args.get("bias"), rows, factor)?;
        Ok(vec![Output::Var("y", y)])
    });
    if z {
        let data = case.wide("z", rows * heads);
        case = case.real("z", &[rows, heads], data);
    }
    if bias {
        case = case.normal("bias", &[heads]);
    }
    case
}
