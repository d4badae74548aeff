//! Gated linear units on the tape.

use crate::tape::{Saved, Tape, Var};
use crate::{Activation, Error, Result};

impl Tape<'_> {
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
            let (dx, y) = device.recompute_ops()?.glu_bwd_with_output(dy, x, act)?;
            flow.serve(waiting, &y)?;
            flow.add(x_slot, dx)
        });
        Ok(out)
    }
}
