//! Backward passes that also return the op's output: an optional capability of a device.

use crate::{
    Activation, GatedNormGrads, GatedNormInputs, GatedNormOps, GluOps, NormGrads, NormInputs,
    NormOps, NormSaved, Result, Tensor,
};

/// Recomputation of cheap results: on a device with this capability the tape recomputes norms and gated units in the
/// backward pass instead of saving them; see [`Caps`](crate::Caps). The provided methods run the forward pass again; a
/// device with a fused kernel, which reads the operands once, overrides them.
pub trait RecomputeOps: NormOps + GatedNormOps + GluOps {
    /// [`NormOps::add_rms_norm_bwd`] that also returns `y`.
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

    /// [`GatedNormOps::gated_norm_bwd`] that also returns the output, in the storage of `dy` where
    /// that is not shared.
    fn gated_norm_bwd_with_output(
        &self,
        dy: Tensor,
        inputs: &GatedNormInputs<'_>,
    ) -> Result<(GatedNormGrads, Tensor)> {
        Ok((self.gated_norm_bwd(&dy, inputs)?, self.gated_norm_fwd(inputs)?))
    }

    /// [`GluOps::glu_bwd`] that also returns the output: `(dx, y)`, in the storage of `x` and `dy` where
    /// that is not shared.
    fn glu_bwd_with_output(
        &self,
        dy: Tensor,
        x: Tensor,
        act: Activation,
    ) -> Result<(Tensor, Tensor)> {
        Ok((self.glu_bwd(&dy, &x, act)?, self.glu_fwd(&x, act)?))
    }
}
