//! Linear layers on the tape.

use crate::tape::{Saved, Slot, Tape, Var, slot_of, wants};
use crate::{Result, Tensor};

impl Tape<'_> {
    /// `x[R, K] w[N, K]^T + bias[N]`.
    pub fn linear(&mut self, x: &Var, w: &Var, bias: Option<&Var>) -> Result<Var> {
        let y = self.device.backend().linear_fwd(x.value(), w.value(), bias.map(Var::value))?;
        let needs_grad = x.needs_grad() || w.needs_grad() || wants(bias);
        let out = self.output(y, needs_grad);
        let (x_slot, w_slot, b_slot, out_slot) = (x.slot, w.slot, slot_of(bias), out.slot);
        let (device, x, w) = (self.device.clone(), x.saved(), w.saved());
        self.push(move |flow| {
            let Some(dy) = flow.take(out_slot) else { return Ok(()) };
            let backend = device.backend();
            flow.update(x_slot, |acc| backend.linear_bwd_input(&dy, &w.get()?, acc))?;
            drop(w);
            flow.update(b_slot, |acc| backend.linear_bwd_bias(&dy, acc))?;
            if w_slot == Slot::None {
                return Ok(());
            }
            let device = device.clone();
            x.use_later(x_slot != Slot::None, flow, move |x, flow| {
                flow.update(w_slot, |acc| device.backend().linear_bwd_weight(&dy, x, acc))
            })
        });
        Ok(out)
    }

    /// `x[R, K] w_i[N_i, K]^T` for several narrow weights, which a device may compute as one product.
    pub fn linear_group(&mut self, x: &Var, weights: &[Var]) -> Result<Vec<Var>> {
        let values: Vec<&Tensor> = weights.iter().map(Var::value).collect();
        let outs = match self.device.backend().caps().linear_group {
            // A weight that occurs twice gets two terms, one after the other.
            _ if shared_slots(weights) => None,
            Some(group) => group.linear_group_fwd(x.value(), &values)?,
            None => None,
        };
        let Some(outs) = outs else {
            return weights.iter().map(|w| self.linear(x, w, None)).collect();
        };
        let mut vars = Vec::with_capacity(weights.len());
        for (y, w) in outs.into_iter().zip(weights) {
            vars.push(self.output(y, x.needs_grad() || w.needs_grad()));
        }
        let outs: Vec<Slot> = vars.iter().map(|y| y.slot).collect();
        let weights: Vec<(Slot, Saved)> = weights.iter().map(|w| (w.slot, w.saved())).collect();
        let (x_slot, device, x) = (x.slot, self.device.clone(), x.saved());
        self.push(move |flow| {
            let grads = outs.into_iter().map(|slot| flow.take(slot));
            let reached: Vec<(Tensor, (Slot, Saved))> =
                grads.zip(weights).filter_map(|(dy, w)| Some((dy?, w))).collect();
            if reached.is_empty() {
                return Ok(());
            }
            let (dys, ws): (Vec<Tensor>, Vec<(Slot, Saved)>) = reached.into_iter().unzip();
            let (slots, ws): (Vec<Slot>, Vec<Saved>) = ws.into_iter().unzip();
            let group = device.group_ops()?;
            flow.update(x_slot, |acc| {
                let ws = ws.iter().map(Saved::get).collect::<Result<Vec<_>>>()?;
                let (dys, ws): (Vec<&Tensor>, Vec<&Tensor>) =
                    (dys.iter().collect(), ws.iter().collect());
                group.linear_group_bwd_input(&dys, &ws, acc)
            })?;
            drop(ws);
            let device = device.clone();
            x.use_later(x_slot != Slot::None, flow, move |x, flow| {
                let accs = slots.iter().map(|slot| flow.take(*slot)).collect();
                let dys: Vec<&Tensor> = dys.iter().collect();
                let dws = device.group_ops()?.linear_group_bwd_weight(&dys, x, accs)?;
                for (slot, dw) in slots.into_iter().zip(dws) {
                    flow.put(slot, dw);
                }
                Ok(())
            })
        });
        Ok(vars)
    }
}

/// Whether two of the values pass their gradients to the same slot.
fn shared_slots(vars: &[Var]) -> bool {
    let is_shared = |(i, var): (usize, &Var)| {
        var.needs_grad() && vars[..i].iter().any(|other| other.slot == var.slot)
    };
    vars.iter().enumerate().any(is_shared)
}
