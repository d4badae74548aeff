//! Scans of the recurrent models.

pub(crate) mod add;
pub(crate) mod chunks;
pub(crate) mod delta;
mod operands;

use fox_tensor::{
    ScanExtras, ScanGrads, ScanInputs, ScanOps, ScanOut, ScanSpec, StateUpdate, Tensor,
};

use crate::backend::Cuda;

/// Decays per channel with the additive update need keys per head.
fn check_supported(
    cuda: &Cuda,
    inputs: &ScanInputs<'_>,
    spec: &ScanSpec,
) -> fox_tensor::Result<()> {
    let by_channel = inputs.log_decay.is_some_and(|decay| decay.cols() != spec.heads);
    if spec.update == StateUpdate::Delta || !by_channel || spec.key_heads == spec.heads {
        return Ok(());
    }
    let what = "the additive update with a decay per channel and heads that share keys";
    Err(fox_tensor::Error::unsupported(fox_tensor::Backend::name(cuda), what))
}

// Each kernel of a scan has its own profiling span.
impl ScanOps for Cuda {
    fn scan_fwd(
        &self,
        inputs: &ScanInputs<'_>,
        spec: &ScanSpec,
        keep: ScanExtras,
    ) -> fox_tensor::Result<ScanOut> {
        fox_tensor::check_scan_fwd(self, inputs, spec)?;
        check_supported(self, inputs, spec)?;
        match spec.update {
            StateUpdate::Add => Ok(self.scan_add_forward(inputs, spec, keep)?),
            StateUpdate::Delta => Ok(self.delta_forward(inputs, spec, keep)?),
        }
    }

    fn scan_bwd(
        &self,
        d_out: &Tensor,
        d_state: Option<&Tensor>,
        inputs: &ScanInputs<'_>,
        saved: Option<&Tensor>,
        spec: &ScanSpec,
    ) -> fox_tensor::Result<ScanGrads> {
        fox_tensor::check_scan_bwd(self, d_out, d_state, inputs, saved, spec)?;
        check_supported(self, inputs, spec)?;
        match spec.update {
            StateUpdate::Add => Ok(self.scan_add_backward(d_out, d_state, inputs, saved, spec)?),
            StateUpdate::Delta => Ok(self.delta_backward(d_out, d_state, inputs, saved, spec)?),
        }
    }
}
