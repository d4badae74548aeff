//! Attention on the tape: softmax with forget gates, and stick-breaking.

use crate::tape::{Tape, Var, slot_of, value_of, wants};
use crate::{AttentionInputs, AttentionSpec, AttentionWeights, Result, Tensor};

impl Tape<'_> {
    /// Forgetting attention: the output `[R_q, H * d]`, and visited and total tiles ([`tile_counts`](crate::tile_counts)).
    pub fn attention(
        &mut self,
        q: &Var,
        k: &Var,
        v: &Var,
        log_gates: Option<&Var>,
        spec: &AttentionSpec,
    ) -> Result<(Var, Tensor)> {
        self.attend(AttentionWeights::Softmax, q, k, v, log_gates, spec)
    }

    /// Attention with weights of either kind; shapes as in [`Tape::attention`]. Stick-breaking is
    /// [`StickOps::stick_breaking_fwd`](crate::StickOps::stick_breaking_fwd).
    pub fn attend(
        &mut self,
        weights: AttentionWeights,
        q: &Var,
        k: &Var,
        v: &Var,
        log_gates: Option<&Var>,
        spec: &AttentionSpec,
    ) -> Result<(Var, Tensor)> {
        let gates = log_gates.map(Var::value);
        let inputs = AttentionInputs { q: q.value(), k: k.value(), v: v.value(), log_gates: gates };
        let backend = self.device.backend();
        let result = match weights {
            AttentionWeights::Softmax => backend.attention_fwd(&inputs, spec)?,
            AttentionWeights::StickBreaking => backend.stick_breaking_fwd(&inputs, spec)?,
        };
        let needs_grad = q.needs_grad() || k.needs_grad() || v.needs_grad() || wants(log_gates);
        let tiles = result.tiles.clone();
        let out = self.output(result.o.clone(), needs_grad);
        let slots = (q.slot, k.slot, v.slot, slot_of(log_gates));
        let (out_slot, device, spec) = (out.slot, self.device.clone(), spec.clone());
        let (q, k, v, gates) = (q.saved(), k.saved(), v.saved(), value_of(log_gates));
        self.push(move |flow| {
            let Some(d_out) = flow.take(out_slot) else { return Ok(()) };
            let (q, k, v) = (q.get()?, k.get()?, v.get()?);
            let inputs = AttentionInputs { q: &q, k: &k, v: &v, log_gates: gates.as_ref() };
            let backend = device.backend();
            let grads = match weights {
                AttentionWeights::Softmax => {
                    backend.attention_bwd(&d_out, &inputs, &result, &spec)?
                }
                AttentionWeights::StickBreaking => {
                    backend.stick_breaking_bwd(&d_out, &inputs, &result, &spec)?
                }
            };
            flow.add(slots.0, grads.dq)?;
            flow.add(slots.1, grads.dk)?;
            flow.add(slots.2, grads.dv)?;
            flow.add_some(slots.3, grads.dlog_gates)
        });
        Ok((out, tiles))
    }
}
