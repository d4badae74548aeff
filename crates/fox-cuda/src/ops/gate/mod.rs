//! Forget gates.

use fox_tensor::{DType, GateInputs, GateOps, Tensor};

use crate::Source;
use crate::backend::launcher::Variant;
use crate::backend::{Cuda, address};
use crate::params::{ConstPtr, Ptr, kernel_params};
use crate::source::source;

const GATE: Source = source!("gate", [], [LogGateForward, LogGateBackward]);

kernel_params! {
    list struct LogGateForward {
        /// `[R, H]`.
        y: Ptr<f32>,
        /// Logits `[R, H]`, or null.
        z: ConstPtr<f32>,
        /// `[H]`, or null.
        bias: ConstPtr<f32>,
        /// `R * H`.
        count: u64,
        heads: usize,
        /// Factor on the logarithm.
        factor: f32,
    }

    list struct LogGateBackward {
        /// `[R, H]`.
        dz: Ptr<f32>,
        /// `[R, H]`.
        dy: ConstPtr<f32>,
        /// Logits `[R, H]`, or null.
        z: ConstPtr<f32>,
        /// `[H]`, or null.
        bias: ConstPtr<f32>,
        /// `R * H`.
        count: u64,
        heads: usize,
        /// Factor on the logarithm.
        factor: f32,
    }
}

/// The only variant, for compilation checks.
pub(super) fn variants() -> Vec<(Source, Vec<String>)> {
    vec![(GATE, Variant::plain(DType::F32, 1).defines())]
}

impl GateOps for Cuda {
    fn log_gate_fwd(&self, inputs: &GateInputs<'_>) -> fox_tensor::Result<Tensor> {
        fox_tensor::check_log_gate_fwd(self, inputs)?;
        let _span = self.span("log_gate fwd")?;
        let (rows, heads) = (inputs.rows, inputs.heads);
        let (y, at) = self.output([rows, heads], DType::F32, inputs.device)?;
        let z = inputs.z.map(|x| self.real(x)).transpose()?;
        let bias = inputs.bias.map(|x| self.real(x)).transpose()?;
        let params = LogGateForward {
            y: at.into(),
            z: address(&z).into(),
            bias: address(&bias).into(),
            count: y.len() as u64,
            heads,
            factor: inputs.factor,
        };
        // SAFETY: the operands are validated at entry; outputs and scratch are allocated from their shapes.
        unsafe {
            self.launch_flat(GATE, "log_gate_fwd", Variant::plain(DType::F32, 1), y.len(), params)?
        };
        Ok(y)
    }

    fn log_gate_bwd(&self, dy: &Tensor, inputs: &GateInputs<'_>) -> fox_tensor::Result<Tensor> {
        fox_tensor::check_log_gate_bwd(self, dy, inputs)?;
        let _span = self.span("log_gate bwd")?;
        let (dz, at) = self.output(dy.shape(), DType::F32, dy.device())?;
        let (count, heads) = (dy.len(), dy.cols());
        let dy = self.real(dy)?;
        let z = inputs.z.map(|x| self.real(x)).transpose()?;
        let bias = inputs.bias.map(|x| self.real(x)).transpose()?;
        let params = LogGateBackward {
            dz: at.into(),
            dy: dy.address().into(),
            z: address(&z).into(),
            bias: address(&bias).into(),
            count: count as u64,
            heads,
            factor: inputs.factor,
        };
        // SAFETY: the operands are validated at entry; outputs and scratch are allocated from their shapes.
        unsafe {
            self.launch_flat(GATE, "log_gate_bwd", Variant::plain(DType::F32, 1), count, params)?
        };
        Ok(dz)
    }
}
