//! Output norm and gate: `y = rms(x) * act(gate)` per head.

use fox_tensor::{
    DType, GatedNormGrads, GatedNormInputs, GatedNormOps, Tensor, gate_then_norm_bwd,
    gate_then_norm_fwd,
};

mod gate_first;

use super::head_fragments::{self, HeadGrid, activation_code};
use crate::backend::{Cuda, Operand, address};
use crate::params::{ConstPtr, Ptr, Real, kernel_params};
use crate::source::source;
use crate::{Buffer, Result, Source};

const GATED: Source = source!("gated", [], [GatedParams, GatedForward, GatedBackward]);

kernel_params! {
    struct GatedParams {
        /// `[R, C]`.
        x: ConstPtr<Real>,
        /// `[C]`, or `[C / groups]` for all groups; or null.
        norm: ConstPtr<f32>,
        /// `[R, C]`, or null.
        gate: ConstPtr<Real>,
        rows: usize,
        groups: usize,
        width: usize,
        /// From the norm weights of a group to those of the next; 0 where groups share them.
        norm_stride: usize,
        act: i32,
        rows_per_slice: usize,
        eps: f32,
    }

    list struct GatedForward {
        /// `[R, C]`.
        y: Ptr<Real>,
        p: GatedParams,
    }

    list struct GatedBackward {
        /// `[R, C]`.
        dx: Ptr<Real>,
        /// `[R, C]`; null without a gate.
        dgate: Ptr<Real>,
        /// Recomputed output `[R, C]`, or null.
        y: Ptr<Real>,
        /// Partial gradients of the norm weights `[slices, C]`; null without a norm.
        partial: Ptr<f32>,
        /// `[R, C]`.
        dy: ConstPtr<Real>,
        p: GatedParams,
    }
}

/// Typical variants, for compilation checks.
pub(crate) fn variants() -> Vec<(Source, Vec<String>)> {
    let mut all = head_fragments::variants(GATED);
    all.extend(gate_first::variants());
    all
}

impl Cuda {
    /// Gradients and recomputed output, which reuses the memory of `dy` if it is not shared.
    pub(crate) fn gated_backward_with_output(
        &self,
        dy: Tensor,
        inputs: &GatedNormInputs<'_>,
    ) -> fox_tensor::Result<(GatedNormGrads, Tensor)> {
        if inputs.normalizes_gated() && inputs.groups > 1 {
            let grads = gate_then_norm_bwd(self, &dy, inputs)?;
            return Ok((grads, gate_then_norm_fwd(self, inputs)?));
        }
        let y = self.replaced(dy)?;
        // SAFETY: `dy` has the shape of `x`, as validated at entry, and its replacement too.
        let grads = unsafe { self.gated_gradients(y.from, y.to, inputs)? };
        Ok((grads, y.out))
    }

    /// # Safety
    /// `dy` and `y`, unless it is 0, must be live activations, as many as `inputs.x` has.
    unsafe fn gated_gradients(
        &self,
        dy: u64,
        y: u64,
        inputs: &GatedNormInputs<'_>,
    ) -> Result<GatedNormGrads> {
        if inputs.normalizes_gated() {
            // SAFETY: the caller's promise.
            return unsafe { self.gate_first_gradients(dy, y, inputs) };
        }
        let (width, device, dtype) = (inputs.x.cols(), inputs.x.device(), self.activations());
        let grid = grid_of(dtype, inputs, true);
        let (dx, dx_at) = self.output(inputs.x.shape(), dtype, device)?;
        let dgate = inputs.gate.map(|gate| self.output(gate.shape(), dtype, device)).transpose()?;
        let partial =
            inputs.norm.map(|_| self.gpu.alloc::<f32>(grid.slices * width)).transpose()?;
        let (p, _operands) = self.gated_params(inputs, &grid)?;
        let params = GatedBackward {
            dx: dx_at.into(),
            dgate: dgate.as_ref().map_or(0, |(_, at)| *at).into(),
            y: y.into(),
            partial: partial.as_ref().map_or(0, Buffer::address).into(),
            dy: dy.into(),
            p,
        };
        // SAFETY: the operands are validated at entry; outputs and scratch are allocated from their shapes.
        unsafe { self.launch(&grid.op(GATED, "gated_norm_bwd", 0), params)? };
        let dnorm = partial
            .zip(inputs.norm)
            .map(|(partial, norm)| {
                self.head_weights(&partial, grid.slices, width, norm.len(), device)
            })
            .transpose()?;
        Ok(GatedNormGrads { dx, dgate: dgate.map(|(dgate, _)| dgate), dnorm })
    }

    /// Kernel parameters, and the operands they point to.
    fn gated_params<'a>(
        &self,
        inputs: &GatedNormInputs<'a>,
        grid: &HeadGrid,
    ) -> Result<(GatedParams, [Option<Operand<'a>>; 3])> {
        let operands = [
            Some(self.activation(inputs.x)?),
            inputs.norm.map(|x| self.real(x)).transpose()?,
            inputs.gate.map(|x| self.activation(x)).transpose()?,
        ];
        let [x, norm, gate] = operands.each_ref().map(address);
        let params = GatedParams {
            x: x.into(),
            norm: norm.into(),
            gate: gate.into(),
            rows: inputs.x.rows(),
            groups: inputs.groups,
            width: inputs.x.cols(),
            norm_stride: match inputs.norm {
                Some(norm) if norm.len() == inputs.x.cols() => norm.len() / inputs.groups,
                _ => 0,
            },
            act: activation_code(inputs.act),
            rows_per_slice: grid.rows_per_slice,
            eps: inputs.eps,
        };
        Ok((params, operands))
    }
}

fn grid_of(dtype: DType, inputs: &GatedNormInputs<'_>, backward: bool) -> HeadGrid {
    let (rows, width) = (inputs.x.rows(), inputs.x.cols());
    HeadGrid::new(dtype, width / inputs.groups, inputs.groups, rows, backward)
}

impl GatedNormOps for Cuda {
    fn gated_norm_fwd(&self, inputs: &GatedNormInputs<'_>) -> fox_tensor::Result<Tensor> {
        fox_tensor::check_gated_norm_fwd(self, inputs)?;
        if inputs.normalizes_gated() && inputs.groups > 1 {
            return gate_then_norm_fwd(self, inputs);
        }
        let _span = self.span("gated_norm fwd")?;
        let dtype = self.activations();
        let (y, at) = self.output(inputs.x.shape(), dtype, inputs.x.device())?;
        if inputs.normalizes_gated() {
            // SAFETY: the operands are validated at entry; the output is allocated from their shapes.
            unsafe { self.gate_first_forward(at, inputs)? };
            return Ok(y);
        }
        let grid = grid_of(dtype, inputs, false);
        let (p, _operands) = self.gated_params(inputs, &grid)?;
        // SAFETY: the operands are validated at entry; outputs and scratch are allocated from their shapes.
        unsafe {
            self.launch(&grid.op(GATED, "gated_norm_fwd", 0), GatedForward { y: at.into(), p })?;
        }
        Ok(y)
    }

    fn gated_norm_bwd(
        &self,
        dy: &Tensor,
        inputs: &GatedNormInputs<'_>,
    ) -> fox_tensor::Result<GatedNormGrads> {
        fox_tensor::check_gated_norm_bwd(self, dy, inputs)?;
        if inputs.normalizes_gated() && inputs.groups > 1 {
            return gate_then_norm_bwd(self, dy, inputs);
        }
        let _span = self.span("gated_norm bwd")?;
        let dy = self.activation(dy)?;
        // SAFETY: `dy` has the shape of `x`, as validated at entry.
        Ok(unsafe { self.gated_gradients(dy.address(), 0, inputs)? })
    }
}
