//! Token shift, per-head norm and RoPE.

use std::sync::Arc;

use fox_tensor::{DType, HeadGrads, HeadInputs, HeadOps, HeadSpec, Tensor};

use super::head_fragments::{self, HeadGrid};
use crate::backend::rows::{RowInfo, RowTable};
use crate::backend::{Cuda, Operand, address};
use crate::params::{ConstPtr, Float2, Ptr, Real, kernel_params};
use crate::source::source;
use crate::{Buffer, Result, Source};

const HEADS: Source = source!("heads", [], [RowInfo, HeadParams, HeadsForward, HeadsBackward]);

kernel_params! {
    struct HeadParams {
        /// `[R, H * d]`.
        u: ConstPtr<Real>,
        /// Logits `[R, H]`, or null.
        shift: ConstPtr<f32>,
        /// The rows before the segments `[segments, H * d]`, or null.
        prev: ConstPtr<Real>,
        /// `[H * d]` or `[d]`, or null.
        norm: ConstPtr<f32>,
        /// Cosine and sine `[positions][d / 2]`, or null.
        rope: ConstPtr<Float2>,
        /// `[R]`.
        info: ConstPtr<RowInfo>,
        rows: usize,
        heads: usize,
        head_dim: usize,
        /// Whether all heads have the same norm weights.
        shared_norm: bool,
        rows_per_slice: usize,
        eps: f32,
    }

    list struct HeadsForward {
        /// `[R, H * d]`.
        y: Ptr<Real>,
        p: HeadParams,
    }

    list struct HeadsBackward {
        /// `[R, H * d]`.
        du: Ptr<Real>,
        /// `[R, H]`; null without a shift.
        dshift: Ptr<f32>,
        /// Partial gradients of the norm weights `[slices, H * d]`; null without a norm.
        partial: Ptr<f32>,
        /// `[R, H * d]`.
        dy: ConstPtr<Real>,
        p: HeadParams,
    }
}

/// Typical variants, for compilation checks.
pub(crate) fn variants() -> Vec<(Source, Vec<String>)> {
    head_fragments::variants(HEADS)
}

/// Kernel parameters, and the operands they point to.
struct HeadOperands<'a> {
    operands: [Option<Operand<'a>>; 4],
    params: HeadParams,
    // Keeps the tables alive until the launch.
    _tables: (Arc<RowTable>, Option<Arc<Buffer<f32>>>),
}

impl Cuda {
    fn head_operands<'a>(
        &self,
        inputs: &HeadInputs<'a>,
        spec: &HeadSpec,
        division: &HeadGrid,
    ) -> Result<HeadOperands<'a>> {
        let rows = inputs.u.rows();
        let info = self.row_table(&spec.segments, rows)?;
        let rope = spec
            .rope
            .map(|rope| self.rope_table(rope, spec.head_dim, &spec.segments))
            .transpose()?;
        let operands = [
            Some(self.activation(inputs.u)?),
            inputs.shift.map(|x| self.real(x)).transpose()?,
            inputs.prev.map(|x| self.activation(x)).transpose()?,
            inputs.norm.map(|x| self.real(x)).transpose()?,
        ];
        let params = HeadParams {
            u: address(&operands[0]).into(),
            shift: address(&operands[1]).into(),
            prev: address(&operands[2]).into(),
            norm: address(&operands[3]).into(),
            rope: rope.as_ref().map_or(0, |table| table.address()).into(),
            info: info.address().into(),
            rows,
            heads: spec.heads,
            head_dim: spec.head_dim,
            shared_norm: inputs.norm.is_some_and(|w| w.len() == spec.head_dim),
            rows_per_slice: division.rows_per_slice,
            eps: spec.norm_eps,
        };
        Ok(HeadOperands { operands, params, _tables: (info, rope) })
    }
}

/// Shared memory for the exchange of RoPE pairs between lanes.
fn rope_bytes(division: &HeadGrid, spec: &HeadSpec) -> usize {
    if spec.rope.is_some() { division.head_bytes() } else { 0 }
}

impl HeadOps for Cuda {
    fn prepare_heads_fwd(
        &self,
        inputs: &HeadInputs<'_>,
        spec: &HeadSpec,
    ) -> fox_tensor::Result<Tensor> {
        fox_tensor::check_prepare_heads_fwd(self, inputs, spec)?;
        let _span = self.span("prepare_heads fwd")?;
        let dtype = self.activations();
        let rows = inputs.u.rows();
        let division = HeadGrid::new(dtype, spec.head_dim, spec.heads, rows, false);
        let (y, at) = self.output(inputs.u.shape(), dtype, inputs.u.device())?;
        let held = self.head_operands(inputs, spec, &division)?;
        let op = division.op(HEADS, "prepare_heads_fwd", rope_bytes(&division, spec));
        // SAFETY: the operands are validated at entry; outputs and scratch are allocated from their shapes.
        unsafe { self.launch(&op, HeadsForward { y: at.into(), p: held.params })? };
        drop(held.operands);
        Ok(y)
    }

    fn prepare_heads_bwd(
        &self,
        dy: &Tensor,
        inputs: &HeadInputs<'_>,
        spec: &HeadSpec,
    ) -> fox_tensor::Result<HeadGrads> {
        fox_tensor::check_prepare_heads_bwd(self, dy, inputs, spec)?;
        let op = match inputs.shift {
            Some(_) => "prepare_heads bwd, shifted",
            None => "prepare_heads bwd",
        };
        let _span = self.span(op)?;
        let (rows, device, dtype) = (inputs.u.rows(), inputs.u.device(), self.activations());
        let division = HeadGrid::new(dtype, spec.head_dim, spec.heads, rows, true);
        let (du, du_at) = self.output(inputs.u.shape(), dtype, device)?;
        let dshift =
            inputs.shift.map(|shift| self.output(shift.shape(), DType::F32, device)).transpose()?;
        let width = spec.heads * spec.head_dim;
        let partial =
            inputs.norm.map(|_| self.gpu.alloc::<f32>(division.slices * width)).transpose()?;
        let held = self.head_operands(inputs, spec, &division)?;
        let dy = self.activation(dy)?;
        let params = HeadsBackward {
            du: du_at.into(),
            dshift: dshift.as_ref().map_or(0, |(_, at)| *at).into(),
            partial: partial.as_ref().map_or(0, Buffer::address).into(),
            dy: dy.address().into(),
            p: held.params,
        };
        let entry = match (inputs.shift, inputs.norm) {
            (None, None) => "prepare_heads_bwd",
            (None, Some(_)) => "prepare_heads_bwd_norm",
            (Some(_), None) => "prepare_heads_bwd_shift",
            (Some(_), Some(_)) => "prepare_heads_bwd_shift_norm",
        };
        let op = division.op(HEADS, entry, rope_bytes(&division, spec));
        // SAFETY: the operands are validated at entry; outputs and scratch are allocated from their shapes.
        unsafe { self.launch(&op, params)? };
        drop(held.operands);
        let dnorm = match (inputs.norm, partial) {
            (Some(norm), Some(partial)) => {
                Some(self.head_weights(&partial, division.slices, width, norm.len(), device)?)
            }
            _ => None,
        };
        Ok(HeadGrads { du, dshift: dshift.map(|(dshift, _)| dshift), dnorm })
    }
}
