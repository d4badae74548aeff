//! `prepare_heads` on the tape.

use crate::tape::{Tape, Var, slot_of, value_of, wants};
use crate::{Error, HeadInputs, HeadSpec, Result, Tensor};

impl Tape<'_> {
    /// Token shift, per-head RMS norm and RoPE of a projection `u[R, H * d]`, in this order, each
    /// optional. `shift[R, H]` are logits; `prev[segments, H * d]` is the raw row before each
    /// segment (no gradient); `norm` is `[H * d]` or `[d]`.
    pub fn prepare_heads(
        &mut self,
        u: &Var,
        shift: Option<&Var>,
        prev: Option<&Tensor>,
        norm: Option<&Var>,
        spec: &HeadSpec,
    ) -> Result<Var> {
        const OP: &str = "prepare_heads";
        let (rows, width) = (u.value().rows(), spec.heads * spec.head_dim);
        self.check(OP, "u", u.value(), &[rows, width])?;
        if let Some(shift) = shift {
            self.check(OP, "shift", shift.value(), &[rows, spec.heads])?;
        }
        if let Some(prev) = prev {
            self.check(OP, "prev", prev, &[spec.segments.len(), width])?;
        }
        if let Some(norm) = norm {
            self.check_head_weights(OP, "norm", norm.value(), spec.head_dim, width)?;
        }
        if spec.rope.is_some() && !spec.head_dim.is_multiple_of(2) {
            return Err(Error::argument(
                OP,
                format!("RoPE needs an even head dim, not {}", spec.head_dim),
            ));
        }
        spec.segments.check(OP, rows, usize::MAX)?;
        let inputs = HeadInputs {
            u: u.value(),
            shift: shift.map(Var::value),
            prev,
            norm: norm.map(Var::value),
        };
        let y = self.device.backend().prepare_heads_fwd(&inputs, spec)?;
        let needs_grad = u.needs_grad() || wants(shift) || wants(norm);
        let again = (u.value.clone(), value_of(shift), prev.cloned(), value_of(norm), spec.clone());
        let out = self.cheap_output(y, needs_grad, false, move |device| {
            let (u, shift, prev, norm, spec) = &again;
            let inputs =
                HeadInputs { u, shift: shift.as_ref(), prev: prev.as_ref(), norm: norm.as_ref() };
            device.backend().prepare_heads_fwd(&inputs, spec)
        });
        let (u_slot, s_slot, n_slot) = (u.slot, slot_of(shift), slot_of(norm));
        let (out_slot, device, spec) = (out.slot, self.device.clone(), spec.clone());
        let (u, shift, prev, norm) =
            (u.value.clone(), value_of(shift), prev.cloned(), value_of(norm));
        self.push(move |flow| {
            let Some(dy) = flow.take(out_slot) else { return Ok(()) };
            let inputs = HeadInputs {
                u: &u,
                shift: shift.as_ref(),
                prev: prev.as_ref(),
                norm: norm.as_ref(),
            };
            let grads = device.backend().prepare_heads_bwd(&dy, &inputs, &spec)?;
            flow.add(u_slot, grads.du)?;
            flow.add_some(s_slot, grads.dshift)?;
            flow.add_some(n_slot, grads.dnorm)
        });
        Ok(out)
    }
}
