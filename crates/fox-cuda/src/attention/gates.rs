//! Prefix sums of the log gates and the scan of their gradient, safe over millions of positions.

use super::layout::{CHUNK, Layout};
use super::tiles::Tile;
use super::{Attention, int};
use crate::{Buffer, Float, KernelArg, Result, Source};

/// Where the row sums of dS come from; see the kernel's `GradientInputs`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct GradientInputs {
    pub(super) column_sums: u64,
    pub(super) row_sums: u64,
    pub(super) gate_stride: i32,
    pub(super) m_tile_count: i32,
    pub(super) block_m: i32,
    pub(super) rows_per_sum: i32,
}

// SAFETY: mirrors the struct of the same name in attention_gates.cu.
unsafe impl KernelArg for GradientInputs {}

impl<T: Float> Attention<'_, T> {
    /// Pairs hi + lo of the prefix sums in the log2 domain, `[heads][gate_stride]`; `None` without
    /// gates.
    pub(super) fn gate_prefix(&self, layout: &Layout) -> Result<Option<Buffer<f32>>> {
        let Some(log_gates) = self.inputs.log_gates else { return Ok(None) };
        let heads = self.spec.heads;
        let prefix = self.gpu.alloc::<f32>(2 * heads * layout.gate_stride)?;
        let totals = self.gpu.alloc::<f64>(heads * layout.chunk_count)?;
        let grid = [layout.chunk_count as u32, heads as u32, 1];
        let (prefix_at, totals_at) = (prefix.address(), totals.address());
        let (gates_at, segments_at, chunks_at) =
            (log_gates.address(), layout.segments.address(), layout.chunks.address());
        let (heads, stride) = (int(heads), int(layout.gate_stride));
        let kernel = self.gpu.kernel(Source::ATTENTION_GATES, &[], "gate_totals")?;
        let launch = kernel.launch(grid, CHUNK as u32).arg(&totals_at).arg(&gates_at);
        // SAFETY: parameters as declared in attention_gates.cu; sizes by the layout.
        unsafe { launch.arg(&segments_at).arg(&chunks_at).arg(&heads).run(|| self.shapes())? };
        let kernel = self.gpu.kernel(Source::ATTENTION_GATES, &[], "gate_prefix")?;
        let launch = kernel.launch(grid, CHUNK as u32).arg(&prefix_at).arg(&totals_at);
        let launch = launch.arg(&gates_at).arg(&segments_at).arg(&chunks_at).arg(&heads);
        // SAFETY: as above.
        unsafe { launch.arg(&stride).run(|| self.shapes())? };
        Ok(Some(prefix))
    }

    /// The gradient of the gates, if it is wanted, from column sums `[heads][gate_stride]` and row sums
    /// `[heads][m_tiles * block_m]` of dS.
    pub(super) fn gate_gradient_of_rows(
        &self,
        layout: &Layout,
        tile: &Tile,
        (column_sums, row_sums): (&Buffer<f32>, &Buffer<f32>),
        dlog_gates: Option<&Buffer<f32>>,
    ) -> Result<()> {
        let Some(dlog_gates) = dlog_gates else { return Ok(()) };
        let inputs = GradientInputs {
            column_sums: column_sums.address(),
            row_sums: row_sums.address(),
            gate_stride: int(layout.gate_stride),
            m_tile_count: int(layout.m_tile_count),
            block_m: int(tile.block_m),
            rows_per_sum: 1,
        };
        self.gate_gradient(layout, &inputs, dlog_gates)
    }

    /// `[R_k, H]`: sums over later positions of row sums minus column sums of dS.
    pub(super) fn gate_gradient(
        &self,
        layout: &Layout,
        inputs: &GradientInputs,
        out: &Buffer<f32>,
    ) -> Result<()> {
        let heads = self.spec.heads;
        let totals = self.gpu.alloc::<f64>(heads * layout.chunk_count)?;
        let grid = [layout.chunk_count as u32, heads as u32, 1];
        let (out_at, totals_at) = (out.address(), totals.address());
        let (segments_at, chunks_at) = (layout.segments.address(), layout.chunks.address());
        let heads = int(heads);
        let kernel = self.gpu.kernel(Source::ATTENTION_GATES, &[], "gate_gradient_totals")?;
        let launch = kernel.launch(grid, CHUNK as u32).arg(&totals_at).arg(inputs);
        // SAFETY: parameters as declared in attention_gates.cu; sizes by the layout.
        unsafe { launch.arg(&segments_at).arg(&chunks_at).run(|| self.shapes())? };
        let kernel = self.gpu.kernel(Source::ATTENTION_GATES, &[], "gate_gradient")?;
        let launch = kernel.launch(grid, CHUNK as u32).arg(&out_at).arg(&totals_at).arg(inputs);
        // SAFETY: as above.
        unsafe { launch.arg(&segments_at).arg(&chunks_at).arg(&heads).run(|| self.shapes()) }
    }
}
