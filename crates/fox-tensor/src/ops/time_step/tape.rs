//! Time steps on the tape.

use crate::tape::{Tape, Var};
use crate::{Error, Result, TimeStepInputs};

impl Tape<'_> {
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
        let (dt, decay) = self.device.backend().time_step_fwd(&inputs)?;
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
            let (dz, da_log) = backend.time_step_bwd(ddt.as_ref(), ddecay.as_ref(), &inputs)?;
            flow.update(b_slot, |acc| backend.linear_bwd_bias(&dz, acc))?;
            flow.add(a_slot, da_log)?;
            flow.add(z_slot, dz)
        });
        Ok((dt, decay))
    }
}
