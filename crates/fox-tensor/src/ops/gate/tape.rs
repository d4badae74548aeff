//! Forget gates on the tape.

use crate::tape::{Tape, Var, slot_of, value_of, wants};
use crate::{GateInputs, Result};

impl Tape<'_> {
    /// Log forget gates `logsigmoid(z[R, H] + bias[H])`; without `z`, the bias alone for `rows` rows.
    pub fn log_gate(&mut self, z: Option<&Var>, bias: Option<&Var>, rows: usize) -> Result<Var> {
        const OP: &str = "log_gate";
        let inputs = GateInputs::new(z.map(Var::value), bias.map(Var::value), rows)?;
        if let Some(z) = z {
            self.check(OP, "z", z.value(), &[rows, inputs.heads])?;
        }
        if let Some(bias) = bias {
            self.check(OP, "bias", bias.value(), &[inputs.heads])?;
        }
        let y = self.device.backend().log_gate_fwd(&inputs)?;
        let needs_grad = wants(z) || wants(bias);
        let out = self.output(y, needs_grad);
        let (z_slot, b_slot, out_slot) = (slot_of(z), slot_of(bias), out.slot);
        let (device, z, bias) = (self.device.clone(), value_of(z), value_of(bias));
        self.push(move |flow| {
            let Some(dy) = flow.take(out_slot) else { return Ok(()) };
            let backend = device.backend();
            let inputs = GateInputs::new(z.as_ref(), bias.as_ref(), rows)?;
            let dz = backend.log_gate_bwd(&dy, &inputs)?;
            flow.update(b_slot, |acc| backend.linear_bwd_bias(&dz, acc))?;
            flow.add(z_slot, dz)
        });
        Ok(out)
    }
}
