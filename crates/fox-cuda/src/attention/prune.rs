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

/// What the kernel of the norms is told; mirrors the kernel's struct.
#[repr(C)]
#[derive(Clone, Copy)]
struct NormParams {
    bounds: u64,
    largest: u64,
    q: u64,
    k: u64,
    segments: u64,
    heads: i32,
    kv_heads: i32,
    head_dim: i32,
    scale: f32,
}

// SAFETY: mirrors the struct of the same name in attention_plan.cu.
unsafe impl KernelArg for NormParams {}

/// Rows per block of that kernel.
const NORM_ROWS: usize = 256;

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
        self.bounds_from_norms(layout).map(Some)
    }

    /// `[segments][heads]` from the largest norms of queries and keys.
    fn bounds_from_norms(&self, layout: &Layout) -> Result<Buffer<f32>> {
        let (heads, kv_heads) = (self.spec.heads, self.spec.kv_heads);
        let segments = self.spec.segments.len();
        let bounds = self.gpu.alloc::<f32>(segments * heads)?;
        let largest = self.gpu.zeros::<u32>(segments * (heads + kv_heads) + 1)?;
        let params = NormParams {
            bounds: bounds.address(),
            largest: largest.address(),
            q: self.inputs.q.address(),
            k: self.inputs.k.address(),
            segments: layout.segments.address(),
            heads: int(heads),
            kv_heads: int(kv_heads),
            head_dim: int(self.spec.head_dim),
            scale: self.spec.scale,
        };
        let kernel =
            self.gpu.kernel(Source::ATTENTION_PLAN, &self.type_defines(), "logit_bounds")?;
        let rows = layout.longest_q.max(layout.longest_k);
        let grid = [(heads + kv_heads) as u32, rows.div_ceil(NORM_ROWS) as u32, segments as u32];
        // SAFETY: parameters as declared in attention_plan.cu; rows by the layout.
        unsafe { kernel.launch(grid, 256).arg(&params).run(|| self.shapes())? };
        Ok(bounds)
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
