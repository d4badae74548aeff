//! Gates of HGRN2 on the tape.

use crate::tape::{Tape, Var, slot_of, value_of, wants};
use crate::{DType, Error, HgrnGates, HgrnInputs, Result, Tensor};

impl Tape<'_> {
    /// HGRN2's `(silu(q), 1 - f, ln f)` for `f = lower + (1 - lower) sigmoid(z)`; all `[R, C]`,
    /// `lower: [C]`.
    pub fn hgrn_gates(&mut self, q: &Var, z: &Var, lower: Option<&Var>) -> Result<(Var, Var, Var)> {
        const OP: &str = "hgrn_gates";
        self.check_matrix(OP, "q", q.value())?;
        self.check(OP, "z", z.value(), q.value().dims())?;
        if let Some(lower) = lower {
            self.check(OP, "lower", lower.value(), &[z.value().cols()])?;
        }
        let inputs = HgrnInputs { q: q.value(), z: z.value(), lower: lower.map(Var::value) };
        let gates = self.device.backend().hgrn_gates_fwd(&inputs)?;
        let needs_grad = q.needs_grad() || z.needs_grad() || wants(lower);
        let outs = (
            self.output(gates.q, needs_grad),
            self.output(gates.k, needs_grad),
            self.output(gates.log_f, needs_grad),
        );
        let slots = (q.slot, z.slot, slot_of(lower));
        let out_slots = (outs.0.slot, outs.1.slot, outs.2.slot);
        let (device, q, z, lower) =
            (self.device.clone(), q.value.clone(), z.value.clone(), value_of(lower));
        self.push(move |flow| {
            let taken = [flow.take(out_slots.0), flow.take(out_slots.1), flow.take(out_slots.2)];
            if taken.iter().all(Option::is_none) {
                return Ok(());
            }
            let whole = |grad: Option<Tensor>| match grad {
                Some(grad) => Ok(grad),
                None => device.zeros(q.shape(), DType::F32),
            };
            let [dq, dk, dlog_f] = taken;
            let d_out = HgrnGates { q: whole(dq)?, k: whole(dk)?, log_f: whole(dlog_f)? };
            let inputs = HgrnInputs { q: &q, z: &z, lower: lower.as_ref() };
            let grads = device.backend().hgrn_gates_bwd(&d_out, &inputs)?;
            flow.add(slots.0, grads.dq)?;
            flow.add(slots.1, grads.dz)?;
            flow.add_some(slots.2, grads.dlower)
        });
        Ok(outs)
    }

    /// Lower bounds `[C]` of the forget gates of a layer, from the table `[L, C]` of all layers:
    /// they rise from layer to layer, from 0 towards 1.
    pub fn lower_bound(&mut self, table: &Var, layer: usize) -> Result<Var> {
        const OP: &str = "lower_bound";
        self.check_matrix(OP, "table", table.value())?;
        if layer >= table.value().rows() {
            let detail = format!("layer {layer} of a table for {} layers", table.value().rows());
            return Err(Error::argument(OP, detail));
        }
        let y = self.device.backend().lower_bound_fwd(table.value(), layer)?;
        let out = self.output(y, table.needs_grad());
        let (slot, out_slot) = (table.slot, out.slot);
        let (device, table) = (self.device.clone(), table.value.clone());
        self.push(move |flow| {
            let Some(dy) = flow.take(out_slot) else { return Ok(()) };
            flow.add(slot, device.backend().lower_bound_bwd(&dy, &table, layer)?)
        });
        Ok(out)
    }
}
