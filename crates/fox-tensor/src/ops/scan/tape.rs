//! Scans on the tape.

use crate::tape::{Tape, Var, slot_of, value_of, wants};
use crate::{Result, ScanExtras, ScanInputs, ScanSpec};

/// Operands of [`Tape::scan`]; shapes as in [`ScanInputs`].
#[derive(Clone, Copy, Debug)]
pub struct ScanVars<'a> {
    /// Queries `[R, G * dk]`.
    pub q: &'a Var,
    /// Keys `[R, G * dk]`.
    pub k: &'a Var,
    /// Values `[R, H * dv]`.
    pub v: &'a Var,
    /// `[R, H]` or `[R, H * dk]`.
    pub log_decay: Option<&'a Var>,
    /// `[R, H]`.
    pub write: Option<&'a Var>,
    /// `[H]`.
    pub skip: Option<&'a Var>,
}

impl Tape<'_> {
    /// The linear recurrence of [`ScanSpec`]: its output `[R, H * dv]` and, if `keep_state`, the
    /// state after each segment `[segments, H * dk * dv]`. `state` is the one before. Gradients flow through both.
    pub fn scan(
        &mut self,
        vars: &ScanVars<'_>,
        state: Option<&Var>,
        keep_state: bool,
        spec: &ScanSpec,
    ) -> Result<(Var, Option<Var>)> {
        let ScanVars { q, k, v, log_decay, write, skip } = *vars;
        let inputs = ScanInputs {
            q: q.value(),
            k: k.value(),
            v: v.value(),
            log_decay: log_decay.map(Var::value),
            write: write.map(Var::value),
            skip: skip.map(Var::value),
            state: state.map(Var::value),
        };
        let mut needs_grad = q.needs_grad() || k.needs_grad() || v.needs_grad();
        needs_grad |= wants(log_decay) || wants(write) || wants(skip) || wants(state);
        let keep = ScanExtras { state: keep_state, backward: needs_grad && self.recording };
        let result = self.device.backend().scan_fwd(&inputs, spec, keep)?;
        let out = self.output(result.o, needs_grad);
        let last = result.state.map(|state| self.output(state, needs_grad));
        let slots = [q, k, v].map(|var| var.slot);
        let optional = [log_decay, write, skip, state].map(slot_of);
        let (out_slot, last_slot) = (out.slot, slot_of(last.as_ref()));
        let (device, spec, o) =
            (self.device.clone(), spec.clone(), (out.value.shape(), out.value.dtype()));
        let (q, k, v) = (q.value.clone(), k.value.clone(), v.value.clone());
        let (decay, write, skip) = (value_of(log_decay), value_of(write), value_of(skip));
        let (state, saved) = (value_of(state), result.saved);
        self.push(move |flow| {
            let d_state = flow.take(last_slot);
            let d_out = match flow.take(out_slot) {
                Some(d_out) => d_out,
                None if d_state.is_some() => device.zeros(o.0, o.1)?,
                None => return Ok(()),
            };
            let inputs = ScanInputs {
                q: &q,
                k: &k,
                v: &v,
                log_decay: decay.as_ref(),
                write: write.as_ref(),
                skip: skip.as_ref(),
                state: state.as_ref(),
            };
            let ops = device.backend();
            let grads = ops.scan_bwd(&d_out, d_state.as_ref(), &inputs, saved.as_ref(), &spec)?;
            for (slot, grad) in slots.into_iter().zip([grads.dq, grads.dk, grads.dv]) {
                flow.add(slot, grad)?;
            }
            let grads = [grads.dlog_decay, grads.dwrite, grads.dskip, grads.dstate];
            optional.into_iter().zip(grads).try_for_each(|(slot, grad)| flow.add_some(slot, grad))
        });
        Ok((out, last))
    }
}
