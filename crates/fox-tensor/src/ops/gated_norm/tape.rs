//! The gated norm on the tape.

use crate::tape::{Saved, Tape, Var, slot_of, value_of, wants};
use crate::{Activation, Error, GatedNormInputs, Result};

impl Tape<'_> {
    /// `rms_groups(x[R, C]; norm[C]) * act(gate[R, C])`, either part optional.
    pub fn gated_norm(
        &mut self,
        x: &Var,
        norm: Option<&Var>,
        gate: Option<&Var>,
        groups: usize,
        eps: f32,
        act: Activation,
    ) -> Result<Var> {
        const OP: &str = "gated_norm";
        self.check_matrix(OP, "x", x.value())?;
        let width = x.value().cols();
        if groups == 0 || !width.is_multiple_of(groups) {
            return Err(Error::argument(
                OP,
                format!("{groups} groups do not divide width {width}"),
            ));
        }
        if let Some(norm) = norm {
            self.check(OP, "norm", norm.value(), &[width])?;
        }
        if let Some(gate) = gate {
            self.check(OP, "gate", gate.value(), x.value().dims())?;
        }
        let inputs = GatedNormInputs {
            x: x.value(),
            norm: norm.map(Var::value),
            gate: gate.map(Var::value),
            groups,
            eps,
            act,
        };
        let y = self.device.backend().gated_norm_fwd(&inputs)?;
        let needs_grad = x.needs_grad() || wants(norm) || wants(gate);
        let again = (x.value.clone(), value_of(norm), value_of(gate));
        let out = self.cheap_output(y, needs_grad, true, move |device| {
            let (norm, gate) = (again.1.as_ref(), again.2.as_ref());
            let inputs = GatedNormInputs { x: &again.0, norm, gate, groups, eps, act };
            device.backend().gated_norm_fwd(&inputs)
        });
        let (x_slot, n_slot, g_slot, out_slot) = (x.slot, slot_of(norm), slot_of(gate), out.slot);
        let (device, x, norm, gate, own) = (
            self.device.clone(),
            x.value.clone(),
            value_of(norm),
            value_of(gate),
            out.again.clone(),
        );
        self.push(move |flow| {
            let waiting = own.map_or_else(Vec::new, Saved::take_waiting);
            let Some(dy) = flow.take(out_slot) else { return Ok(()) };
            let (norm, gate) = (norm.as_ref(), gate.as_ref());
            let inputs = GatedNormInputs { x: &x, norm, gate, groups, eps, act };
            let grads = if waiting.is_empty() {
                device.backend().gated_norm_bwd(&dy, &inputs)?
            } else {
                let (grads, y) = device.recompute_ops()?.gated_norm_bwd_with_output(dy, &inputs)?;
                flow.serve(waiting, &y)?;
                grads
            };
            flow.add(x_slot, grads.dx)?;
            flow.add_some(g_slot, grads.dgate)?;
            flow.add_some(n_slot, grads.dnorm)
        });
        Ok(out)
    }
}
