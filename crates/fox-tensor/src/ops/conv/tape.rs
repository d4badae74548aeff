//! The short convolution on the tape.

use crate::tape::{Tape, Var, slot_of, value_of, wants};
use crate::{ConvInputs, ConvSpec, Result, Tensor};

impl Tape<'_> {
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
        let inputs =
            ConvInputs { x: x.value(), weight: weight.value(), bias: bias.map(Var::value), before };
        let y = self.device.backend().short_conv_fwd(&inputs, spec)?;
        let out = self.output(y, x.needs_grad() || weight.needs_grad() || wants(bias));
        let (x_slot, w_slot, b_slot, out_slot) = (x.slot, weight.slot, slot_of(bias), out.slot);
        let (device, spec) = (self.device.clone(), spec.clone());
        let (x, weight, bias, before) =
            (x.value.clone(), weight.value.clone(), value_of(bias), before.cloned());
        self.push(move |flow| {
            let Some(dy) = flow.take(out_slot) else { return Ok(()) };
            let (bias, before) = (bias.as_ref(), before.as_ref());
            let inputs = ConvInputs { x: &x, weight: &weight, bias, before };
            let grads = device.backend().short_conv_bwd(&dy, &inputs, &spec)?;
            flow.add(x_slot, grads.dx)?;
            flow.add(w_slot, grads.dweight)?;
            flow.add_some(b_slot, grads.dbias)
        });
        Ok(out)
    }
}
