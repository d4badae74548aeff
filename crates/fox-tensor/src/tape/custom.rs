//! Ops that are defined outside this crate.

use super::{Saved, Slot, Tape, Var};
use crate::{DType, Error, Result, Tensor};

/// A user-defined op for [`Tape::custom`]: a forward and a backward pass on tensors. Both may call any op of the
/// device ([`Device::backend`](crate::Device::backend)) or compute on the host
/// ([`Tensor::to_f32`], [`Device::from_f32`](crate::Device::from_f32)), which works on every device.
pub trait CustomOp {
    /// Name in error messages.
    fn name(&self) -> &'static str;

    /// Whether the backward pass reads inputs and outputs. Otherwise they are not kept for it, and it gets
    /// [absent](Tensor::absent) tensors of their shapes.
    fn reads_values(&self) -> bool {
        true
    }

    /// The outputs, on the device of the inputs.
    fn forward(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>>;

    /// Gradients of the inputs, in order, from those of the outputs, in order; `None` for an input that has
    /// none. An unused output has a gradient of zeros.
    fn backward(
        &self,
        inputs: &[&Tensor],
        outputs: &[&Tensor],
        grads: &[&Tensor],
    ) -> Result<Vec<Option<Tensor>>>;
}

impl<'m> Tape<'m> {
    /// Runs and records a user-defined op.
    pub fn custom(&mut self, op: impl CustomOp + 'm, inputs: &[&Var]) -> Result<Vec<Var>> {
        let values: Vec<&Tensor> = inputs.iter().map(|input| input.value()).collect();
        for value in &values {
            value.expect_device(op.name(), "input", &self.device)?;
        }
        let outputs = op.forward(&values)?;
        for output in &outputs {
            output.expect_device(op.name(), "output", &self.device)?;
        }
        let needs_grad = inputs.iter().any(|input| input.needs_grad());
        let outs: Vec<Var> =
            outputs.iter().map(|output| self.output(output.clone(), needs_grad)).collect();
        if !needs_grad {
            return Ok(outs);
        }
        let slots: Vec<Slot> = inputs.iter().map(|input| input.slot).collect();
        let absent = |value: &Tensor| Tensor::absent(value.shape(), value.device());
        let (saved, outputs): (Vec<Saved>, Vec<Tensor>) = match op.reads_values() {
            true => (inputs.iter().map(|input| input.saved()).collect(), outputs),
            false => (
                values.iter().map(|value| Saved::stored(absent(value))).collect(),
                outputs.iter().map(absent).collect(),
            ),
        };
        let out_slots: Vec<Slot> = outs.iter().map(|out| out.slot).collect();
        let device = self.device.clone();
        self.push(move |flow| {
            let grads: Vec<Option<Tensor>> =
                out_slots.into_iter().map(|slot| flow.take(slot)).collect();
            if grads.iter().all(Option::is_none) {
                return Ok(());
            }
            let or_zeros = |(grad, output): (Option<Tensor>, &Tensor)| match grad {
                Some(grad) => Ok(grad),
                None => device.zeros(output.shape(), DType::F32),
            };
            let grads =
                grads.into_iter().zip(&outputs).map(or_zeros).collect::<Result<Vec<_>>>()?;
            let inputs = saved.iter().map(Saved::get).collect::<Result<Vec<_>>>()?;
            let (inputs, outputs): (Vec<_>, Vec<_>) =
                (inputs.iter().collect(), outputs.iter().collect());
            let found = op.backward(&inputs, &outputs, &grads.iter().collect::<Vec<_>>())?;
            check(&op, &inputs, &found)?;
            slots.into_iter().zip(found).try_for_each(|(slot, grad)| flow.add_some(slot, grad))
        });
        Ok(outs)
    }
}

/// One gradient for each input, if any, on its device and of its shape.
fn check(op: &impl CustomOp, inputs: &[&Tensor], grads: &[Option<Tensor>]) -> Result<()> {
    if grads.len() != inputs.len() {
        let detail = format!("{} gradients for {} inputs", grads.len(), inputs.len());
        return Err(Error::argument(op.name(), detail));
    }
    for (grad, input) in grads.iter().zip(inputs) {
        if let Some(grad) = grad {
            grad.expect_device(op.name(), "gradient", input.device())?;
            grad.expect_real(op.name(), "gradient")?;
            grad.expect_shape(op.name(), "gradient", input.dims())?;
        }
    }
    Ok(())
}
