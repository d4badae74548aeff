//! Scans on the tape.

use crate::tape::{Tape, Var, slot_of, value_of, wants};
use crate::{Result, ScanExtras, ScanInputs, ScanSpec, Tensor};

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
    /// state after each segment `[segments, H * dk * dv]`. `state` is the one before.
    pub fn scan(
        &mut self,
        vars: &ScanVars<'_>,
        state: Option<&Tensor>,
        keep_state: bool,
        spec: &ScanSpec,
    ) -> Result<(Var, Option<Tensor>)> {
        let ScanVars { q, k, v, log_decay, write, skip } = *vars;
        let inputs = ScanInputs {
            q: q.value(),
            k: k.value(),
            v: v.value(),
            log_decay: log_decay.map(Var::value),
            write: write.map(Var::value),
            skip: skip.map(Var::value),
            state,
        };
        let mut needs_grad = q.needs_grad() || k.needs_grad() || v.needs_grad();
        needs_grad |= wants(log_decay) || wants(write) || wants(skip);
        let keep = ScanExtras { state: keep_state, backward: needs_grad && self.recording };
        let result = self.device.backend().scan_fwd(&inputs, spec, keep)?;
        let out = self.output(result.o, needs_grad);
        let slots = (q.slot, k.slot, v.slot, slot_of(log_decay), slot_of(write), slot_of(skip));
        let (out_slot, device, spec) = (out.slot, self.device.clone(), spec.clone());
        let (q, k, v) = (q.value.clone(), k.value.clone(), v.value.clone());
        let (decay, write, skip) = (value_of(log_decay), value_of(write), value_of(skip));
        let (state, saved) = (state.cloned(), result.saved);
        self.push(move |flow| {
            let Some(d_out) = flow.take(out_slot) else { return Ok(()) };
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
            let grads = ops.scan_bwd(&d_out, &inputs, saved.as_ref(), &spec)?;
            flow.add(slots.0, grads.dq)?;
            flow.add(slots.1, grads.dk)?;
            flow.add(slots.2, grads.dv)?;
            flow.add_some(slots.3, grads.dlog_decay)?;
            flow.add_some(slots.4, grads.dwrite)?;
            flow.add_some(slots.5, grads.dskip)
        });
        Ok((out, result.state))
    }
}
