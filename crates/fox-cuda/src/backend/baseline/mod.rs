//! The ops of the recurrent baselines.

mod add_shape;
mod columns;
mod conv;
mod delta_shape;
mod gates;
mod scan_add;
mod scan_delta;

pub(super) use add_shape::scan_add_variants;
pub(super) use delta_shape::delta_variants;
pub(super) use scan_add::{ChunkTables, ScanKernels};
pub(super) use scan_delta::{DeltaKernels, DeltaTables};

use fox_tensor::{
    BaselineOps, ConvGrads, ConvInputs, ConvSpec, HgrnGates, HgrnGrads, HgrnInputs, Result,
    ScanGrads, ScanInputs, ScanKeep, ScanOut, ScanSpec, Tensor, TimeStepInputs, Update,
};

use super::Cuda;
use super::launcher::Op;
use crate::KernelArg;

impl Cuda {
    /// Launches a kernel whose last parameter is a struct.
    ///
    /// # Safety
    /// As for [`crate::Launch::run`].
    unsafe fn launch_struct<P: KernelArg>(&self, op: &Op<'_>, params: &P) -> crate::Result<()> {
        let kernel = self.kernel(op)?;
        let launch = kernel.launch([op.grid[0] as u32, op.grid[1] as u32, 1], op.block as u32);
        let launch = launch.shared(op.shared as u32).args(op.args).arg(params);
        // SAFETY: the caller's promise.
        unsafe { launch.run(|| format!("{:?} in {:?} blocks", op.variant, op.grid)) }
    }
}

// The scans note the time of each of their kernels themselves.
impl BaselineOps for Cuda {
    fn split_columns(&self, x: &Tensor, widths: &[usize]) -> Result<Vec<Tensor>> {
        Ok(self.timed("split_columns", || self.split(x, widths))?)
    }

    fn join_columns(&self, parts: &[Tensor]) -> Result<Tensor> {
        Ok(self.timed("join_columns", || self.join(parts))?)
    }

    fn short_conv_fwd(&self, inputs: &ConvInputs<'_>, spec: &ConvSpec) -> Result<Tensor> {
        Ok(self.timed("short_conv fwd", || self.conv_forward(inputs, spec))?)
    }

    fn short_conv_bwd(
        &self,
        dy: &Tensor,
        inputs: &ConvInputs<'_>,
        spec: &ConvSpec,
    ) -> Result<ConvGrads> {
        Ok(self.timed("short_conv bwd", || self.conv_backward(dy, inputs, spec))?)
    }

    fn scan_fwd(
        &self,
        inputs: &ScanInputs<'_>,
        spec: &ScanSpec,
        keep: ScanKeep,
    ) -> Result<ScanOut> {
        match spec.update {
            Update::Add => Ok(self.scan_add_forward(inputs, spec, keep)?),
            Update::Delta => Ok(self.delta_forward(inputs, spec, keep)?),
        }
    }

    fn scan_bwd(
        &self,
        d_out: &Tensor,
        inputs: &ScanInputs<'_>,
        saved: Option<&Tensor>,
        spec: &ScanSpec,
    ) -> Result<ScanGrads> {
        match spec.update {
            Update::Add => Ok(self.scan_add_backward(d_out, inputs, saved, spec)?),
            Update::Delta => Ok(self.delta_backward(d_out, inputs, saved, spec)?),
        }
    }

    fn time_step_fwd(&self, inputs: &TimeStepInputs<'_>) -> Result<(Tensor, Tensor)> {
        Ok(self.timed("time_step fwd", || self.step_forward(inputs))?)
    }

    fn time_step_bwd(
        &self,
        ddt: Option<&Tensor>,
        dlog_decay: Option<&Tensor>,
        inputs: &TimeStepInputs<'_>,
    ) -> Result<(Tensor, Tensor)> {
        Ok(self.timed("time_step bwd", || self.step_backward(ddt, dlog_decay, inputs))?)
    }

    fn hgrn_gates_fwd(&self, inputs: &HgrnInputs<'_>) -> Result<HgrnGates> {
        Ok(self.timed("hgrn_gates fwd", || self.hgrn_forward(inputs))?)
    }

    fn hgrn_gates_bwd(&self, d_out: &HgrnGates, inputs: &HgrnInputs<'_>) -> Result<HgrnGrads> {
        Ok(self.timed("hgrn_gates bwd", || self.hgrn_backward(d_out, inputs))?)
    }

    fn lower_bound_fwd(&self, table: &Tensor, layer: usize) -> Result<Tensor> {
        Ok(self.timed("lower_bound fwd", || self.bound_forward(table, layer))?)
    }

    fn lower_bound_bwd(&self, dy: &Tensor, table: &Tensor, layer: usize) -> Result<Tensor> {
        Ok(self.timed("lower_bound bwd", || self.bound_backward(dy, table, layer))?)
    }
}
