//! Attention on the tape: softmax with forget gates, and stick-breaking.

use crate::tape::{Tape, Var, slot_of, value_of, wants};
use crate::{
    Acp, AttentionInputs, AttentionSpec, AttentionWeights, Error, LogitBound, Mask, Result, Tensor,
};

impl Tape<'_> {
    /// Forgetting attention: the output `[R_q, H * d]`, and tiles visited and in all ([`tile_counts`](crate::tile_counts)).
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
        self.check_attention(weights, q.value(), k.value(), v.value(), gates, spec)?;
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

    pub(crate) fn check_attention(
        &self,
        weights: AttentionWeights,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        log_gates: Option<&Tensor>,
        spec: &AttentionSpec,
    ) -> Result<()> {
        const OP: &str = "attention";
        let d = spec.head_dim;
        if d == 0 || d > 256 || !d.is_multiple_of(8) {
            return Err(Error::argument(OP, format!("head dim {d} is no multiple of 8 up to 256")));
        }
        if spec.heads == 0 || spec.kv_heads == 0 || !spec.heads.is_multiple_of(spec.kv_heads) {
            return Err(Error::argument(
                OP,
                format!("{} query heads do not share {} key heads", spec.heads, spec.kv_heads),
            ));
        }
        if spec.window == Some(0) {
            return Err(Error::argument(OP, "a window of 0 keys; use 1 or more"));
        }
        if weights == AttentionWeights::StickBreaking && spec.mask != Mask::Causal {
            return Err(Error::argument(OP, "stick-breaking looks back only; use the causal mask"));
        }
        self.check(OP, "q", q, &[q.rows(), spec.heads * d])?;
        self.check(OP, "k", k, &[k.rows(), spec.kv_heads * d])?;
        self.check(OP, "v", v, &[k.rows(), spec.kv_heads * d])?;
        if let Some(gates) = log_gates {
            self.check(OP, "log_gates", gates, &[k.rows(), spec.heads])?;
        }
        // A tolerance above 1 would prune where nothing is forgotten; NaN would compare as false.
        if let Acp::On { log_tolerance, .. } = spec.acp
            && (log_tolerance.is_nan() || log_tolerance > 0.0)
        {
            return Err(Error::argument(
                OP,
                format!("log_tolerance is {log_tolerance}, but must be at most 0"),
            ));
        }
        if let Acp::On { bound: LogitBound::QkNorm { q, k }, .. } = &spec.acp {
            self.check_head_weights(OP, "q_norm weights", q, d, spec.heads * d)?;
            self.check_head_weights(OP, "k_norm weights", k, d, spec.kv_heads * d)?;
        }
        if let Acp::On { bound: LogitBound::Given(bounds), .. } = &spec.acp {
            self.check(OP, "logit bounds", bounds, &[spec.segments.len(), spec.heads])?;
        }
        spec.segments.check(OP, q.rows(), k.rows())
    }
}
