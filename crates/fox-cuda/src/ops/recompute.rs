//! Backward passes that also recompute the result of the forward.

use fox_tensor::{
    Activation, GatedNormGrads, GatedNormInputs, NormGrads, NormSaved, RecomputeOps, Tensor,
};

use crate::backend::Cuda;

impl RecomputeOps for Cuda {
    fn add_rms_norm_bwd_with_output(
        &self,
        dy: &Tensor,
        dsum: Option<Tensor>,
        saved: &NormSaved<'_>,
        dw_acc: Option<Tensor>,
    ) -> fox_tensor::Result<(NormGrads, Tensor)> {
        fox_tensor::check_add_rms_norm_bwd(self, dy, dsum.as_ref(), saved, dw_acc.as_ref())?;
        let y = self.uninit(saved.sum.shape(), self.activations(), saved.sum.device())?;
        let work = || self.norm_backward(dy, dsum, saved, dw_acc, Some(&y));
        Ok((self.timed("add_rms_norm bwd", work)?, y))
    }

    fn gated_norm_bwd_with_output(
        &self,
        dy: Tensor,
        inputs: &GatedNormInputs<'_>,
    ) -> fox_tensor::Result<(GatedNormGrads, Tensor)> {
        fox_tensor::check_gated_norm_bwd(self, &dy, inputs)?;
        let _span = self.span("gated_norm bwd")?;
        self.gated_backward_with_output(dy, inputs)
    }

    fn glu_bwd_with_output(
        &self,
        dy: Tensor,
        x: Tensor,
        act: Activation,
    ) -> fox_tensor::Result<(Tensor, Tensor)> {
        fox_tensor::check_glu_bwd(self, &dy, &x)?;
        Ok(self.timed("glu bwd", || self.glu_backward_with_output(dy, x, act))?)
    }
}
