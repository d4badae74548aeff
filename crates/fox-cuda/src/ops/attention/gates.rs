//! Prefix sums of the log gates and the suffix scan of their gradient, in f64.

use super::Attention;
use super::launch_cache::Variant;
use super::tiles::TileConfig;
use super::tiling::{BlockRef, CHUNK, ChunkRef, Segment, Tiling};
use crate::params::{ConstPtr, Float2, KernelParams, Ptr, kernel_params};
use crate::source::source;
use crate::{Buffer, Float, Result, Source};

const GATES: Source = source!(
    "attention_gates",
    [],
    [
        Segment,
        BlockRef,
        ChunkRef,
        GateTotals,
        GatePrefix,
        GradientInputs,
        GradientTotals,
        GateGradient
    ]
);

kernel_params! {
    list struct GateTotals {
        /// `[heads][chunks]`.
        totals: Ptr<f64>,
        /// `[R_k, H]`.
        log_gates: ConstPtr<f32>,
        segments: ConstPtr<Segment>,
        chunks: ConstPtr<ChunkRef>,
        heads: usize,
    }

    list struct GatePrefix {
        /// `[heads][gate_stride]`.
        gates: Ptr<Float2>,
        /// `[heads][chunks]`; null if every segment is one chunk.
        totals: ConstPtr<f64>,
        /// `[R_k, H]`.
        log_gates: ConstPtr<f32>,
        segments: ConstPtr<Segment>,
        chunks: ConstPtr<ChunkRef>,
        heads: usize,
        gate_stride: usize,
    }

    /// Row and column sums of dS.
    pub(super) struct GradientInputs {
        /// `[heads][gate_stride]`.
        pub(super) column_sums: ConstPtr<f32>,
        /// `[heads][m_tiles][block_m / rows_per_sum]`.
        pub(super) row_sums: ConstPtr<f32>,
        /// Row statistics of [`Attention::backward_rows`] and logits of attention sinks `[H]`; null without sinks or where
        /// row sums are known per query.
        pub(super) rows: ConstPtr<f32>,
        pub(super) sinks: ConstPtr<f32>,
        pub(super) gate_stride: usize,
        pub(super) m_tile_count: usize,
        pub(super) block_m: usize,
        /// Queries per row sum.
        pub(super) rows_per_sum: usize,
    }

    list struct GradientTotals {
        /// `[heads][chunks]`.
        totals: Ptr<f64>,
        inputs: GradientInputs,
        segments: ConstPtr<Segment>,
        chunks: ConstPtr<ChunkRef>,
    }

    list struct GateGradient {
        /// `[R_k, H]`.
        dlog_gates: Ptr<f32>,
        /// `[heads][chunks]`; null if every segment is one chunk.
        totals: ConstPtr<f64>,
        inputs: GradientInputs,
        segments: ConstPtr<Segment>,
        chunks: ConstPtr<ChunkRef>,
        heads: usize,
    }
}

/// The only variant, for compilation checks.
pub(super) fn variants() -> Vec<(Source, Vec<String>)> {
    vec![(GATES, Vec::new())]
}

impl<T: Float> Attention<'_, T> {
    /// Pairs hi + lo of the prefix sums in the log2 domain, `[heads][gate_stride]`; `None` without
    /// gates.
    pub(in crate::ops) fn gate_prefix(&self, tiling: &Tiling) -> Result<Option<Buffer<f32>>> {
        let Some(log_gates) = self.inputs.log_gates else { return Ok(None) };
        let heads = self.spec.heads;
        let prefix = self.gpu.alloc::<f32>(2 * heads * tiling.gate_stride)?;
        let totals = self.chunk_totals(tiling)?;
        if let Some(totals) = &totals {
            let params = GateTotals {
                totals: totals.address().into(),
                log_gates: log_gates.address().into(),
                segments: tiling.segments.address().into(),
                chunks: tiling.chunks.address().into(),
                heads,
            };
            // SAFETY: buffers of this call and this tiling.
            unsafe { self.over_gates("gate_totals", tiling, params)? };
        }
        let params = GatePrefix {
            gates: prefix.address().into(),
            totals: totals.as_ref().map_or(0, Buffer::address).into(),
            log_gates: log_gates.address().into(),
            segments: tiling.segments.address().into(),
            chunks: tiling.chunks.address().into(),
            heads,
            gate_stride: tiling.gate_stride,
        };
        // SAFETY: buffers of this call and this tiling.
        unsafe { self.over_gates("gate_prefix", tiling, params)? };
        Ok(Some(prefix))
    }

    /// Gradient of the gates, if there are any, from column sums `[heads][gate_stride]` and row sums
    /// `[heads][m_tiles * block_m]` of dS.
    pub(in crate::ops) fn gate_gradient_of_rows(
        &self,
        tiling: &Tiling,
        tile: &TileConfig,
        (column_sums, row_sums): (&Buffer<f32>, &Buffer<f32>),
        dlog_gates: Option<&Buffer<f32>>,
    ) -> Result<()> {
        let Some(dlog_gates) = dlog_gates else { return Ok(()) };
        let inputs = GradientInputs {
            column_sums: column_sums.address().into(),
            row_sums: row_sums.address().into(),
            rows: 0.into(),
            sinks: 0.into(),
            gate_stride: tiling.gate_stride,
            m_tile_count: tiling.m_tile_count,
            block_m: tile.block_m,
            rows_per_sum: 1,
        };
        self.gate_gradient(tiling, inputs, dlog_gates)
    }

    /// Gradient of the gates `[R_k, H]`: suffix sums of row sums minus column sums of dS.
    pub(super) fn gate_gradient(
        &self,
        tiling: &Tiling,
        inputs: GradientInputs,
        out: &Buffer<f32>,
    ) -> Result<()> {
        let totals = self.chunk_totals(tiling)?;
        if let Some(totals) = &totals {
            let params = GradientTotals {
                totals: totals.address().into(),
                inputs,
                segments: tiling.segments.address().into(),
                chunks: tiling.chunks.address().into(),
            };
            // SAFETY: buffers of this call and this tiling.
            unsafe { self.over_gates("gate_gradient_totals", tiling, params)? };
        }
        let params = GateGradient {
            dlog_gates: out.address().into(),
            totals: totals.as_ref().map_or(0, Buffer::address).into(),
            inputs,
            segments: tiling.segments.address().into(),
            chunks: tiling.chunks.address().into(),
            heads: self.spec.heads,
        };
        // SAFETY: buffers of this call and this tiling.
        unsafe { self.over_gates("gate_gradient", tiling, params) }
    }

    /// Buffer for the totals of chunks `[heads][chunks]`; `None` if every segment is one chunk.
    fn chunk_totals(&self, tiling: &Tiling) -> Result<Option<Buffer<f64>>> {
        let several = tiling.longest_k > CHUNK;
        several.then(|| self.gpu.alloc(self.spec.heads * tiling.chunk_count)).transpose()
    }

    /// # Safety
    /// The addresses in `params` must be those of the gates of this call and of buffers allocated for this tiling.
    unsafe fn over_gates<P: KernelParams>(
        &self,
        entry: &'static str,
        tiling: &Tiling,
        params: P,
    ) -> Result<()> {
        let kernel = self.kernel(GATES, entry, Variant::Only, Vec::new)?;
        let launch = kernel.launch([tiling.chunk_count, self.spec.heads, 1], CHUNK);
        // SAFETY: the caller's promise; `new` has checked the gates.
        unsafe { launch.params(params)?.run(|| self.shapes()) }
    }
}
