//! Wall attention on the tape.

use super::{WallBlock, WallInputs};
use crate::tape::{Tape, Var, slot_of, value_of, wants};
use crate::{AttentionSpec, Error, Result, Tensor};

/// Operands of [`Tape::wall_attention`]; shapes as in [`WallInputs`].
#[derive(Clone, Copy, Debug)]
pub struct WallVars<'a> {
    /// Queries.
    pub q: &'a Var,
    /// Keys.
    pub k: &'a Var,
    /// Values.
    pub v: &'a Var,
    /// Log decays per channel.
    pub log_decays: &'a Var,
    /// Log forget gates.
    pub log_gates: Option<&'a Var>,
}

impl Tape<'_> {
    /// Wall attention: the output `[R_q, H * d]`, and visited and total tiles ([`tile_counts`](crate::tile_counts)).
    /// Past blocks have no gradient, so a recording tape refuses them.
    pub fn wall_attention(
        &mut self,
        vars: &WallVars<'_>,
        past: &[Vec<WallBlock<'_>>],
        spec: &AttentionSpec,
    ) -> Result<(Var, Tensor)> {
        if self.recording && past.iter().any(|blocks| !blocks.is_empty()) {
            return Err(Error::argument("wall_attention", "past blocks have no gradient"));
        }
        let WallVars { q, k, v, log_decays, log_gates } = *vars;
        let inputs = WallInputs {
            q: q.value(),
            k: k.value(),
            v: v.value(),
            log_decays: log_decays.value(),
            log_gates: log_gates.map(Var::value),
        };
        let result = self.device.backend().wall_attention_fwd(&inputs, past, spec)?;
        let needs_grad =
            [q, k, v, log_decays].iter().any(|var| var.needs_grad()) || wants(log_gates);
        let tiles = result.tiles.clone();
        let out = self.output(result.o.clone(), needs_grad);
        let slots = (q.slot, k.slot, v.slot, log_decays.slot, slot_of(log_gates));
        let (out_slot, device, spec) = (out.slot, self.device.clone(), spec.clone());
        let (q, k, v, gates) = (q.saved(), k.saved(), v.saved(), value_of(log_gates));
        let decays = log_decays.value.clone();
        self.push(move |flow| {
            let Some(d_out) = flow.take(out_slot) else { return Ok(()) };
            let (q, k, v) = (q.get()?, k.get()?, v.get()?);
            let (log_decays, log_gates) = (&decays, gates.as_ref());
            let inputs = WallInputs { q: &q, k: &k, v: &v, log_decays, log_gates };
            let grads = device.backend().wall_attention_bwd(&d_out, &inputs, &result, &spec)?;
            flow.add(slots.0, grads.dq)?;
            flow.add(slots.1, grads.dk)?;
            flow.add(slots.2, grads.dv)?;
            flow.add(slots.3, grads.dlog_decays)?;
            flow.add_some(slots.4, grads.dlog_gates)
        });
        Ok((out, tiles))
    }
}
