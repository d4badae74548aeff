//! PaTH attention on the tape.

use super::PathInputs;
use crate::tape::{Tape, Var, slot_of, value_of, wants};
use crate::{AttentionSpec, Result, Tensor};

/// Operands of [`Tape::path_attention`]; shapes as in [`PathInputs`].
#[derive(Clone, Copy, Debug)]
pub struct PathVars<'a> {
    /// Queries `[R_q, H * d]`.
    pub q: &'a Var,
    /// Keys `[R_k, H_kv * d]`.
    pub k: &'a Var,
    /// Values `[R_k, H_kv * d]`.
    pub v: &'a Var,
    /// Reflections `[R_k, H_kv * d]`.
    pub u: &'a Var,
    /// `[R_k, H]`.
    pub log_gates: Option<&'a Var>,
}

impl Tape<'_> {
    /// PaTH attention: the output `[R_q, H * d]`, and visited and total tiles ([`tile_counts`](crate::tile_counts)).
    pub fn path_attention(
        &mut self,
        vars: &PathVars<'_>,
        spec: &AttentionSpec,
    ) -> Result<(Var, Tensor)> {
        let PathVars { q, k, v, u, log_gates } = *vars;
        let inputs = PathInputs {
            q: q.value(),
            k: k.value(),
            v: v.value(),
            u: u.value(),
            log_gates: log_gates.map(Var::value),
        };
        let result = self.device.backend().path_attention_fwd(&inputs, spec)?;
        let needs_grad = [q, k, v, u].iter().any(|var| var.needs_grad()) || wants(log_gates);
        let tiles = result.tiles.clone();
        let out = self.output(result.o.clone(), needs_grad);
        let (slots, gates_slot) = ([q, k, v, u].map(|var| var.slot), slot_of(log_gates));
        let (out_slot, device, spec) = (out.slot, self.device.clone(), spec.clone());
        let (q, k, v, u) = (q.saved(), k.saved(), v.saved(), u.saved());
        let gates = value_of(log_gates);
        self.push(move |flow| {
            let Some(d_out) = flow.take(out_slot) else { return Ok(()) };
            let (q, k, v, u) = (q.get()?, k.get()?, v.get()?, u.get()?);
            let inputs = PathInputs { q: &q, k: &k, v: &v, u: &u, log_gates: gates.as_ref() };
            let grads = device.backend().path_attention_bwd(&d_out, &inputs, &result, &spec)?;
            for (slot, grad) in slots.into_iter().zip([grads.dq, grads.dk, grads.dv, grads.du]) {
                flow.add(slot, grad)?;
            }
            flow.add_some(gates_slot, grads.dlog_gates)
        });
        Ok((out, tiles))
    }
}
