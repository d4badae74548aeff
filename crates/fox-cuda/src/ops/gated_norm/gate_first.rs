//! `y = rms(x * act(gate)) * norm` over whole rows.

use fox_tensor::{DType, GatedNormGrads, GatedNormInputs};

use crate::backend::launcher::{Op, Variant};
use crate::backend::{Cuda, Operand};
use crate::ops::head_fragments::activation_code;
use crate::params::{ConstPtr, Ptr, Real, kernel_params};
use crate::source::source;
use crate::{Buffer, Error, Result, Source};

const GATE_FIRST: Source =
    source!("gate_first", [], [GateFirst, GateFirstForward, GateFirstBackward]);

kernel_params! {
    struct GateFirst {
        /// `[R, C]`.
        x: ConstPtr<Real>,
        /// `[R, C]`.
        gate: ConstPtr<Real>,
        /// `[C]`.
        norm: ConstPtr<f32>,
        rows: usize,
        width: usize,
        act: i32,
        eps: f32,
    }

    list struct GateFirstForward {
        /// `[R, C]`.
        y: Ptr<Real>,
        p: GateFirst,
    }

    list struct GateFirstBackward {
        /// `[R, C]`.
        dx: Ptr<Real>,
        /// `[R, C]`.
        dgate: Ptr<Real>,
        /// Recomputed output `[R, C]`, or null; may alias `dy`.
        y: Ptr<Real>,
        /// Partial gradients of the norm weights `[blocks, C]`.
        partial: Ptr<f32>,
        /// `[R, C]`.
        dy: ConstPtr<Real>,
        p: GateFirst,
    }
}

/// Typical variants, for compilation checks.
pub(super) fn variants() -> Vec<(Source, Vec<String>)> {
    let of =
        |dtype| [768, 1536, 203].map(|width| (GATE_FIRST, Variant::rows(dtype, width).defines()));
    [DType::F32, DType::Bf16].into_iter().flat_map(of).collect()
}

/// A grid-stride launch over rows.
fn over_rows(entry: &'static str, variant: Variant, blocks: usize) -> Op {
    Op::new(GATE_FIRST, entry, variant, [blocks, 1], 32 * variant.warps)
}

/// The operands that a kernel needs.
fn both<T>(norm: Option<T>, gate: Option<T>) -> Result<(T, T)> {
    norm.zip(gate).ok_or_else(|| Error::argument("gated_norm", "norm or gate is missing"))
}

impl Cuda {
    /// Kernel parameters, and the operands they point to.
    fn gate_first_params<'a>(
        &self,
        inputs: &GatedNormInputs<'a>,
    ) -> Result<(GateFirst, [Operand<'a>; 3])> {
        let (norm, gate) = both(inputs.norm, inputs.gate)?;
        let operands = [self.activation(inputs.x)?, self.activation(gate)?, self.real(norm)?];
        let [x, gate, norm] = operands.each_ref().map(Operand::address);
        let params = GateFirst {
            x: x.into(),
            gate: gate.into(),
            norm: norm.into(),
            rows: inputs.x.rows(),
            width: inputs.x.cols(),
            act: activation_code(inputs.act),
            eps: inputs.eps,
        };
        Ok((params, operands))
    }

    /// Writes the norm of gated rows to `y`.
    ///
    /// # Safety
    /// `y` must be a live matrix of activations shaped like `inputs.x`.
    pub(super) unsafe fn gate_first_forward(
        &self,
        y: u64,
        inputs: &GatedNormInputs<'_>,
    ) -> Result<()> {
        let (p, _operands) = self.gate_first_params(inputs)?;
        let variant = Variant::rows(self.activations(), inputs.x.cols());
        let op = over_rows("gate_first_fwd", variant, inputs.x.rows());
        // SAFETY: the operands are validated at entry, and the caller's promise.
        unsafe { self.launch(&op, GateFirstForward { y: y.into(), p }) }
    }

    /// Gradients from `dy`; recomputes the output in `y`.
    ///
    /// # Safety
    /// `dy` and `y`, unless it is 0, must be live matrices of activations shaped like `inputs.x`.
    pub(super) unsafe fn gate_first_gradients(
        &self,
        dy: u64,
        y: u64,
        inputs: &GatedNormInputs<'_>,
    ) -> Result<GatedNormGrads> {
        let (p, _operands) = self.gate_first_params(inputs)?;
        let (rows, width, device) = (inputs.x.rows(), inputs.x.cols(), inputs.x.device());
        let dtype = self.activations();
        let (dx, dx_at) = self.output(inputs.x.shape(), dtype, device)?;
        let (dgate, dgate_at) = self.output(inputs.x.shape(), dtype, device)?;
        let variant = Variant::rows(dtype, width);
        // A block accumulates weight gradients in registers: one wave of blocks.
        let blocks = rows.min(self.gpu.processors() as usize * (16 / variant.warps).max(1));
        let partial: Buffer<f32> = self.gpu.alloc(blocks * width)?;
        let params = GateFirstBackward {
            dx: dx_at.into(),
            dgate: dgate_at.into(),
            y: y.into(),
            partial: partial.address().into(),
            dy: dy.into(),
            p,
        };
        // SAFETY: the operands are validated at entry; outputs and scratch are allocated from their shapes.
        unsafe { self.launch(&over_rows("gate_first_bwd", variant, blocks), params)? };
        let dnorm = self.column_sums(&partial, [blocks, width], None, device)?;
        Ok(GatedNormGrads { dx, dgate: Some(dgate), dnorm: Some(dnorm) })
    }
}
