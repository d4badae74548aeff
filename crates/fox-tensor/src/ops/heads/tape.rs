//! `prepare_heads` on the tape.

use crate::tape::{Slot, Tape, Var, slot_of, value_of, wants};
use crate::{HeadInputs, HeadSpec, Result, Segment, Segments, Tensor};

impl Tape<'_> {
    /// Token shift, per-head RMS norm and RoPE of a projection `u[R, H * d]`, in this order, each
    /// optional. `shift[R, H]` are logits; `prev[segments, H * d]` is the raw row before each
    /// segment; `norm` is `[H * d]` or `[d]`.
    pub fn prepare_heads(
        &mut self,
        u: &Var,
        shift: Option<&Var>,
        prev: Option<&Var>,
        norm: Option<&Var>,
        spec: &HeadSpec,
    ) -> Result<Var> {
        let inputs = HeadInputs {
            u: u.value(),
            shift: shift.map(Var::value),
            prev: prev.map(Var::value),
            norm: norm.map(Var::value),
        };
        let y = self.device.backend().prepare_heads_fwd(&inputs, spec)?;
        let needs_grad = u.needs_grad() || wants(shift) || wants(prev) || wants(norm);
        let again =
            (u.value.clone(), value_of(shift), value_of(prev), value_of(norm), spec.clone());
        let out = self.cheap_output(y, needs_grad, false, move |device| {
            let (u, shift, prev, norm, spec) = &again;
            let inputs =
                HeadInputs { u, shift: shift.as_ref(), prev: prev.as_ref(), norm: norm.as_ref() };
            device.backend().prepare_heads_fwd(&inputs, spec)
        });
        let (u_slot, s_slot) = (u.slot, slot_of(shift));
        let (p_slot, n_slot) = (slot_of(prev), slot_of(norm));
        let (out_slot, device, spec) = (out.slot, self.device.clone(), spec.clone());
        let (u, shift, prev, norm) =
            (u.value.clone(), value_of(shift), value_of(prev), value_of(norm));
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
            flow.add_some(n_slot, grads.dnorm)?;
            if p_slot != Slot::None {
                flow.add_some(p_slot, gradient_before(&dy, &inputs, &spec)?)?;
            }
            Ok(())
        });
        Ok(out)
    }
}

/// The gradient of the rows before the segments, `[segments, H * d]`; `None` without a shift.
///
/// A segment's first row is `a prev + (1 - a) u`, which is symmetric: with the operands exchanged and the logit of `a`
/// negated, the gradient of `u` is the gradient of `prev`.
fn gradient_before(
    dy: &Tensor,
    inputs: &HeadInputs<'_>,
    spec: &HeadSpec,
) -> Result<Option<Tensor>> {
    let (Some(prev), Some(shift)) = (inputs.prev, inputs.shift) else { return Ok(None) };
    let segments = spec.segments.as_slice();
    let device = prev.device();
    let first_rows = |x: &Tensor| -> Result<Tensor> {
        let mut rows = device.zeros([segments.len(), x.cols()], x.dtype())?;
        for (s, segment) in segments.iter().enumerate().filter(|(_, s)| s.q_len > 0) {
            device.backend().copy_rows(x, segment.q_start, &mut rows, s, 1)?;
        }
        Ok(rows)
    };
    let mut logits = first_rows(shift)?.to_f64()?;
    logits.iter_mut().for_each(|logit| *logit = -*logit);
    let shift = device.from_f64(&logits, [segments.len(), spec.heads])?;
    let mut end = 0;
    let ends = segments.iter().enumerate().map(|(s, segment)| {
        let q_len = segment.q_len.min(1);
        let (k_start, k_len) = (end, segment.offset() + q_len);
        end += k_len;
        Segment { q_start: s, q_len, k_start, k_len }
    });
    let spec = HeadSpec { segments: Segments::new(ends.collect())?, ..spec.clone() };
    let u = first_rows(inputs.u)?;
    let exchanged = HeadInputs { u: prev, shift: Some(&shift), prev: Some(&u), norm: inputs.norm };
    let grads = device.backend().prepare_heads_bwd(&first_rows(dy)?, &exchanged, &spec)?;
    Ok(Some(grads.du))
}
