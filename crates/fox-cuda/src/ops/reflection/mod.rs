//! Reflections of PaTH attention.

use fox_tensor::{DType, ReflectionInputs, ReflectionOps, Tensor};

use crate::backend::launcher::{Op, Variant, plain_variants};
use crate::backend::{Cuda, Operand};
use crate::params::{ConstPtr, Ptr, Real, kernel_params};
use crate::source::source;
use crate::{Result, Source};

const REFLECTION: Source =
    source!("reflection", [], [Reflection, ReflectionForward, ReflectionBackward]);

kernel_params! {
    struct Reflection {
        /// `[R, H * d]`.
        y: ConstPtr<Real>,
        /// `[R, H]`.
        z: ConstPtr<f32>,
        /// `R * H`.
        count: u64,
        head_dim: usize,
        eps: f32,
    }

    list struct ReflectionForward {
        /// `[R, H * d]`.
        u: Ptr<f32>,
        p: Reflection,
    }

    list struct ReflectionBackward {
        /// `[R, H * d]`.
        dy: Ptr<Real>,
        /// `[R, H]`.
        dz: Ptr<f32>,
        /// `[R, H * d]`.
        du: ConstPtr<f32>,
        p: Reflection,
    }
}

/// Threads per block: one warp for each row and head.
const THREADS: usize = 128;

/// Typical variants, for compilation checks.
pub(super) fn variants() -> Vec<(Source, Vec<String>)> {
    plain_variants(REFLECTION)
}

impl Cuda {
    fn reflection<'a>(
        &self,
        inputs: &ReflectionInputs<'a>,
    ) -> Result<(Reflection, [Operand<'a>; 2])> {
        let (y, z) = (self.activation(inputs.y)?, self.real(inputs.z)?);
        let params = Reflection {
            y: y.address().into(),
            z: z.address().into(),
            count: inputs.z.len() as u64,
            head_dim: inputs.y.cols() / inputs.z.cols(),
            eps: inputs.eps,
        };
        Ok((params, [y, z]))
    }

    fn reflection_op(&self, entry: &'static str, heads: usize) -> Op {
        let blocks = heads.div_ceil(THREADS / 32);
        Op::new(REFLECTION, entry, Variant::plain(self.activations(), 1), [blocks, 1], THREADS)
    }
}

impl ReflectionOps for Cuda {
    fn reflection_fwd(&self, inputs: &ReflectionInputs<'_>) -> fox_tensor::Result<Tensor> {
        fox_tensor::check_reflection_fwd(self, inputs)?;
        let _span = self.span("reflection fwd")?;
        let (u, at) = self.output(inputs.y.shape(), DType::F32, inputs.y.device())?;
        if inputs.z.is_empty() {
            return Ok(u);
        }
        let (p, _operands) = self.reflection(inputs)?;
        let op = self.reflection_op("reflection_fwd", inputs.z.len());
        // SAFETY: the operands are validated at entry; the output is allocated from their shapes.
        unsafe { self.launch(&op, ReflectionForward { u: at.into(), p })? };
        Ok(u)
    }

    fn reflection_bwd(
        &self,
        du: &Tensor,
        inputs: &ReflectionInputs<'_>,
    ) -> fox_tensor::Result<(Tensor, Tensor)> {
        fox_tensor::check_reflection_bwd(self, du, inputs)?;
        let _span = self.span("reflection bwd")?;
        let device = inputs.y.device();
        let (dy, dy_at) = self.output(inputs.y.shape(), self.activations(), device)?;
        let (dz, dz_at) = self.output(inputs.z.shape(), DType::F32, device)?;
        if inputs.z.is_empty() {
            return Ok((dy, dz));
        }
        let ((p, _operands), du) = (self.reflection(inputs)?, self.real(du)?);
        let params =
            ReflectionBackward { dy: dy_at.into(), dz: dz_at.into(), du: du.address().into(), p };
        let op = self.reflection_op("reflection_bwd", inputs.z.len());
        // SAFETY: the operands are validated at entry; the outputs are allocated from their shapes.
        unsafe { self.launch(&op, params)? };
        Ok((dy, dz))
    }
}
