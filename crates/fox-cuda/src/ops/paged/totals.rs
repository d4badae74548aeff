//! Sums of log gates over the parts of pages that a step has written.

use std::ops::Range;

use fox_tensor::Tensor;

use super::{GateRun, PAGED, TotalsParams};
use crate::Result;
use crate::backend::Cuda;
use crate::backend::launcher::{FLAT_THREADS, Op, Variant};
use crate::params;

impl Cuda {
    /// Sums of log gates `[R, H]` over runs of rows, `[tensor][run][H]`: a launch for each tensor, then one download.
    pub(super) fn sum_gates(&self, gates: &[&Tensor], runs: &[Range<usize>]) -> Result<Vec<f64>> {
        let heads: usize = gates.iter().map(|gates| gates.cols()).sum();
        if heads * runs.len() == 0 {
            return Ok(Vec::new());
        }
        let rows = runs.iter().map(|run| GateRun { first: run.start, end: run.end });
        let rows = params::rows("gate_totals", &rows.collect::<Vec<_>>())?;
        let (table, totals) = (self.gpu.upload(&rows)?, self.gpu.alloc::<f64>(heads * runs.len())?);
        let mut at = totals.address();
        for gates in gates {
            let (own, heads) = (self.real(gates)?, gates.cols());
            let count = runs.len() * heads;
            let params = TotalsParams {
                totals: at.into(),
                gates: own.address().into(),
                runs: table.address().into(),
                count,
                heads,
            };
            let op = Op {
                source: PAGED,
                entry: "gate_totals",
                variant: Variant::plain(self.activations(), 8),
                grid: [(32 * count).div_ceil(FLAT_THREADS), 1],
                block: FLAT_THREADS,
                shared: 0,
            };
            // SAFETY: the runs lie inside the rows of every tensor, which the caller has checked, and there is room for
            // a sum of every run and head.
            unsafe { self.launch(&op, params)? };
            at += (count * size_of::<f64>()) as u64;
        }
        self.gpu.download(&totals)
    }
}
