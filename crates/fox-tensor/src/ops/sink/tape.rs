//! Attention with sinks on the tape.

use crate::tape::{Tape, Var, slot_of, value_of, wants};
use crate::{AttentionInputs, AttentionOut, AttentionSpec, AttentionWeights, Result, Tensor};

impl Tape<'_> {
    /// [`Tape::attention`] with sinks `[H]`: the output `[R_q, H * d]`, and tiles visited and in all.
    pub fn sink_attention(
        &mut self,
        [q, k, v]: [&Var; 3],
        log_gates: Option<&Var>,
        sinks: &Var,
        spec: &AttentionSpec,
    ) -> Result<(Var, Tensor)> {
        let (gates, softmax) = (log_gates.map(Var::value), AttentionWeights::Softmax);
        self.check_attention(softmax, q.value(), k.value(), v.value(), gates, spec)?;
        self.check("sink_attention", "sinks", sinks.value(), &[spec.heads])?;
        let inputs = AttentionInputs { q: q.value(), k: k.value(), v: v.value(), log_gates: gates };
        let backend = self.device.backend();
        let plain = backend.attention_fwd(&inputs, spec)?;
        let (o, lse) = backend.sink_fwd(&plain.o, &plain.lse, sinks.value())?;
        let result = AttentionOut { o, lse, tiles: plain.tiles };
        let needs_grad = [q, k, v, sinks].iter().any(|var| var.needs_grad()) || wants(log_gates);
        let tiles = result.tiles.clone();
        let out = self.output(result.o.clone(), needs_grad);
        let slots = (q.slot, k.slot, v.slot, slot_of(log_gates), sinks.slot);
        let (out_slot, device, spec) = (out.slot, self.device.clone(), spec.clone());
        let (q, k, v, gates) = (q.saved(), k.saved(), v.saved(), value_of(log_gates));
        let sinks = sinks.value.clone();
        self.push(move |flow| {
            let Some(d_out) = flow.take(out_slot) else { return Ok(()) };
            let (q, k, v) = (q.get()?, k.get()?, v.get()?);
            let inputs = AttentionInputs { q: &q, k: &k, v: &v, log_gates: gates.as_ref() };
            let backend = device.backend();
            flow.add(slots.4, backend.sink_bwd(&d_out, &result.o, &result.lse, &sinks)?)?;
            let grads = backend.sink_attention_bwd(&d_out, &inputs, &result, &sinks, &spec)?;
            flow.add(slots.0, grads.dq)?;
            flow.add(slots.1, grads.dk)?;
            flow.add(slots.2, grads.dv)?;
            flow.add_some(slots.3, grads.dlog_gates)
        });
        Ok((out, tiles))
    }
}
