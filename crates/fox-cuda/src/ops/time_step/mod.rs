//! Time steps of Mamba-2 and of the gated delta rule.

use fox_tensor::{DType, Tensor, TimeStepInputs, TimeStepOps};

use crate::backend::launcher::{Op, Variant};
use crate::backend::{Cuda, Operand, address};
use crate::params::{ConstPtr, Ptr, kernel_params};
use crate::source::source;
use crate::{Result, Source};

const TIME_STEP: Source = source!("time_step", [], [TimeStep, TimeStepForward, TimeStepBackward]);

kernel_params! {
    struct TimeStep {
        /// `[R, H]`.
        z: ConstPtr<f32>,
        /// `[H]`.
        bias: ConstPtr<f32>,
        /// `[H]`.
        a_log: ConstPtr<f32>,
        /// `R * H`.
        count: u64,
        heads: usize,
        /// Limits of the step.
        low: f32,
        high: f32,
    }

    list struct TimeStepForward {
        /// `[R, H]`.
        dt: Ptr<f32>,
        /// `[R, H]`.
        log_decay: Ptr<f32>,
        p: TimeStep,
    }

    list struct TimeStepBackward {
        /// `[R, H]`.
        dz: Ptr<f32>,
        /// Terms of the gradient of `a_log` per row `[R, H]`.
        da_log: Ptr<f32>,
        /// `[R, H]`, or null.
        ddt: ConstPtr<f32>,
        /// `[R, H]`, or null.
        ddecay: ConstPtr<f32>,
        p: TimeStep,
    }
}

/// The only variant, for compilation checks.
pub(super) fn variants() -> Vec<(Source, Vec<String>)> {
    vec![(TIME_STEP, Variant::plain(DType::F32, 1).defines())]
}

/// Threads per block.
const THREADS: usize = 128;

/// Kernel parameters, and the operands they point to.
struct TimeStepOperands<'a> {
    params: TimeStep,
    _operands: [Operand<'a>; 3],
}

impl Cuda {
    fn time_step<'a>(&self, inputs: &TimeStepInputs<'a>) -> Result<TimeStepOperands<'a>> {
        let (z, bias, a_log) =
            (self.real(inputs.z)?, self.real(inputs.bias)?, self.real(inputs.a_log)?);
        let params = TimeStep {
            z: z.address().into(),
            bias: bias.address().into(),
            a_log: a_log.address().into(),
            count: inputs.z.len() as u64,
            heads: inputs.z.cols(),
            low: inputs.limits.0,
            high: inputs.limits.1,
        };
        Ok(TimeStepOperands { params, _operands: [z, bias, a_log] })
    }

    fn time_step_op(&self, entry: &'static str, inputs: &TimeStepInputs<'_>) -> Op {
        let blocks = inputs.z.len().div_ceil(THREADS).min(self.gpu.processors() as usize * 16);
        let (variant, grid) = (Variant::plain(DType::F32, 1), [blocks, 1]);
        Op::new(TIME_STEP, entry, variant, grid, THREADS)
    }
}

impl TimeStepOps for Cuda {
    fn time_step_fwd(&self, inputs: &TimeStepInputs<'_>) -> fox_tensor::Result<(Tensor, Tensor)> {
        fox_tensor::check_time_step_fwd(self, inputs)?;
        let _span = self.span("time_step fwd")?;
        let device = inputs.z.device();
        let (dt, dt_at) = self.output(inputs.z.shape(), DType::F32, device)?;
        let (decay, decay_at) = self.output(inputs.z.shape(), DType::F32, device)?;
        let held = self.time_step(inputs)?;
        let params =
            TimeStepForward { dt: dt_at.into(), log_decay: decay_at.into(), p: held.params };
        // SAFETY: the operands are validated at entry; outputs and scratch are allocated from their shapes.
        unsafe { self.launch(&self.time_step_op("time_step_fwd", inputs), params)? };
        Ok((dt, decay))
    }

    fn time_step_bwd(
        &self,
        ddt: Option<&Tensor>,
        dlog_decay: Option<&Tensor>,
        inputs: &TimeStepInputs<'_>,
    ) -> fox_tensor::Result<(Tensor, Tensor)> {
        fox_tensor::check_time_step_bwd(self, ddt, dlog_decay, inputs)?;
        let _span = self.span("time_step bwd")?;
        let (rows, heads, device) = (inputs.z.rows(), inputs.z.cols(), inputs.z.device());
        let (dz, dz_at) = self.output(inputs.z.shape(), DType::F32, device)?;
        let partial = self.gpu.alloc::<f32>(rows * heads)?;
        let ddt = ddt.map(|x| self.real(x)).transpose()?;
        let ddecay = dlog_decay.map(|x| self.real(x)).transpose()?;
        let held = self.time_step(inputs)?;
        let params = TimeStepBackward {
            dz: dz_at.into(),
            da_log: partial.address().into(),
            ddt: address(&ddt).into(),
            ddecay: address(&ddecay).into(),
            p: held.params,
        };
        // SAFETY: the operands are validated at entry; outputs and scratch are allocated from their shapes.
        unsafe { self.launch(&self.time_step_op("time_step_bwd", inputs), params)? };
        let da_log = self.column_sums(&partial, [rows, heads], None, device)?;
        Ok((dz, da_log))
    }
}
