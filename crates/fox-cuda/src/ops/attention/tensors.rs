//! The attention op traits: conversion between tensors and typed buffers.

use fox_tensor::{
    AttentionGrads, AttentionInputs, AttentionOps, AttentionOut, AttentionSpec, DType, Tensor,
};
use half::bf16;

use super::{self as attention, Attention};
use crate::backend::storage::{Activation, Data};
use crate::backend::{Cuda, Operand, Precision};
use crate::{Buffer, Error, Result};

/// Operands in the type of activations.
struct TypedOperands<'a> {
    q: Operand<'a>,
    k: Operand<'a>,
    v: Operand<'a>,
    gates: Option<Operand<'a>>,
}

pub(in crate::ops) fn typed<'a, T: Activation>(operand: &'a Operand<'_>) -> Result<&'a Buffer<T>> {
    let found = operand.data().and_then(T::of);
    found.ok_or_else(|| Error::argument("attention", "an operand of the wrong type"))
}

impl TypedOperands<'_> {
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
    fn typed_operands<'a>(&self, inputs: &AttentionInputs<'a>) -> Result<TypedOperands<'a>> {
        Ok(TypedOperands {
            q: self.activation(inputs.q)?,
            k: self.activation(inputs.k)?,
            v: self.activation(inputs.v)?,
            gates: inputs.log_gates.map(|x| self.real(x)).transpose()?,
        })
    }

    pub(crate) fn attend(
        &self,
        inputs: &AttentionInputs<'_>,
        spec: &AttentionSpec,
    ) -> Result<AttentionOut> {
        match self.precision {
            Precision::F32 => self.output_of::<f32>(inputs, spec, |x| x.forward()),
            Precision::Bf16 => self.output_of::<bf16>(inputs, spec, |x| x.forward()),
        }
    }

    /// Gradients of attention, optionally with sinks `[H]`.
    pub(in crate::ops) fn softmax_gradients(
        &self,
        d_out: &Tensor,
        inputs: &AttentionInputs<'_>,
        out: &AttentionOut,
        sinks: Option<&Tensor>,
        spec: &AttentionSpec,
    ) -> Result<AttentionGrads> {
        match self.precision {
            Precision::F32 => self.softmax_gradients_as::<f32>(d_out, inputs, out, sinks, spec),
            Precision::Bf16 => self.softmax_gradients_as::<bf16>(d_out, inputs, out, sinks, spec),
        }
    }

    fn softmax_gradients_as<T: Activation>(
        &self,
        d_out: &Tensor,
        inputs: &AttentionInputs<'_>,
        out: &AttentionOut,
        sinks: Option<&Tensor>,
        spec: &AttentionSpec,
    ) -> Result<AttentionGrads> {
        let (o, lse) = (self.activation(&out.o)?, self.operand(&out.lse, DType::F32)?);
        let sinks = sinks.map(|sinks| self.real(sinks)).transpose()?;
        let sinks = sinks.as_ref().map(typed).transpose()?;
        self.gradients_of::<T>(d_out, inputs, spec, |x, d_out| {
            x.with_sinks(sinks).backward(typed(&o)?, typed(&lse)?, d_out)
        })
    }

    pub(in crate::ops) fn output_of<T: Activation>(
        &self,
        inputs: &AttentionInputs<'_>,
        spec: &AttentionSpec,
        forward: impl FnOnce(&Attention<'_, T>) -> Result<attention::AttentionOut<T>>,
    ) -> Result<AttentionOut> {
        let held = self.typed_operands(inputs)?;
        let out = forward(&Attention::new(&self.gpu, spec, held.inputs::<T>()?)?)?;
        let (device, rows) = (inputs.q.device(), inputs.q.rows());
        Ok(AttentionOut {
            o: self.tensor(T::wrap(out.o), inputs.q.shape(), device),
            lse: self.tensor(Data::F32(out.lse), [rows, spec.heads], device),
            tiles: self.tensor(Data::I32(out.tiles), [spec.heads, 4], device),
        })
    }

    pub(in crate::ops) fn gradients_of<T: Activation>(
        &self,
        d_out: &Tensor,
        inputs: &AttentionInputs<'_>,
        spec: &AttentionSpec,
        backward: impl FnOnce(Attention<'_, T>, &Buffer<T>) -> Result<attention::AttentionGrads<T>>,
    ) -> Result<AttentionGrads> {
        let (held, d_out) = (self.typed_operands(inputs)?, self.activation(d_out)?);
        let attention = Attention::new(&self.gpu, spec, held.inputs::<T>()?)?;
        let grads = backward(attention, typed(&d_out)?)?;
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

impl AttentionOps for Cuda {
    fn attention_fwd(
        &self,
        inputs: &AttentionInputs<'_>,
        spec: &AttentionSpec,
    ) -> fox_tensor::Result<AttentionOut> {
        fox_tensor::check_attention_fwd(self, inputs, spec)?;
        Ok(self.timed("attention fwd", || self.attend(inputs, spec))?)
    }

    fn attention_bwd(
        &self,
        d_out: &Tensor,
        inputs: &AttentionInputs<'_>,
        out: &AttentionOut,
        spec: &AttentionSpec,
    ) -> fox_tensor::Result<AttentionGrads> {
        fox_tensor::check_attention_bwd(self, d_out, inputs, out, spec)?;
        let work = || self.softmax_gradients(d_out, inputs, out, None, spec);
        Ok(self.timed("attention bwd", work)?)
    }
}
