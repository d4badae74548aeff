//! Adaptive computation pruning: how large a logit can get, and what the plan kernels are told.

use fox_tensor::{Acp, LogitBound};

use super::layout::Layout;
use super::{Attention, int};
use crate::{Buffer, Error, KernelArg, Result, Source};

/// What the plan kernels are told; mirrors the kernel's struct.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct PlanParams {
    segments: u64,
    m_tiles: u64,
    gates: u64,
    bounds: u64,
    m_tile_count: i32,
    heads: i32,
    kv_heads: i32,
    gate_stride: i32,
    block_m: i32,
    block_n: i32,
    mask: i32,
    window: i32,
    log_tolerance: f32,
    unused: i32,
}

// SAFETY: mirrors the struct of the same name in attention_plan.cu.
unsafe impl KernelArg for PlanParams {}

/// Rows per block of the norm kernel.
const NORM_ROWS: usize = 64;

impl Attention<'_> {
    /// Bound on the magnitude of the logits, `[segments][heads]`; `None` when nothing is pruned.
    pub(super) fn logit_bounds(&self, layout: &Layout) -> Result<Option<Buffer<f32>>> {
        let Acp::On { bound, .. } = &self.spec.acp else { return Ok(None) };
        if self.inputs.log_gates.is_none() {
            return Ok(None);
        }
        if let LogitBound::QkNorm { .. } = bound {
            return Err(Error::argument(
                "attention",
                "the bound from QK-norm weights is not available on this path; use norms",
            ));
        }
        let (heads, kv_heads) = (self.spec.heads, self.spec.kv_heads);
        let segments = self.spec.segments.len();
        let q_largest = self.largest_norms(layout, self.inputs.q.address(), true)?;
        let k_largest = self.largest_norms(layout, self.inputs.k.address(), false)?;
        let bounds = self.gpu.alloc::<f32>(segments * heads)?;
        let kernel = self.gpu.kernel(Source::ATTENTION_PLAN, &[], "bounds_from_norms")?;
        let count = segments * heads;
        let (at, q_at, k_at) = (bounds.address(), q_largest.address(), k_largest.address());
        let (heads, kv_heads, count32) = (int(heads), int(kv_heads), int(count));
        let launch = kernel.launch([count.div_ceil(256) as u32, 1, 1], 256).arg(&at).arg(&q_at);
        let launch = launch.arg(&k_at).arg(&count32).arg(&heads).arg(&kv_heads);
        // SAFETY: parameters as declared in attention_plan.cu; sizes as allocated here.
        unsafe { launch.arg(&self.spec.scale).run(|| self.shapes())? };
        Ok(Some(bounds))
    }

    fn largest_norms(&self, layout: &Layout, x: u64, queries: bool) -> Result<Buffer<u32>> {
        let (heads, longest) = if queries {
            (self.spec.heads, layout.longest_q)
        } else {
            (self.spec.kv_heads, layout.longest_k)
        };
        let segments = self.spec.segments.len();
        let largest = self.gpu.zeros::<u32>(segments * heads)?;
        let kernel = self.gpu.kernel(Source::ATTENTION_PLAN, &[], "largest_norms")?;
        let grid = [longest.div_ceil(NORM_ROWS) as u32, heads as u32, segments as u32];
        let (at, segments_at) = (largest.address(), layout.segments.address());
        let (queries, heads, head_dim) = (i32::from(queries), int(heads), int(self.spec.head_dim));
        let launch = kernel.launch(grid, 4 * NORM_ROWS as u32).arg(&at).arg(&x).arg(&segments_at);
        // SAFETY: parameters as declared in attention_plan.cu; rows by the layout.
        unsafe { launch.arg(&queries).arg(&heads).arg(&head_dim).run(|| self.shapes())? };
        Ok(largest)
    }

    pub(super) fn plan_params(
        &self,
        layout: &Layout,
        gates: Option<&Buffer<f32>>,
        bounds: Option<&Buffer<f32>>,
        block_m: usize,
        block_n: usize,
    ) -> PlanParams {
        let log_tolerance = match self.spec.acp {
            Acp::On { log_tolerance, .. } => log_tolerance,
            Acp::Off => 0.0,
        };
        PlanParams {
            segments: layout.segments.address(),
            m_tiles: layout.m_tiles.address(),
            gates: gates.map_or(0, Buffer::address),
            bounds: bounds.map_or(0, Buffer::address),
            m_tile_count: int(layout.m_tile_count),
            heads: int(self.spec.heads),
            kv_heads: int(self.spec.kv_heads),
            gate_stride: int(layout.gate_stride),
            block_m: int(block_m),
            block_n: int(block_n),
            mask: self.mask_code(),
            window: self.window(),
            log_tolerance,
            unused: 0,
        }
    }
}
