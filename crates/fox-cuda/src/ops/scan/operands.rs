//! Operands of both scans.

use fox_tensor::{ScanInputs, ScanSpec, Tensor};

use crate::backend::{Cuda, Operand, address};
use crate::params::{ConstPtr, Real, kernel_params};
use crate::{Error, Result};

kernel_params! {
    /// `H` value heads share `G` key heads.
    #[derive(Default)]
    pub(super) struct ScanOperands {
        /// `[R, G * dk]`, like `k`.
        q: ConstPtr<Real>,
        k: ConstPtr<Real>,
        /// `[R, H * dv]`, like `d_out`.
        v: ConstPtr<Real>,
        /// Null in the forward.
        d_out: ConstPtr<Real>,
        /// `[R, H]` or `[R, H * dk]`; or null.
        log_decay: ConstPtr<f32>,
        /// `[R, H]`, or null.
        write: ConstPtr<f32>,
        /// `[H]`, or null.
        skip: ConstPtr<f32>,
        /// `[segments, H, dk, dv]`; null for zeros.
        state: ConstPtr<f32>,
        heads: usize,
        key_heads: usize,
        key_dim: usize,
        value_dim: usize,
        scale: f32,
    }
}

impl ScanOperands {
    /// With the gradient of the output, for the backward.
    pub(super) fn with_gradient(self, d_out: u64) -> Self {
        ScanOperands { d_out: d_out.into(), ..self }
    }
}

/// Rejects saved states that the forward pass with the same operands did not return.
pub(super) fn check_saved(saved: &Tensor, dims: [usize; 2]) -> Result<()> {
    if saved.dims() == dims {
        return Ok(());
    }
    let detail = format!("the saved states have shape {}, expected {dims:?}", saved.shape());
    Err(Error::argument("scan_bwd", detail))
}

/// Owners of the memory that [`ScanOperands`] point to.
pub(super) type HeldOperands<'a> = [Option<Operand<'a>>; 7];

impl Cuda {
    pub(super) fn scan_operands<'a>(
        &self,
        inputs: &ScanInputs<'a>,
        spec: &ScanSpec,
    ) -> Result<(ScanOperands, HeldOperands<'a>)> {
        let real = |x: Option<&'a Tensor>| x.map(|x| self.real(x)).transpose();
        let held = [
            Some(self.activation(inputs.q)?),
            Some(self.activation(inputs.k)?),
            Some(self.activation(inputs.v)?),
            real(inputs.log_decay)?,
            real(inputs.write)?,
            real(inputs.skip)?,
            real(inputs.state)?,
        ];
        let [q, k, v, log_decay, write, skip, state] = held.each_ref().map(address);
        let operands = ScanOperands {
            q: q.into(),
            k: k.into(),
            v: v.into(),
            d_out: 0.into(),
            log_decay: log_decay.into(),
            write: write.into(),
            skip: skip.into(),
            state: state.into(),
            heads: spec.heads,
            key_heads: spec.key_heads,
            key_dim: spec.key_dim,
            value_dim: spec.value_dim,
            scale: spec.scale,
        };
        Ok((operands, held))
    }
}
