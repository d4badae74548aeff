//! The paged KV cache: page tables, writing new keys, attention of many queries, sums of gates.

mod pages;
mod scatter;
mod totals;

use std::ops::Range;

use fox_tensor::{NewKeys, PagedKeys, PagedOps, PagedSpec, SinkOps, Tensor};

use crate::backend::Cuda;
use crate::backend::launcher::{Variant, plain_variants};
use crate::params::{ConstPtr, Ptr, Real, kernel_params};
use crate::source::source;
use crate::{Result, Source};

pub(crate) use pages::DeviceTable;
pub(crate) use scatter::Writes;

const PAGED: Source =
    source!("paged", [], [Page, PagedParams, RowRange, TotalsParams, ScatterWrite, ScatterParams]);

/// Pages of a slab: 4 MB with heads of 64 in bf16.
const SLAB_PAGES: usize = 256;

kernel_params! {
    /// The addresses of a page of one head.
    #[derive(Default)]
    pub(crate) table struct Page {
        /// `[64, d]`, like `v`.
        pub(crate) k: Ptr<Real>,
        pub(crate) v: Ptr<Real>,
        /// Log gates `[group, 64]`, or null.
        pub(crate) gates: Ptr<f32>,
        /// `[64, transition]`, or null.
        pub(crate) transitions: Ptr<f32>,
    }
}

kernel_params! {
    pub(crate) struct PagedParams {
        /// `[page][kv_heads]`.
        pub(crate) table: ConstPtr<Page>,
        /// New keys: rows from `row` on. Gathered keys: all rows. `[rows, kv_heads * d]`, like `v`.
        pub(crate) k: Ptr<Real>,
        pub(crate) v: Ptr<Real>,
        /// `[rows, kv_heads * group]`, or null.
        pub(crate) gates: Ptr<f32>,
        /// `[rows, kv_heads * transition]`, or null.
        pub(crate) transitions: Ptr<f32>,
        /// Evicted pages per key head `[kv_heads]`; null if there are none.
        pub(crate) dropped: ConstPtr<i32>,
        pub(crate) row: usize,
        /// Position of the first key.
        pub(crate) first: usize,
        /// Keys.
        pub(crate) count: usize,
        pub(crate) kv_heads: usize,
        pub(crate) head_dim: usize,
        pub(crate) group: usize,
        pub(crate) transition: usize,
    }
}

kernel_params! {
    /// A range of rows of gates to sum up.
    pub(crate) table struct RowRange {
        pub(crate) first: usize,
        pub(crate) end: usize,
    }
}

kernel_params! {
    pub(crate) struct TotalsParams {
        /// `[ranges][heads]`.
        pub(crate) totals: Ptr<f64>,
        /// `[R, H]`.
        pub(crate) gates: ConstPtr<f32>,
        pub(crate) ranges: ConstPtr<RowRange>,
        pub(crate) count: usize,
        pub(crate) heads: usize,
    }
}

kernel_params! {
    /// A write of `count` words of 8 bytes.
    table struct ScatterWrite {
        to: Ptr<f64>,
        /// Index of its first word.
        first: usize,
        count: usize,
    }
}

kernel_params! {
    struct ScatterParams {
        writes: ConstPtr<ScatterWrite>,
        words: ConstPtr<f64>,
    }
}

/// Typical variants, for compilation checks.
pub(super) fn variants() -> Vec<(Source, Vec<String>)> {
    plain_variants(PAGED)
}

impl Cuda {
    /// Launches `write_pages` or `gather_pages`.
    ///
    /// # Safety
    /// The table's pages and the rows must have the sizes that the parameters name.
    unsafe fn launch_paged(&self, entry: &'static str, params: PagedParams) -> Result<()> {
        let variant = Variant::plain(self.activations(), params.head_dim);
        let count = params.count * params.kv_heads * params.head_dim;
        // SAFETY: the caller's promise.
        unsafe { self.launch_flat(PAGED, entry, variant, count, params) }
    }
}

impl PagedOps for Cuda {
    fn gates_in_pages(&self) -> bool {
        true
    }

    fn slab_pages(&self) -> Option<usize> {
        Some(SLAB_PAGES)
    }

    fn copy_page(
        &self,
        from: fox_tensor::Page<'_>,
        to: fox_tensor::Page<'_>,
    ) -> fox_tensor::Result<()> {
        fox_tensor::check_copy_page(self, from, to)?;
        Ok(self.timed("copy_page", || self.copy_one_page(from, to))?)
    }

    fn gate_totals(
        &self,
        log_gates: &[&Tensor],
        ranges: &[Range<usize>],
    ) -> fox_tensor::Result<Vec<f64>> {
        fox_tensor::check_gate_totals(self, log_gates, ranges)?;
        Ok(self.timed("gate_totals", || self.sum_gates(log_gates, ranges))?)
    }

    fn write_pages(
        &self,
        new: &NewKeys<'_>,
        keys: &mut dyn PagedKeys,
        first: usize,
    ) -> fox_tensor::Result<()> {
        fox_tensor::check_write_pages(self, new, keys, first)?;
        Ok(self.timed("write_pages", || self.append_to_pages(new, keys, first))?)
    }

    fn paged_attention(
        &self,
        q: &Tensor,
        keys: &[&dyn PagedKeys],
        spec: &PagedSpec,
    ) -> fox_tensor::Result<Tensor> {
        fox_tensor::check_paged_attention(self, q, keys, spec)?;
        let out = self.timed("paged_attention", || self.attend_pages(q, keys, spec))?;
        match &spec.sinks {
            None => Ok(out.o),
            Some(sinks) => Ok(self.sink_fwd(&out.o, &out.lse, sinks)?.0),
        }
    }
}
