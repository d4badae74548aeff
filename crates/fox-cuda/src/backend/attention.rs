//! Forgetting attention: from tensors to buffers and back.

use fox_tensor::{AttentionGrads, AttentionInputs, AttentionOut, AttentionSpec, DType, Tensor};
use half::bf16;

use super::storage::{Activation, Data};
use super::{Cuda, Operand, Precision};
use crate::attention::{self, Attention};
use crate::{Buffer, Error, Result};

/// Operands in their types.
struct Held<'a> {
    q: Operand<'a>,
    k: Operand<'a>,
    v: Operand<'a>,
    gates: Option<Operand<'a>>,
}

fn typed<'a, T: Activation>(operand: &'a Operand<'_>) -> Result<&'a Buffer<T>> {
    let found = operand.data().and_then(T::of);
    found.ok_or_else(|| Error::argument("attention", "an operand of the wrong type"))
}

impl Held<'_> {
    fn inputs<T: Activation>(&self) -> Result<attention::AttentionInputs<'_, T>> {
        Ok(attention::AttentionInputs {
            q: typed(&self.q)?,
            k: typed(&self.k)?,
            v: typed(&self.v)?,
            log_gates: self.gates.as_ref().map(typed).transpose()?,
        })
    }
}

impl Cuda {
    fn hold<'a>(&self, inputs: &AttentionInputs<'a>) -> Result<Held<'a>> {
        Ok(Held {
            q: self.activation(inputs.q)?,
            k: self.activation(inputs.k)?,
            v: self.activation(inputs.v)?,
            gates: inputs.log_gates.map(|x| self.real(x)).transpose()?,
        })
    }

    pub(super) fn attend(
        &self,
        inputs: &AttentionInputs<'_>,
        spec: &AttentionSpec,
    ) -> Result<AttentionOut> {
        match self.precision {
            Precision::F32 => self.attend_in::<f32>(inputs, spec),
            Precision::Bf16 => self.attend_in::<bf16>(inputs, spec),
        }
    }

    fn attend_in<T: Activation>(
        &self,
        inputs: &AttentionInputs<'_>,
        spec: &AttentionSpec,
    ) -> Result<AttentionOut> {
        let held = self.hold(inputs)?;
        let out = Attention::new(&self.gpu, spec, held.inputs::<T>()?)?.forward()?;
        let (device, rows) = (inputs.q.device(), inputs.q.rows());
        Ok(AttentionOut {
            o: self.tensor(T::wrap(out.o), inputs.q.shape(), device),
            lse: self.tensor(Data::F32(out.lse), [rows, spec.heads], device),
            blocks: self.tensor(Data::I32(out.blocks), [spec.heads, 2], device),
        })
    }

    pub(super) fn attend_gradients(
        &self,
        d_out: &Tensor,
        inputs: &AttentionInputs<'_>,
        o: &Tensor,
        lse: &Tensor,
        spec: &AttentionSpec,
    ) -> Result<AttentionGrads> {
        match self.precision {
            Precision::F32 => self.gradients_in::<f32>(d_out, inputs, o, lse, spec),
            Precision::Bf16 => self.gradients_in::<bf16>(d_out, inputs, o, lse, spec),
        }
    }

    fn gradients_in<T: Activation>(
        &self,
        d_out: &Tensor,
        inputs: &AttentionInputs<'_>,
        o: &Tensor,
        lse: &Tensor,
        spec: &AttentionSpec,
    ) -> Result<AttentionGrads> {
        let held = self.hold(inputs)?;
        let (o, d_out) = (self.activation(o)?, self.activation(d_out)?);
        let lse = self.operand(lse, DType::F32)?;
        let attention = Attention::new(&self.gpu, spec, held.inputs::<T>()?)?;
        let grads = attention.backward(typed(&o)?, typed(&lse)?, typed(&d_out)?)?;
        let wrap =
            |x: Buffer<T>, like: &Tensor| self.tensor(T::wrap(x), like.shape(), like.device());
        Ok(AttentionGrads {
            dq: wrap(grads.dq, inputs.q),
            dk: wrap(grads.dk, inputs.k),
            dv: wrap(grads.dv, inputs.v),
            dlog_gates: match (grads.dlog_gates, inputs.log_gates) {
                (Some(d), Some(gates)) => {
                    Some(self.tensor(Data::F32(d), gates.shape(), gates.device()))
                }
                _ => None,
            },
        })
    }
}
