//! What only the baselines need: linear recurrences, the short convolution, their gates.

mod columns;
mod conv;
mod gates;
mod scan;

use fox_tensor::{
    BaselineOps, ConvGrads, ConvInputs, ConvSpec, HgrnGates, HgrnGrads, HgrnInputs, Result,
    ScanGrads, ScanInputs, ScanKeep, ScanOut, ScanSpec, Tensor, TimeStepInputs,
};

use crate::Cpu;

impl BaselineOps for Cpu {
    fn split_columns(&self, x: &Tensor, widths: &[usize]) -> Result<Vec<Tensor>> {
        self.run(|| columns::split(self, x, widths))
    }

    fn join_columns(&self, parts: &[Tensor]) -> Result<Tensor> {
        self.run(|| columns::join(self, parts))
    }

    fn short_conv_fwd(&self, inputs: &ConvInputs<'_>, spec: &ConvSpec) -> Result<Tensor> {
        self.run(|| conv::forward(self, inputs, spec))
    }

    fn short_conv_bwd(
        &self,
        dy: &Tensor,
        inputs: &ConvInputs<'_>,
        spec: &ConvSpec,
    ) -> Result<ConvGrads> {
        self.run(|| conv::backward(self, dy, inputs, spec))
    }

    fn scan_fwd(
        &self,
        inputs: &ScanInputs<'_>,
        spec: &ScanSpec,
        keep: ScanKeep,
    ) -> Result<ScanOut> {
        self.run(|| scan::forward(self, inputs, spec, keep))
    }

    fn scan_bwd(
        &self,
        d_out: &Tensor,
        inputs: &ScanInputs<'_>,
        saved: Option<&Tensor>,
        spec: &ScanSpec,
    ) -> Result<ScanGrads> {
        self.run(|| scan::backward(self, d_out, inputs, saved, spec))
    }

    fn time_step_fwd(&self, inputs: &TimeStepInputs<'_>) -> Result<(Tensor, Tensor)> {
        self.run(|| gates::time_step_fwd(self, inputs))
    }

    fn time_step_bwd(
        &self,
        ddt: Option<&Tensor>,
        dlog_decay: Option<&Tensor>,
        inputs: &TimeStepInputs<'_>,
    ) -> Result<(Tensor, Tensor)> {
        self.run(|| gates::time_step_bwd(self, ddt, dlog_decay, inputs))
    }

    fn hgrn_gates_fwd(&self, inputs: &HgrnInputs<'_>) -> Result<HgrnGates> {
        self.run(|| gates::hgrn_fwd(self, inputs))
    }

    fn hgrn_gates_bwd(&self, d_out: &HgrnGates, inputs: &HgrnInputs<'_>) -> Result<HgrnGrads> {
        self.run(|| gates::hgrn_bwd(self, d_out, inputs))
    }

    fn lower_bound_fwd(&self, table: &Tensor, layer: usize) -> Result<Tensor> {
        gates::lower_bound_fwd(self, table, layer)
    }

    fn lower_bound_bwd(&self, dy: &Tensor, table: &Tensor, layer: usize) -> Result<Tensor> {
        gates::lower_bound_bwd(self, dy, table, layer)
    }
}
