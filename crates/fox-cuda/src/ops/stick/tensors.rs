//! Stick-breaking attention: from tensors to buffers and back.

use fox_tensor::{AttentionGrads, AttentionInputs, AttentionOut, AttentionSpec, StickOps, Tensor};
use half::bf16;

use crate::Result;
use crate::backend::{Cuda, Precision};

impl Cuda {
    /// Stick-breaking attention.
    pub(crate) fn stick_breaking_forward(
        &self,
        inputs: &AttentionInputs<'_>,
        spec: &AttentionSpec,
    ) -> Result<AttentionOut> {
        match self.precision {
            Precision::F32 => self.output_of::<f32>(inputs, spec, |x| x.stick_breaking()),
            Precision::Bf16 => self.output_of::<bf16>(inputs, spec, |x| x.stick_breaking()),
        }
    }
}

impl StickOps for Cuda {
    fn stick_breaking_fwd(
        &self,
        inputs: &AttentionInputs<'_>,
        spec: &AttentionSpec,
    ) -> fox_tensor::Result<AttentionOut> {
        Ok(self.timed("stick-breaking fwd", || self.stick_breaking_forward(inputs, spec))?)
    }

    fn stick_breaking_bwd(
        &self,
        d_out: &Tensor,
        inputs: &AttentionInputs<'_>,
        _: &AttentionOut,
        spec: &AttentionSpec,
    ) -> fox_tensor::Result<AttentionGrads> {
        let work = || match self.precision {
            Precision::F32 => self.gradients_of::<f32>(d_out, inputs, spec, |x, d_out| {
                x.stick_breaking_backward(d_out)
            }),
            Precision::Bf16 => self.gradients_of::<bf16>(d_out, inputs, spec, |x, d_out| {
                x.stick_breaking_backward(d_out)
            }),
        };
        Ok(self.timed("stick-breaking bwd", work)?)
    }
}
