//! Scans on the tape.

use crate::tape::{Tape, Var, slot_of, value_of, wants};
use crate::{Error, Result, ScanExtras, ScanInputs, ScanSpec, StateUpdate, Tensor};

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
        self.check_scan(&inputs, spec)?;
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

    fn check_scan(&self, inputs: &ScanInputs<'_>, spec: &ScanSpec) -> Result<()> {
        const OP: &str = "scan";
        let (heads, groups) = (spec.heads, spec.key_heads);
        if heads == 0 || groups == 0 || !heads.is_multiple_of(groups) {
            let detail = format!("{heads} heads do not share {groups} heads of keys");
            return Err(Error::argument(OP, detail));
        }
        if spec.key_dim == 0 || spec.value_dim == 0 {
            return Err(Error::argument(OP, "a state without rows or columns"));
        }
        let rows = inputs.q.rows();
        self.check(OP, "q", inputs.q, &[rows, groups * spec.key_dim])?;
        self.check(OP, "k", inputs.k, &[rows, groups * spec.key_dim])?;
        self.check(OP, "v", inputs.v, &[rows, heads * spec.value_dim])?;
        if let Some(decay) = inputs.log_decay {
            let by_channel = decay.cols() != heads;
            if by_channel && (groups != heads || spec.update == StateUpdate::Delta) {
                let detail = "a decay per channel needs keys per head and the additive update";
                return Err(Error::argument(OP, detail));
            }
            let width = if by_channel { heads * spec.key_dim } else { heads };
            self.check(OP, "log_decay", decay, &[rows, width])?;
        }
        if let Some(write) = inputs.write {
            self.check(OP, "write", write, &[rows, heads])?;
        }
        if let Some(skip) = inputs.skip {
            self.check(OP, "skip", skip, &[heads])?;
        }
        if let Some(state) = inputs.state {
            self.check(OP, "state", state, &[spec.segments.len(), spec.state_len()])?;
        }
        spec.segments.check(OP, rows, usize::MAX)
    }
}
