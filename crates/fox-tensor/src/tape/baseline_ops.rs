//! The baselines' ops as the models see them: check, run, record.

use super::ops::{slot_of, value_of, wants};
use super::{Tape, Var};
use crate::{
    ConvInputs, ConvSpec, DType, Error, HgrnGates, HgrnInputs, Result, ScanInputs, ScanKeep,
    ScanSpec, Tensor, TimeStepInputs, Update,
};

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

impl<'m> Tape<'m> {
    /// The columns of `x[R, C]`, cut into parts of these widths.
    pub fn split_columns(&mut self, x: &Var, widths: &[usize]) -> Result<Vec<Var>> {
        const OP: &str = "split_columns";
        self.check_matrix(OP, "x", x.value())?;
        if widths.iter().sum::<usize>() != x.value().cols() {
            let detail = format!("widths {widths:?} do not add up to {}", x.value().cols());
            return Err(Error::argument(OP, detail));
        }
        let parts = self.device.backend().baseline_ops()?.split_columns(x.value(), widths)?;
        let parts: Vec<Var> =
            parts.into_iter().map(|part| self.output(part, x.needs_grad())).collect();
        let outs: Vec<_> = parts.iter().map(|part| (part.slot, part.value.shape())).collect();
        let (x_slot, device) = (x.slot, self.device.clone());
        self.push(move |flow| {
            let grads: Vec<Option<Tensor>> =
                outs.iter().map(|(slot, _)| flow.take(*slot)).collect();
            if grads.iter().all(Option::is_none) {
                return Ok(());
            }
            let whole = |(grad, (_, shape)): (Option<Tensor>, &(_, _))| match grad {
                Some(grad) => Ok(grad),
                None => device.zeros(*shape, DType::F32),
            };
            let grads = grads.into_iter().zip(&outs).map(whole).collect::<Result<Vec<_>>>()?;
            flow.add(x_slot, device.backend().baseline_ops()?.join_columns(&grads)?)
        });
        Ok(parts)
    }

    /// Causal convolution of every channel of `x[R, C]` with its own `K` taps, then bias,
    /// nonlinearity and norm as the spec says. `weight` is `[C, 1, K]` or `[C, K]`, `before` the rows
    /// before each segment `[segments * (K - 1), C]`.
    pub fn short_conv(
        &mut self,
        x: &Var,
        weight: &Var,
        bias: Option<&Var>,
        before: Option<&Tensor>,
        spec: &ConvSpec,
    ) -> Result<Var> {
        const OP: &str = "short_conv";
        self.check_matrix(OP, "x", x.value())?;
        let (rows, width) = (x.value().rows(), x.value().cols());
        let taps = weight.value().len() / width.max(1);
        self.check(OP, "weight", weight.value(), weight.value().dims())?;
        if taps == 0 || weight.value().rows() != width || weight.value().len() != taps * width {
            return Err(Error::Shape {
                op: OP,
                what: "weight",
                got: weight.value().shape(),
                expected: format!("[{width}, taps]"),
            });
        }
        if let Some(bias) = bias {
            self.check(OP, "bias", bias.value(), &[width])?;
        }
        if let Some(before) = before {
            self.check(OP, "before", before, &[spec.segments.len() * (taps - 1), width])?;
        }
        if let Some(norm) = spec.l2_norm
            && (norm.width == 0 || !width.is_multiple_of(norm.width))
        {
            let detail = format!("heads of width {} do not divide {width}", norm.width);
            return Err(Error::argument(OP, detail));
        }
        spec.segments.check(OP, rows, usize::MAX)?;
        let inputs =
            ConvInputs { x: x.value(), weight: weight.value(), bias: bias.map(Var::value), before };
        let y = self.device.backend().baseline_ops()?.short_conv_fwd(&inputs, spec)?;
        let out = self.output(y, x.needs_grad() || weight.needs_grad() || wants(bias));
        let (x_slot, w_slot, b_slot, out_slot) = (x.slot, weight.slot, slot_of(bias), out.slot);
        let (device, spec) = (self.device.clone(), spec.clone());
        let (x, weight, bias, before) =
            (x.value.clone(), weight.value.clone(), value_of(bias), before.cloned());
        self.push(move |flow| {
            let Some(dy) = flow.take(out_slot) else { return Ok(()) };
            let (bias, before) = (bias.as_ref(), before.as_ref());
            let inputs = ConvInputs { x: &x, weight: &weight, bias, before };
            let grads = device.backend().baseline_ops()?.short_conv_bwd(&dy, &inputs, &spec)?;
            flow.add(x_slot, grads.dx)?;
            flow.add(w_slot, grads.dweight)?;
            match grads.dbias {
                Some(d) => flow.add(b_slot, d),
                None => Ok(()),
            }
        });
        Ok(out)
    }

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
        let keep = ScanKeep { state: keep_state, backward: needs_grad && self.recording };
        let result = self.device.backend().baseline_ops()?.scan_fwd(&inputs, spec, keep)?;
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
            let ops = device.backend().baseline_ops()?;
            let grads = ops.scan_bwd(&d_out, &inputs, saved.as_ref(), &spec)?;
            flow.add(slots.0, grads.dq)?;
            flow.add(slots.1, grads.dk)?;
            flow.add(slots.2, grads.dv)?;
            let optional =
                [(slots.3, grads.dlog_decay), (slots.4, grads.dwrite), (slots.5, grads.dskip)];
            for (slot, grad) in optional {
                if let Some(grad) = grad {
                    flow.add(slot, grad)?;
                }
            }
            Ok(())
        });
        Ok((out, result.state))
    }

    /// Time steps `dt = clamp(softplus(z[R, H] + bias[H]))` and log decays `-exp(a_log[H]) dt`.
    pub fn time_step(
        &mut self,
        z: &Var,
        bias: &Var,
        a_log: &Var,
        limits: (f32, f32),
    ) -> Result<(Var, Var)> {
        const OP: &str = "time_step";
        self.check_matrix(OP, "z", z.value())?;
        let heads = z.value().cols();
        self.check(OP, "bias", bias.value(), &[heads])?;
        self.check(OP, "a_log", a_log.value(), &[heads])?;
        // A negative step would grow the state; NaN would compare as false.
        if !(limits.0 >= 0.0 && limits.0 <= limits.1) {
            return Err(Error::argument(OP, format!("{limits:?} are no limits of a time step")));
        }
        let inputs =
            TimeStepInputs { z: z.value(), bias: bias.value(), a_log: a_log.value(), limits };
        let (dt, decay) = self.device.backend().baseline_ops()?.time_step_fwd(&inputs)?;
        let needs_grad = z.needs_grad() || bias.needs_grad() || a_log.needs_grad();
        let (dt, decay) = (self.output(dt, needs_grad), self.output(decay, needs_grad));
        let (z_slot, b_slot, a_slot) = (z.slot, bias.slot, a_log.slot);
        let (dt_slot, decay_slot, device) = (dt.slot, decay.slot, self.device.clone());
        let (z, bias, a_log) = (z.value.clone(), bias.value.clone(), a_log.value.clone());
        self.push(move |flow| {
            let (ddt, ddecay) = (flow.take(dt_slot), flow.take(decay_slot));
            if ddt.is_none() && ddecay.is_none() {
                return Ok(());
            }
            let inputs = TimeStepInputs { z: &z, bias: &bias, a_log: &a_log, limits };
            let backend = device.backend();
            let (dz, da_log) =
                backend.baseline_ops()?.time_step_bwd(ddt.as_ref(), ddecay.as_ref(), &inputs)?;
            flow.update(b_slot, |acc| backend.linear_bwd_bias(&dz, acc))?;
            flow.add(a_slot, da_log)?;
            flow.add(z_slot, dz)
        });
        Ok((dt, decay))
    }

    /// HGRN2's `(silu(q), 1 - f, ln f)` for `f = lower + (1 - lower) sigmoid(z)`; all `[R, C]`,
    /// `lower: [C]`.
    pub fn hgrn_gates(&mut self, q: &Var, z: &Var, lower: Option<&Var>) -> Result<(Var, Var, Var)> {
        const OP: &str = "hgrn_gates";
        self.check_matrix(OP, "q", q.value())?;
        self.check(OP, "z", z.value(), q.value().dims())?;
        if let Some(lower) = lower {
            self.check(OP, "lower", lower.value(), &[z.value().cols()])?;
        }
        let inputs = HgrnInputs { q: q.value(), z: z.value(), lower: lower.map(Var::value) };
        let gates = self.device.backend().baseline_ops()?.hgrn_gates_fwd(&inputs)?;
        let needs_grad = q.needs_grad() || z.needs_grad() || wants(lower);
        let outs = (
            self.output(gates.q, needs_grad),
            self.output(gates.k, needs_grad),
            self.output(gates.log_f, needs_grad),
        );
        let slots = (q.slot, z.slot, slot_of(lower));
        let out_slots = (outs.0.slot, outs.1.slot, outs.2.slot);
        let (device, q, z, lower) =
            (self.device.clone(), q.value.clone(), z.value.clone(), value_of(lower));
        self.push(move |flow| {
            let taken = [flow.take(out_slots.0), flow.take(out_slots.1), flow.take(out_slots.2)];
            if taken.iter().all(Option::is_none) {
                return Ok(());
            }
            let whole = |grad: Option<Tensor>| match grad {
                Some(grad) => Ok(grad),
                None => device.zeros(q.shape(), DType::F32),
            };
            let [dq, dk, dlog_f] = taken;
            let d_out = HgrnGates { q: whole(dq)?, k: whole(dk)?, log_f: whole(dlog_f)? };
            let inputs = HgrnInputs { q: &q, z: &z, lower: lower.as_ref() };
            let grads = device.backend().baseline_ops()?.hgrn_gates_bwd(&d_out, &inputs)?;
            flow.add(slots.0, grads.dq)?;
            flow.add(slots.1, grads.dz)?;
            match grads.dlower {
                Some(d) => flow.add(slots.2, d),
                None => Ok(()),
            }
        });
        Ok(outs)
    }

    /// Lower bounds `[C]` of the forget gates of a layer, from the table `[L, C]` of all layers:
    /// they rise from layer to layer, from 0 towards 1.
    pub fn lower_bound(&mut self, table: &Var, layer: usize) -> Result<Var> {
        const OP: &str = "lower_bound";
        self.check_matrix(OP, "table", table.value())?;
        if layer >= table.value().rows() {
            let detail = format!("layer {layer} of a table for {} layers", table.value().rows());
            return Err(Error::argument(OP, detail));
        }
        let y = self.device.backend().baseline_ops()?.lower_bound_fwd(table.value(), layer)?;
        let out = self.output(y, table.needs_grad());
        let (slot, out_slot) = (table.slot, out.slot);
        let (device, table) = (self.device.clone(), table.value.clone());
        self.push(move |flow| {
            let Some(dy) = flow.take(out_slot) else { return Ok(()) };
            flow.add(slot, device.backend().baseline_ops()?.lower_bound_bwd(&dy, &table, layer)?)
        });
        Ok(out)
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
            if by_channel && (groups != heads || spec.update == Update::Delta) {
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
