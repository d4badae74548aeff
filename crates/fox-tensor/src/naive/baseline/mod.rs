//! The baselines' ops: recurrences step by step, exactly as they are defined.

mod conv;
mod gates;
mod scan;

use super::Naive;
use super::storage::{matrix, maybe_matrix, maybe_real, real};
use crate::{
    BaselineOps, ConvGrads, ConvInputs, ConvSpec, HgrnGates, HgrnGrads, HgrnInputs, Result,
    ScanGrads, ScanInputs, ScanKeep, ScanOut, ScanSpec, Tensor, TimeStepInputs,
};
use conv::Conv;
use gates::{Hgrn, TimeStep};
use scan::Scan;

fn scan<'a>(inputs: &ScanInputs<'a>, spec: &'a ScanSpec) -> Result<Scan<'a>> {
    Ok(Scan {
        q: matrix(inputs.q)?,
        k: matrix(inputs.k)?,
        v: matrix(inputs.v)?,
        log_decay: maybe_matrix(inputs.log_decay)?,
        write: maybe_matrix(inputs.write)?,
        skip: maybe_real(inputs.skip)?,
        state: maybe_matrix(inputs.state)?,
        spec,
    })
}

fn conv<'a>(inputs: &ConvInputs<'a>, spec: &'a ConvSpec) -> Result<Conv<'a>> {
    Ok(Conv {
        x: matrix(inputs.x)?,
        weight: real(inputs.weight)?,
        bias: maybe_real(inputs.bias)?,
        before: maybe_matrix(inputs.before)?,
        taps: inputs.taps(),
        spec,
    })
}

fn time_step<'a>(inputs: &TimeStepInputs<'a>) -> Result<TimeStep<'a>> {
    Ok(TimeStep {
        z: matrix(inputs.z)?,
        bias: real(inputs.bias)?,
        a_log: real(inputs.a_log)?,
        limits: (f64::from(inputs.limits.0), f64::from(inputs.limits.1)),
    })
}

fn hgrn<'a>(inputs: &HgrnInputs<'a>) -> Result<Hgrn<'a>> {
    Ok(Hgrn { q: matrix(inputs.q)?, z: matrix(inputs.z)?, lower: maybe_real(inputs.lower)? })
}

impl BaselineOps for Naive {
    fn split_columns(&self, x: &Tensor, widths: &[usize]) -> Result<Vec<Tensor>> {
        let (data, mut first) = (matrix(x)?, 0);
        let mut part = |&width: &usize| {
            let rows = (0..data.rows).flat_map(|r| &data.row(r)[first..first + width]);
            let values = rows.copied().collect();
            first += width;
            self.tensor(x.device(), values, [data.rows, width])
        };
        Ok(widths.iter().map(&mut part).collect())
    }

    fn join_columns(&self, parts: &[Tensor]) -> Result<Tensor> {
        let data = parts.iter().map(matrix).collect::<Result<Vec<_>>>()?;
        let (rows, width) = (data[0].rows, data.iter().map(|part| part.cols).sum());
        let row = |r: usize| data.iter().flat_map(move |part| part.row(r));
        let values = (0..rows).flat_map(row).copied().collect();
        Ok(self.tensor(parts[0].device(), values, [rows, width]))
    }

    fn short_conv_fwd(&self, inputs: &ConvInputs<'_>, spec: &ConvSpec) -> Result<Tensor> {
        Ok(self.like(inputs.x, conv(inputs, spec)?.forward()))
    }

    fn short_conv_bwd(
        &self,
        dy: &Tensor,
        inputs: &ConvInputs<'_>,
        spec: &ConvSpec,
    ) -> Result<ConvGrads> {
        let grads = conv(inputs, spec)?.backward(matrix(dy)?);
        Ok(ConvGrads {
            dx: self.like(inputs.x, grads.dx),
            dweight: self.like(inputs.weight, grads.dweight),
            dbias: inputs.bias.map(|bias| self.like(bias, grads.dbias)),
        })
    }

    fn scan_fwd(
        &self,
        inputs: &ScanInputs<'_>,
        spec: &ScanSpec,
        keep: ScanKeep,
    ) -> Result<ScanOut> {
        let (o, state) = scan(inputs, spec)?.forward();
        let device = inputs.v.device();
        let shape = [spec.segments.len(), spec.state_len()];
        Ok(ScanOut {
            o: self.like(inputs.v, o),
            state: keep.state.then(|| self.tensor(device, state, shape)),
            saved: None,
        })
    }

    fn scan_bwd(
        &self,
        d_out: &Tensor,
        inputs: &ScanInputs<'_>,
        _: Option<&Tensor>,
        spec: &ScanSpec,
    ) -> Result<ScanGrads> {
        let grads = scan(inputs, spec)?.backward(matrix(d_out)?);
        Ok(ScanGrads {
            dq: self.like(inputs.q, grads.dq),
            dk: self.like(inputs.k, grads.dk),
            dv: self.like(inputs.v, grads.dv),
            dlog_decay: inputs.log_decay.map(|x| self.like(x, grads.dlog_decay)),
            dwrite: inputs.write.map(|x| self.like(x, grads.dwrite)),
            dskip: inputs.skip.map(|x| self.like(x, grads.dskip)),
        })
    }

    fn time_step_fwd(&self, inputs: &TimeStepInputs<'_>) -> Result<(Tensor, Tensor)> {
        let (dt, decay) = time_step(inputs)?.forward();
        Ok((self.like(inputs.z, dt), self.like(inputs.z, decay)))
    }

    fn time_step_bwd(
        &self,
        ddt: Option<&Tensor>,
        dlog_decay: Option<&Tensor>,
        inputs: &TimeStepInputs<'_>,
    ) -> Result<(Tensor, Tensor)> {
        let step = time_step(inputs)?;
        let (dz, da_log) = step.backward(maybe_matrix(ddt)?, maybe_matrix(dlog_decay)?);
        Ok((self.like(inputs.z, dz), self.like(inputs.a_log, da_log)))
    }

    fn hgrn_gates_fwd(&self, inputs: &HgrnInputs<'_>) -> Result<HgrnGates> {
        let (q, k, log_f) = hgrn(inputs)?.forward();
        let like = |values| self.like(inputs.q, values);
        Ok(HgrnGates { q: like(q), k: like(k), log_f: like(log_f) })
    }

    fn hgrn_gates_bwd(&self, d_out: &HgrnGates, inputs: &HgrnInputs<'_>) -> Result<HgrnGrads> {
        let (dk, dlog_f) = (real(&d_out.k)?, real(&d_out.log_f)?);
        let (dq, dz, dlower) = hgrn(inputs)?.backward(real(&d_out.q)?, dk, dlog_f);
        Ok(HgrnGrads {
            dq: self.like(inputs.q, dq),
            dz: self.like(inputs.z, dz),
            dlower: inputs.lower.map(|lower| self.like(lower, dlower)),
        })
    }

    fn lower_bound_fwd(&self, table: &Tensor, layer: usize) -> Result<Tensor> {
        let (bound, _) = gates::lower_bound(matrix(table)?, layer);
        Ok(self.tensor(table.device(), bound, [table.cols()]))
    }

    fn lower_bound_bwd(&self, dy: &Tensor, table: &Tensor, layer: usize) -> Result<Tensor> {
        let values = matrix(table)?;
        let (bound, softmax) = gates::lower_bound(values, layer);
        let (dy, width) = (real(dy)?, values.cols);
        let grad = |i: usize| {
            let (m, c) = (i / width, i % width);
            let inside = if (1..=layer).contains(&m) { 1.0 } else { 0.0 };
            softmax[i] * (inside - bound[c]) * dy[c]
        };
        Ok(self.like(table, (0..values.data.len()).map(grad).collect()))
    }
}
