//! Backward passes that give an op's output once more: an optional ability of a device.

use crate::{
    Activation, GatedNormGrads, GatedNormInputs, GatedNormOps, GluOps, NormGrads, NormInputs,
    NormOps, NormSaved, Result, Tensor,
};

/// A device with this prefers memory to time: the tape computes the results of cheap ops (norms, gated
/// units) again in the backward rather than keep them; see [`Caps`](crate::Caps). The provided methods
/// run the forward once more; a device that reads the operands once for both writes its own.
pub trait RecomputeOps: NormOps + GatedNormOps + GluOps {
    /// [`NormOps::add_rms_norm_bwd`] that also gives `y` once more.
    fn add_rms_norm_bwd_with_output(
        &self,
        dy: &Tensor,
        dsum: Option<Tensor>,
        saved: &NormSaved<'_>,
        dw_acc: Option<Tensor>,
    ) -> Result<(NormGrads, Tensor)> {
        let NormSaved { sum: h, w, eps, .. } = *saved;
        let y = self.add_rms_norm_fwd(&NormInputs { h, delta: None, w, eps })?.y;
        Ok((self.add_rms_norm_bwd(dy, dsum, saved, dw_acc)?, y))
    }

    /// [`GatedNormOps::gated_norm_bwd`] that also gives the output once more, in place of `dy` where
    /// nobody else holds it.
    fn gated_norm_bwd_with_output(
        &self,
        dy: Tensor,
        inputs: &GatedNormInputs<'_>,
    ) -> Result<(GatedNormGrads, Tensor)> {
        Ok((self.gated_norm_bwd(&dy, inputs)?, self.gated_norm_fwd(inputs)?))
    }

    /// [`GluOps::glu_bwd`] that also gives the output once more: `(dx, y)`, in place of `x` and `dy` where
    /// nobody else holds them.
    fn glu_bwd_with_output(
        &self,
        dy: Tensor,
        x: Tensor,
        act: Activation,
    ) -> Result<(Tensor, Tensor)> {
        Ok((self.glu_bwd(&dy, &x, act)?, self.glu_fwd(&x, act)?))
    }
}
