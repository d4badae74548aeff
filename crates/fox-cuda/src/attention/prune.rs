//! Adaptive computation pruning: how large a logit can get, and what the plan kernels are told.

use fox_tensor::{Acp, LogitBound, Tensor};

use super::layout::Layout;
use super::{Attention, int};
use crate::backend::f32_buffer;
use crate::{Buffer, Float, KernelArg, Result, Source};

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

impl<T: Float> Attention<'_, T> {
    /// Bound on the magnitude of the logits, `[segments][heads]`; `None` when nothing is pruned.
    pub(super) fn logit_bounds(&self, layout: &Layout) -> Result<Option<Buffer<f32>>> {
        let Acp::On { bound, .. } = &self.spec.acp else { return Ok(None) };
        if self.inputs.log_gates.is_none() {
            return Ok(None);
        }
        if let LogitBound::QkNorm { q, k } = bound {
            return self.bounds_from_weights(q, k).map(Some);
        }
        let (heads, kv_heads) = (self.spec.heads, self.spec.kv_heads);
        let segments = self.spec.segments.len();
        let q_largest = self.largest_norms(layout, self.inputs.q.address(), true)?;
        let k_largest = self.largest_norms(layout, self.inputs.k.address(), false)?;
        let bounds = self.gpu.alloc::<f32>(segments * heads)?;
        let kernel =
            self.gpu.kernel(Source::ATTENTION_PLAN, &self.type_defines(), "bounds_from_norms")?;
        let count = segments * heads;
        let (at, q_at, k_at) = (bounds.address(), q_largest.address(), k_largest.address());
        let (heads, kv_heads, count32) = (int(heads), int(kv_heads), int(count));
        let launch = kernel.launch([count.div_ceil(256) as u32, 1, 1], 256).arg(&at).arg(&q_at);
        let launch = launch.arg(&k_at).arg(&count32).arg(&heads).arg(&kv_heads);
        // SAFETY: parameters as declared in attention_plan.cu; sizes as allocated here.
        unsafe { launch.arg(&self.spec.scale).run(|| self.shapes())? };
        Ok(Some(bounds))
    }

    /// `[segments][heads]` from the weights of the norms of queries and keys.
    fn bounds_from_weights(&self, q: &Tensor, k: &Tensor) -> Result<Buffer<f32>> {
        let (heads, segments) = (self.spec.heads, self.spec.segments.len());
        let bounds = self.gpu.alloc::<f32>(segments * heads)?;
        let (q_at, k_at) = (f32_buffer(q)?.address(), f32_buffer(k)?.address());
        let shared = |w: &Tensor| i32::from(w.len() == self.spec.head_dim);
        let defines = self.type_defines();
        let kernel = self.gpu.kernel(Source::ATTENTION_PLAN, &defines, "bounds_from_weights")?;
        let args = [
            bounds.address().into(),
            q_at.into(),
            k_at.into(),
            int(heads).into(),
            int(self.spec.kv_heads).into(),
            int(self.spec.head_dim).into(),
            shared(q).into(),
            shared(k).into(),
            self.spec.scale.into(),
        ];
        let launch = kernel.launch([heads as u32, segments as u32, 1], 32).args(&args);
        // SAFETY: parameters as declared in attention_plan.cu; the tape checked the weights' shapes.
        unsafe { launch.run(|| self.shapes())? };
        Ok(bounds)
    }

    fn largest_norms(&self, layout: &Layout, x: u64, queries: bool) -> Result<Buffer<u32>> {
        let (heads, longest) = if queries {
            (self.spec.heads, layout.longest_q)
        } else {
            (self.spec.kv_heads, layout.longest_k)
        };
        let segments = self.spec.segments.len();
        let largest = self.gpu.zeros::<u32>(segments * heads)?;
        let kernel =
            self.gpu.kernel(Source::ATTENTION_PLAN, &self.type_defines(), "largest_norms")?;
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
