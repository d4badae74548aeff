//! Sums of log gates over ranges of rows.

use std::ops::Range;

use fox_tensor::Tensor;

use super::{PAGED, RowRange, TotalsParams};
use crate::backend::Cuda;
use crate::backend::launcher::{FLAT_THREADS, Op, Variant};
use crate::{Result, params};

impl Cuda {
    /// Sums of log gates `[R, H]` over ranges of rows, `[tensor][range][H]`: one launch per tensor and one download.
    pub(super) fn sum_gates(&self, gates: &[&Tensor], ranges: &[Range<usize>]) -> Result<Vec<f64>> {
        let heads: usize = gates.iter().map(|gates| gates.cols()).sum();
        if heads * ranges.len() == 0 {
            return Ok(Vec::new());
        }
        let rows = ranges.iter().map(|range| RowRange { first: range.start, end: range.end });
        let rows = params::rows("gate_totals", &rows.collect::<Vec<_>>())?;
        let (table, totals) =
            (self.gpu.upload(&rows)?, self.gpu.alloc::<f64>(heads * ranges.len())?);
        let mut at = totals.address();
        for gates in gates {
            let (own, heads) = (self.real(gates)?, gates.cols());
            let count = ranges.len() * heads;
            let params = TotalsParams {
                totals: at.into(),
                gates: own.address().into(),
                ranges: table.address().into(),
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
            // SAFETY: the ranges lie inside the rows of every tensor, as validated at entry, and there is room for a sum of
            // every range and head.
            unsafe { self.launch(&op, params)? };
            at += (count * size_of::<f64>()) as u64;
        }
        self.gpu.download(&totals)
    }
}
