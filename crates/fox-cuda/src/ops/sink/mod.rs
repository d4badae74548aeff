//! Attention sinks: a learned logit per head in the softmax denominator.

use fox_tensor::{
    AttentionGrads, AttentionInputs, AttentionOut, AttentionSpec, DType, SinkOps, Tensor,
};

use crate::Source;
use crate::backend::Cuda;
use crate::backend::launcher::{Op, Variant, plain_variants};
use crate::params::{ConstPtr, Ptr, Real, kernel_params};
use crate::source::source;

const SINK: Source = source!("sink", [], [SinkForward, SinkBackward]);

kernel_params! {
    list struct SinkForward {
        /// `[R, H * d]`.
        new_o: Ptr<Real>,
        /// `[R, H]`.
        new_lse: Ptr<f32>,
        /// `[R, H * d]`.
        o: ConstPtr<Real>,
        /// `[R, H]`.
        lse: ConstPtr<f32>,
        /// `[H]`.
        sinks: ConstPtr<f32>,
        /// `R * H`.
        units: u64,
        heads: usize,
        head_dim: usize,
    }

    list struct SinkBackward {
        /// Gradient terms of the sinks, `[R, H]`.
        partial: Ptr<f32>,
        /// `[R, H * d]`.
        d_out: ConstPtr<Real>,
        /// With sinks, `[R, H * d]`.
        o: ConstPtr<Real>,
        /// With sinks, `[R, H]`.
        lse: ConstPtr<f32>,
        /// `[H]`.
        sinks: ConstPtr<f32>,
        /// `R * H`.
        units: u64,
        heads: usize,
        head_dim: usize,
    }
}

/// Threads per block of the backward, a warp per head of a row.
const THREADS: usize = 256;

/// Typical variants, for compilation checks.
pub(super) fn variants() -> Vec<(Source, Vec<String>)> {
    plain_variants(SINK)
}

impl SinkOps for Cuda {
    fn sink_fwd(
        &self,
        o: &Tensor,
        lse: &Tensor,
        sinks: &Tensor,
    ) -> fox_tensor::Result<(Tensor, Tensor)> {
        fox_tensor::check_sink_fwd(self, o, lse, sinks)?;
        let _span = self.span("sink fwd")?;
        let (device, dtype, heads) = (o.device(), self.activations(), sinks.len());
        let head_dim = o.cols() / heads;
        let (new_o, o_at) = self.output(o.shape(), dtype, device)?;
        let (new_lse, lse_at) = self.output(lse.shape(), DType::F32, device)?;
        let (count, units) = (o.len(), lse.len());
        let (o, lse, sinks) = (self.activation(o)?, self.real(lse)?, self.real(sinks)?);
        let params = SinkForward {
            new_o: o_at.into(),
            new_lse: lse_at.into(),
            o: o.address().into(),
            lse: lse.address().into(),
            sinks: sinks.address().into(),
            units: units as u64,
            heads,
            head_dim,
        };
        let variant = Variant::plain(dtype, head_dim);
        // SAFETY: the operands are validated at entry; outputs and scratch are allocated from their shapes.
        unsafe { self.launch_flat(SINK, "sink_fwd", variant, count, params)? };
        Ok((new_o, new_lse))
    }

    fn sink_bwd(
        &self,
        d_out: &Tensor,
        o: &Tensor,
        lse: &Tensor,
        sinks: &Tensor,
    ) -> fox_tensor::Result<Tensor> {
        fox_tensor::check_sink_bwd(self, d_out, o, lse, sinks)?;
        let _span = self.span("sink bwd")?;
        let (device, rows, heads) = (o.device(), o.rows(), sinks.len());
        let (head_dim, units) = (o.cols() / heads, rows * heads);
        let partial = self.gpu.alloc::<f32>(units)?;
        let (d_out, o) = (self.activation(d_out)?, self.activation(o)?);
        let (lse, sinks) = (self.real(lse)?, self.real(sinks)?);
        let params = SinkBackward {
            partial: partial.address().into(),
            d_out: d_out.address().into(),
            o: o.address().into(),
            lse: lse.address().into(),
            sinks: sinks.address().into(),
            units: units as u64,
            heads,
            head_dim,
        };
        let blocks = units.div_ceil(THREADS / 32).clamp(1, self.gpu.processors() as usize * 16);
        let (variant, grid) = (Variant::plain(self.activations(), head_dim), [blocks, 1]);
        let op = Op::new(SINK, "sink_bwd", variant, grid, THREADS);
        // SAFETY: the operands are validated at entry; outputs and scratch are allocated from their shapes.
        unsafe { self.launch(&op, params)? };
        Ok(self.column_sums(&partial, [rows, heads], None, device)?)
    }

    fn sink_attention_bwd(
        &self,
        d_out: &Tensor,
        inputs: &AttentionInputs<'_>,
        out: &AttentionOut,
        sinks: &Tensor,
        spec: &AttentionSpec,
    ) -> fox_tensor::Result<AttentionGrads> {
        fox_tensor::check_sink_attention_bwd(self, d_out, inputs, out, sinks, spec)?;
        let work = || self.softmax_gradients(d_out, inputs, out, Some(sinks), spec);
        Ok(self.timed("attention bwd", work)?)
    }
}
