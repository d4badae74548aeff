//! The ops as the models see them: check, run, record.

use super::saved::Saved;
use super::{Slot, Tape, Var};
use crate::{
    Activation, DType, Error, GatedNormInputs, HeadInputs, HeadSpec, IGNORE_LABEL, LayerPages,
    PagedSpec, Result, Tensor,
};

impl<'m> Tape<'m> {
    /// Rows of `table[V, C]` for `ids[R]`; the row `pad`, if given, gets no gradient.
    pub fn embedding(&mut self, table: &Var, ids: &Tensor, pad: Option<usize>) -> Result<Var> {
        const OP: &str = "embedding";
        self.check_matrix(OP, "table", table.value())?;
        self.check_ids(OP, "ids", ids, table.value().rows(), None)?;
        let y = self.device.backend().embedding_fwd(table.value(), ids)?;
        let out = self.output(y, table.needs_grad());
        let (slot, out_slot, vocab) = (table.slot, out.slot, table.value().rows());
        let (device, ids) = (self.device.clone(), ids.clone());
        self.push(move |flow| {
            let Some(dy) = flow.take(out_slot) else { return Ok(()) };
            flow.update(slot, |acc| device.backend().embedding_bwd(&dy, &ids, vocab, pad, acc))
        });
        Ok(out)
    }

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
        let (sum, y, rstd) = self.device.backend().add_rms_norm_fwd(
            h.value(),
            delta.map(Var::value),
            w.value(),
            eps,
        )?;
        let needs_grad = h.needs_grad() || w.needs_grad() || wants(delta);
        let again = (sum.clone(), w.value.clone());
        let sum = self.output(sum, needs_grad);
        let y = self.cheap_output(y, needs_grad, true, move |device| {
            Ok(device.backend().add_rms_norm_fwd(&again.0, None, &again.1, eps)?.1)
        });
        let (h_slot, d_slot, w_slot) = (h.slot, slot_of(delta), w.slot);
        let (sum_slot, y_slot, own) = (sum.slot, y.slot, y.again.clone());
        let (device, h, w) = (self.device.clone(), sum.value.clone(), w.value.clone());
        self.push(move |flow| {
            let waiting = own.map_or_else(Vec::new, Saved::take_waiting);
            let dh_out = flow.take(sum_slot);
            let Some(dy) = flow.take(y_slot) else {
                let Some(dh) = dh_out else { return Ok(()) };
                flow.add(d_slot, dh.clone())?;
                return flow.add(h_slot, dh);
            };
            let (acc, backend) = (flow.take(w_slot), device.backend());
            let (dh, dw) = if waiting.is_empty() {
                backend.add_rms_norm_bwd(&dy, dh_out, &h, &w, &rstd, acc)?
            } else {
                let (dh, dw, y) =
                    backend.add_rms_norm_bwd_again(&dy, dh_out, (&h, eps), &w, &rstd, acc)?;
                flow.serve(waiting, &y)?;
                (dh, dw)
            };
            flow.put(w_slot, dw);
            flow.add(d_slot, dh.clone())?;
            flow.add(h_slot, dh)
        });
        Ok((sum, y))
    }

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
            if let Some(d) = grads.dshift {
                flow.add(s_slot, d)?;
            }
            if let Some(d) = grads.dnorm {
                flow.add(n_slot, d)?;
            }
            Ok(())
        });
        Ok(out)
    }

    /// Log forget gates `logsigmoid(z[R, H] + bias[H])`; without `z`, the bias alone for `rows` rows.
    pub fn log_gate(&mut self, z: Option<&Var>, bias: Option<&Var>, rows: usize) -> Result<Var> {
        const OP: &str = "log_gate";
        let heads = match (z, bias) {
            (Some(z), _) => z.value().cols(),
            (None, Some(bias)) => bias.value().len(),
            (None, None) => return Err(Error::argument(OP, "neither logits nor a bias")),
        };
        if let Some(z) = z {
            self.check(OP, "z", z.value(), &[rows, heads])?;
        }
        if let Some(bias) = bias {
            self.check(OP, "bias", bias.value(), &[heads])?;
        }
        let y =
            self.device.backend().log_gate_fwd(z.map(Var::value), bias.map(Var::value), rows)?;
        let needs_grad = wants(z) || wants(bias);
        let out = self.output(y, needs_grad);
        let (z_slot, b_slot, out_slot) = (slot_of(z), slot_of(bias), out.slot);
        let (device, z, bias) = (self.device.clone(), value_of(z), value_of(bias));
        self.push(move |flow| {
            let Some(dy) = flow.take(out_slot) else { return Ok(()) };
            let backend = device.backend();
            let dz = backend.log_gate_bwd(&dy, z.as_ref(), bias.as_ref())?;
            flow.update(b_slot, |acc| backend.linear_bwd_bias(&dz, acc))?;
            flow.add(z_slot, dz)
        });
        Ok(out)
    }

    /// Attention of `q[R, H * d]` over pages, `[R, H * d]`; no gradients pass through it.
    pub fn paged_attention(
        &mut self,
        q: &Var,
        keys: &[&LayerPages],
        spec: &PagedSpec,
    ) -> Result<Var> {
        const OP: &str = "paged_attention";
        self.check_matrix(OP, "q", q.value())?;
        spec.check(q.value(), keys)?;
        if self.recording {
            return Err(Error::argument(OP, "gradients do not pass through pages"));
        }
        Ok(Var::constant(self.device.backend().paged_attention(q.value(), keys, spec)?))
    }

    /// `rms_groups(x[R, C]; norm[C]) * act(gate[R, C])`, either part optional.
    pub fn gated_norm(
        &mut self,
        x: &Var,
        norm: Option<&Var>,
        gate: Option<&Var>,
        groups: usize,
        eps: f32,
        act: Activation,
    ) -> Result<Var> {
        const OP: &str = "gated_norm";
        self.check_matrix(OP, "x", x.value())?;
        let width = x.value().cols();
        if groups == 0 || !width.is_multiple_of(groups) {
            return Err(Error::argument(
                OP,
                format!("{groups} groups do not divide width {width}"),
            ));
        }
        if let Some(norm) = norm {
            self.check(OP, "norm", norm.value(), &[width])?;
        }
        if let Some(gate) = gate {
            self.check(OP, "gate", gate.value(), x.value().dims())?;
        }
        let inputs = GatedNormInputs {
            x: x.value(),
            norm: norm.map(Var::value),
            gate: gate.map(Var::value),
            groups,
            eps,
            act,
        };
        let y = self.device.backend().gated_norm_fwd(&inputs)?;
        let needs_grad = x.needs_grad() || wants(norm) || wants(gate);
        let again = (x.value.clone(), value_of(norm), value_of(gate));
        let out = self.cheap_output(y, needs_grad, true, move |device| {
            let (norm, gate) = (again.1.as_ref(), again.2.as_ref());
            let inputs = GatedNormInputs { x: &again.0, norm, gate, groups, eps, act };
            device.backend().gated_norm_fwd(&inputs)
        });
        let (x_slot, n_slot, g_slot, out_slot) = (x.slot, slot_of(norm), slot_of(gate), out.slot);
        let (device, x, norm, gate, own) = (
            self.device.clone(),
            x.value.clone(),
            value_of(norm),
            value_of(gate),
            out.again.clone(),
        );
        self.push(move |flow| {
            let waiting = own.map_or_else(Vec::new, Saved::take_waiting);
            let Some(dy) = flow.take(out_slot) else { return Ok(()) };
            let (norm, gate) = (norm.as_ref(), gate.as_ref());
            let inputs = GatedNormInputs { x: &x, norm, gate, groups, eps, act };
            let grads = if waiting.is_empty() {
                device.backend().gated_norm_bwd(&dy, &inputs)?
            } else {
                let (grads, y) = device.backend().gated_norm_bwd_again(dy, &inputs)?;
                flow.serve(waiting, &y)?;
                grads
            };
            flow.add(x_slot, grads.du)?;
            if let Some(d) = grads.dshift {
                flow.add(g_slot, d)?;
            }
            if let Some(d) = grads.dnorm {
                flow.add(n_slot, d)?;
            }
            Ok(())
        });
        Ok(out)
    }

    /// Gated linear unit: `act(g) * u` for `x = [g | u]`, `[R, 2 I]` to `[R, I]`.
    pub fn glu(&mut self, x: &Var, act: Activation) -> Result<Var> {
        const OP: &str = "glu";
        self.check_matrix(OP, "x", x.value())?;
        if !x.value().cols().is_multiple_of(2) {
            return Err(Error::argument(OP, format!("width {} is odd", x.value().cols())));
        }
        let y = self.device.backend().glu_fwd(x.value(), act)?;
        let again = x.value.clone();
        let out = self.cheap_output(y, x.needs_grad(), true, move |device| {
            device.backend().glu_fwd(&again, act)
        });
        let (x_slot, out_slot, own) = (x.slot, out.slot, out.again.clone());
        let (device, x) = (self.device.clone(), x.value.clone());
        self.push(move |flow| {
            let waiting = own.map_or_else(Vec::new, Saved::take_waiting);
            let Some(dy) = flow.take(out_slot) else { return Ok(()) };
            if waiting.is_empty() {
                return flow.add(x_slot, device.backend().glu_bwd(&dy, &x, act)?);
            }
            let (dx, y) = device.backend().glu_bwd_again(dy, x, act)?;
            flow.serve(waiting, &y)?;
            flow.add(x_slot, dx)
        });
        Ok(out)
    }

    /// The loss of every row `[R]` of `softmax(x[R, C] w[V, C]^T)` against `labels[R]`.
    ///
    /// The objective that [`Tape::backward`] starts from is `sum_r weights[r] * loss[r]`; a mean is
    /// made by weights of `1 / R`.
    pub fn linear_cross_entropy(
        &mut self,
        x: &Var,
        w: &Var,
        labels: &Tensor,
        weights: &Tensor,
    ) -> Result<Tensor> {
        const OP: &str = "linear_cross_entropy";
        self.check_matrix(OP, "x", x.value())?;
        self.check_matrix(OP, "weight", w.value())?;
        let (rows, width, vocab) = (x.value().rows(), x.value().cols(), w.value().rows());
        w.value().expect_shape(OP, "weight", &[vocab, width])?;
        self.check_ids(OP, "labels", labels, vocab, Some(IGNORE_LABEL))?;
        labels.expect_shape(OP, "labels", &[rows])?;
        self.check(OP, "weights", weights, &[rows])?;
        let weights = self.recording.then_some(weights);
        let result =
            self.device.backend().linear_cross_entropy(x.value(), w.value(), labels, weights)?;
        let (x_slot, w_slot) = (x.slot, w.slot);
        if let Some((dx, dw)) = result.grads {
            self.push(move |flow| {
                flow.add(x_slot, dx)?;
                flow.add(w_slot, dw)
            });
        }
        Ok(result.loss)
    }

    pub(super) fn check(
        &self,
        op: &'static str,
        what: &'static str,
        x: &Tensor,
        dims: &[usize],
    ) -> Result<()> {
        x.expect_device(op, what, &self.device)?;
        x.expect_real(op, what)?;
        x.expect_shape(op, what, dims)
    }

    /// Weights of every head, `[width]`, or one head's that all share, `[d]`.
    pub(super) fn check_head_weights(
        &self,
        op: &'static str,
        what: &'static str,
        w: &Tensor,
        d: usize,
        width: usize,
    ) -> Result<()> {
        let dims = if w.dims() == [d] { d } else { width };
        self.check(op, what, w, &[dims])
    }

    pub(super) fn check_matrix(
        &self,
        op: &'static str,
        what: &'static str,
        x: &Tensor,
    ) -> Result<()> {
        x.expect_device(op, what, &self.device)?;
        x.expect_real(op, what)?;
        if x.shape().rank() != 2 {
            return Err(Error::Shape {
                op,
                what,
                got: x.shape(),
                expected: "two dimensions".into(),
            });
        }
        Ok(())
    }

    /// Token ids index memory, so every one is looked at before an op trusts it.
    fn check_ids(
        &self,
        op: &'static str,
        what: &'static str,
        ids: &Tensor,
        vocab: usize,
        ignore: Option<i32>,
    ) -> Result<()> {
        ids.expect_device(op, what, &self.device)?;
        ids.expect_type(op, what, DType::I32)?;
        if let Some(bad) = self.device.backend().id_out_of_range(ids, vocab, ignore)? {
            return Err(Error::argument(
                op,
                format!("{what} hold {bad}, but the vocabulary has {vocab} entries"),
            ));
        }
        Ok(())
    }
}

pub(super) fn slot_of(var: Option<&Var>) -> Slot {
    var.map_or(Slot::None, |var| var.slot)
}

pub(super) fn wants(var: Option<&Var>) -> bool {
    var.is_some_and(Var::needs_grad)
}

pub(super) fn value_of(var: Option<&Var>) -> Option<Tensor> {
    var.map(|var| var.value.clone())
}
