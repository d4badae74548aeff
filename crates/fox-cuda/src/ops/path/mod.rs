//! PaTH attention.

use fox_tensor::{AttentionOut, AttentionSpec, PathGrads, PathInputs, PathOps, Tensor};

use crate::backend::Cuda;
use crate::{Error, Result};

impl Cuda {
    /// The forward pass; the operands are validated.
    pub(crate) fn path_forward(
        &self,
        _: &PathInputs<'_>,
        _: &AttentionSpec,
    ) -> Result<AttentionOut> {
        Err(missing())
    }
}

/// The error for a pass without a kernel.
fn missing() -> Error {
    Error::argument("path_attention", "PaTH attention has no CUDA kernel; use the device cpu")
}

impl PathOps for Cuda {
    fn path_attention_fwd(
        &self,
        inputs: &PathInputs<'_>,
        spec: &AttentionSpec,
    ) -> fox_tensor::Result<AttentionOut> {
        fox_tensor::check_path_attention_fwd(self, inputs, spec)?;
        Ok(self.path_forward(inputs, spec)?)
    }

    fn path_attention_bwd(
        &self,
        d_out: &Tensor,
        inputs: &PathInputs<'_>,
        out: &AttentionOut,
        spec: &AttentionSpec,
    ) -> fox_tensor::Result<PathGrads> {
        fox_tensor::check_path_attention_bwd(self, d_out, inputs, out, spec)?;
        Err(missing().into())
    }
}
