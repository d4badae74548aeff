//! The residual stream and its norm on the tape.

use crate::tape::{Saved, Tape, Var, slot_of, wants};
use crate::{NormInputs, NormSaved, Result};

impl Tape<'_> {
    /// `h' = h + delta` and its RMS norm: `(h', y)`, both `[R, C]`, for weights `w[C]`.
    pub fn add_rms_norm(
        &mut self,
        h: &Var,
        delta: Option<&Var>,
        w: &Var,
        eps: f32,
    ) -> Result<(Var, Var)> {
        const OP: &str = "add_rms_norm";
        self.check_matrix(OP, "h", h.value())?;
        self.check(OP, "weight", w.value(), &[h.value().cols()])?;
        if let Some(delta) = delta {
            self.check(OP, "delta", delta.value(), h.value().dims())?;
        }
        let inputs = NormInputs { h: h.value(), delta: delta.map(Var::value), w: w.value(), eps };
        let result = self.device.backend().add_rms_norm_fwd(&inputs)?;
        let needs_grad = h.needs_grad() || w.needs_grad() || wants(delta);
        let again = (result.sum.clone(), w.value.clone());
        let sum = self.output(result.sum, needs_grad);
        let y = self.cheap_output(result.y, needs_grad, true, move |device| {
            let inputs = NormInputs { h: &again.0, delta: None, w: &again.1, eps };
            Ok(device.backend().add_rms_norm_fwd(&inputs)?.y)
        });
        let (h_slot, d_slot, w_slot) = (h.slot, slot_of(delta), w.slot);
        let (sum_slot, y_slot, own) = (sum.slot, y.slot, y.again.clone());
        let (device, h, w) = (self.device.clone(), sum.value.clone(), w.value.clone());
        self.push(move |flow| {
            let waiting = own.map_or_else(Vec::new, Saved::take_waiting);
            let dsum = flow.take(sum_slot);
            let Some(dy) = flow.take(y_slot) else {
                let Some(dh) = dsum else { return Ok(()) };
                flow.add(d_slot, dh.clone())?;
                return flow.add(h_slot, dh);
            };
            let (acc, saved) =
                (flow.take(w_slot), NormSaved { sum: &h, rstd: &result.rstd, w: &w, eps });
            let grads = if waiting.is_empty() {
                device.backend().add_rms_norm_bwd(&dy, dsum, &saved, acc)?
            } else {
                let again = device.recompute_ops()?;
                let (grads, y) = again.add_rms_norm_bwd_with_output(&dy, dsum, &saved, acc)?;
                flow.serve(waiting, &y)?;
                grads
            };
            flow.put(w_slot, grads.dw);
            flow.add(d_slot, grads.dh.clone())?;
            flow.add(h_slot, grads.dh)
        });
        Ok((sum, y))
    }
}
