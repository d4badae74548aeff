//! Log decays per channel of Kimi Delta Attention.

use fox_tensor::{ChannelDecayInputs, ChannelDecayOps, DType, Tensor};

use crate::backend::launcher::{Op, Variant, plain_variants};
use crate::backend::{Cuda, Operand};
use crate::params::{ConstPtr, Ptr, Real, kernel_params};
use crate::source::source;
use crate::{Result, Source};

const CHANNEL_DECAY: Source =
    source!("channel_decay", [], [ChannelDecay, ChannelDecayForward, ChannelDecayBackward]);

kernel_params! {
    struct ChannelDecay {
        /// `[R, H * C]`.
        z: ConstPtr<Real>,
        /// `[H * C]`.
        bias: ConstPtr<f32>,
        /// `[H]`.
        a_log: ConstPtr<f32>,
        rows: usize,
        heads: usize,
        channels: usize,
        rows_per_slice: usize,
        /// Strongest log decay; 0 without a bound.
        bound: f32,
    }

    list struct ChannelDecayForward {
        /// `[R, H * C]`.
        log_decay: Ptr<f32>,
        p: ChannelDecay,
    }

    list struct ChannelDecayBackward {
        /// `[R, H * C]`.
        dz: Ptr<Real>,
        /// Partial gradients of `a_log` `[slices, H]`.
        partial: Ptr<f32>,
        /// `[R, H * C]`.
        dlog_decay: ConstPtr<f32>,
        p: ChannelDecay,
    }
}

/// Threads per block: those of one head and one slice of rows.
const THREADS: usize = 128;

/// Typical variants, for compilation checks.
pub(super) fn variants() -> Vec<(Source, Vec<String>)> {
    plain_variants(CHANNEL_DECAY)
}

/// Kernel parameters, grid, and the operands they point to.
struct Launch<'a> {
    params: ChannelDecay,
    slices: usize,
    _operands: [Operand<'a>; 3],
}

impl Cuda {
    fn channel_decay<'a>(&self, inputs: &ChannelDecayInputs<'a>) -> Result<Launch<'a>> {
        let (rows, heads) = (inputs.z.rows(), inputs.a_log.len());
        let rows_per_slice = (rows / 1024).clamp(1, 16);
        let (z, bias, a_log) =
            (self.activation(inputs.z)?, self.real(inputs.bias)?, self.real(inputs.a_log)?);
        let params = ChannelDecay {
            z: z.address().into(),
            bias: bias.address().into(),
            a_log: a_log.address().into(),
            rows,
            heads,
            channels: inputs.z.cols() / heads,
            rows_per_slice,
            bound: inputs.bound.unwrap_or(0.0),
        };
        let slices = rows.div_ceil(rows_per_slice);
        Ok(Launch { params, slices, _operands: [z, bias, a_log] })
    }

    fn channel_decay_op(&self, entry: &'static str, slices: usize, heads: usize) -> Op {
        let variant = Variant::plain(self.activations(), 1);
        Op::new(CHANNEL_DECAY, entry, variant, [slices, heads], THREADS)
    }
}

impl ChannelDecayOps for Cuda {
    fn channel_decay_fwd(&self, inputs: &ChannelDecayInputs<'_>) -> fox_tensor::Result<Tensor> {
        fox_tensor::check_channel_decay_fwd(self, inputs)?;
        let _span = self.span("channel_decay fwd")?;
        let (decay, at) = self.output(inputs.z.shape(), DType::F32, inputs.z.device())?;
        let held = self.channel_decay(inputs)?;
        let params = ChannelDecayForward { log_decay: at.into(), p: held.params };
        let op = self.channel_decay_op("channel_decay_fwd", held.slices, inputs.a_log.len());
        // SAFETY: the operands are validated at entry; the output is allocated from their shapes.
        unsafe { self.launch(&op, params)? };
        Ok(decay)
    }

    fn channel_decay_bwd(
        &self,
        dlog_decay: &Tensor,
        inputs: &ChannelDecayInputs<'_>,
    ) -> fox_tensor::Result<(Tensor, Tensor)> {
        fox_tensor::check_channel_decay_bwd(self, dlog_decay, inputs)?;
        let _span = self.span("channel_decay bwd")?;
        let (device, heads) = (inputs.z.device(), inputs.a_log.len());
        let (dz, dz_at) = self.output(inputs.z.shape(), self.activations(), device)?;
        let held = self.channel_decay(inputs)?;
        let partial = self.gpu.alloc::<f32>(held.slices * heads)?;
        let d_out = self.real(dlog_decay)?;
        let params = ChannelDecayBackward {
            dz: dz_at.into(),
            partial: partial.address().into(),
            dlog_decay: d_out.address().into(),
            p: held.params,
        };
        let op = self.channel_decay_op("channel_decay_bwd", held.slices, heads);
        // SAFETY: the operands are validated at entry; outputs and scratch are allocated from their shapes.
        unsafe { self.launch(&op, params)? };
        let da_log = self.column_sums(&partial, [held.slices, heads], None, device)?;
        Ok((dz, da_log))
    }
}
