//! Attention backward: row statistics, plan, main kernel, dQ to rows, gate gradient.

use std::sync::Arc;

use super::gates::GradientInputs;
use super::layout::Layout;
use super::tensor_map::TensorMap;
use super::tiles::{self, Tile};
use super::{Attention, int};
use crate::{Buffer, Error, Float, KernelArg, Result, Source};

/// Result of the backward.
#[derive(Debug)]
pub struct AttentionGrads<T> {
    /// `[R_q, H * d]`.
    pub dq: Buffer<T>,
    /// `[R_k, H_kv * d]`.
    pub dk: Buffer<T>,
    /// `[R_k, H_kv * d]`.
    pub dv: Buffer<T>,
    /// `[R_k, H]`; present when there are gates.
    pub dlog_gates: Option<Buffer<f32>>,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct BackwardParams {
    dk: u64,
    dv: u64,
    column_sums: u64,
    dq: u64,
    semaphores: u64,
    gates: u64,
    rows: u64,
    segments: u64,
    n_tiles: u64,
    ranges: u64,
    spans: u64,
    next_tile: u64,
    n_tile_count: i32,
    m_tile_count: i32,
    heads: i32,
    kv_heads: i32,
    group_heads: i32,
    turned_heads: i32,
    head_dim: i32,
    gate_stride: i32,
    window: i32,
    scale: f32,
    scale_log2: f32,
}

// SAFETY: mirrors the struct of the same name in attention_bwd_sm90.cu.
unsafe impl KernelArg for BackwardParams {}

/// What the blocks see of each other.
pub(super) struct BackwardPlan {
    /// Blocks of keys that a block of queries sees, from and to, `[heads][m_tiles][2]`.
    pub(super) spans: Buffer<i32>,
    /// Blocks of queries that see a block of keys, from and to, `[heads][n_tiles][2]`; causal only.
    ranges: Buffer<i32>,
}

/// The Hopper kernel sums dS over each eighth of a tile of queries.
const SUMS: usize = 8;

/// Floats of dQ of a tile of the Hopper kernel: two pieces of 64 x 64, each with the sums of dS of its four
/// warps.
fn dq_floats() -> usize {
    2 * (64 * 64 + 4 * SUMS)
}

impl<T: Float> Attention<'_, T> {
    /// Gradients of [`forward`](Attention::forward) from its result and the gradient of its output,
    /// `[R_q, H * d]`.
    pub fn backward(
        &self,
        o: &Buffer<T>,
        lse: &Buffer<f32>,
        d_out: &Buffer<T>,
    ) -> Result<AttentionGrads<T>> {
        let hopper = tiles::hopper_backward(self.spec.head_dim, self.features());
        let hopper = hopper.filter(|_| self.hopper());
        let tile = match &hopper {
            _ if T::WIDE => tiles::single(self.spec.head_dim, false),
            Some(tile) => tile.clone(),
            None => tiles::portable_backward(self.spec.head_dim, self.features()),
        };
        let layout = self.layout(&tile)?;
        let grads = self.start_gradients(&layout, d_out)?;
        if layout.m_tile_count == 0 {
            return Ok(grads);
        }
        if T::WIDE {
            self.backward_single(&layout, &tile, (o, lse), d_out, &grads)?;
        } else if hopper.is_some() {
            self.backward_hopper(&layout, &tile, (o, lse), d_out, &grads)?;
        } else {
            self.backward_portable(&layout, &tile, (o, lse), d_out, &grads)?;
        }
        Ok(grads)
    }

    /// Memory of the gradients; what no query reaches has its zeros.
    pub(super) fn start_gradients(
        &self,
        layout: &Layout,
        d_out: &Buffer<T>,
    ) -> Result<AttentionGrads<T>> {
        if d_out.len() != self.inputs.q.len() {
            return Err(Error::argument(
                "attention_bwd",
                format!("d_out has {} elements, q {}", d_out.len(), self.inputs.q.len()),
            ));
        }
        let grads = AttentionGrads {
            dq: self.gpu.alloc(self.inputs.q.len())?,
            dk: self.gpu.alloc(self.inputs.k.len())?,
            dv: self.gpu.alloc(self.inputs.v.len())?,
            dlog_gates: match self.inputs.log_gates {
                Some(g) => Some(self.gpu.alloc(g.len())?),
                None => None,
            },
        };
        self.clear_uncovered(layout, &grads)?;
        Ok(grads)
    }

    /// Rows outside every segment, and keys without queries, have gradient zero.
    fn clear_uncovered(&self, layout: &Layout, grads: &AttentionGrads<T>) -> Result<()> {
        if layout.q_covered < self.q_rows {
            self.gpu.zero(&grads.dq)?;
        }
        if layout.k_covered < self.k_rows || layout.m_tile_count == 0 {
            self.gpu.zero(&grads.dk)?;
            self.gpu.zero(&grads.dv)?;
            if let Some(dlog_gates) = &grads.dlog_gates {
                self.gpu.zero(dlog_gates)?;
            }
        }
        Ok(())
    }

    fn backward_hopper(
        &self,
        layout: &Layout,
        tile: &Tile,
        (o, lse): (&Buffer<T>, &Buffer<f32>),
        d_out: &Buffer<T>,
        grads: &AttentionGrads<T>,
    ) -> Result<()> {
        let (heads, kv_heads) = (self.spec.heads, self.spec.kv_heads);
        let head_dim = self.spec.head_dim;
        let gates = self.gate_prefix(layout)?;
        let rows = self.backward_rows(layout, tile, (o, lse), d_out, gates.as_ref())?;
        let plan = self.plan_backward(layout, tile, gates.as_ref())?;
        let m_tiles = heads * layout.m_tile_count;
        let dq = self.gpu.alloc::<f32>(m_tiles * dq_floats())?;
        let column_sums = self.gpu.alloc::<f32>(heads * layout.gate_stride)?;
        // The tile counter and the semaphores are cleared by one memset.
        let counters = self.gpu.zeros::<i32>(32 + 2 * m_tiles)?;
        // Q, dO and the f32 dQ of a head's queries are read again and again.
        let group_heads = self.heads_per_group(layout.longest_q * (heads / kv_heads), 8 * head_dim);
        // Enough heads to fill the GPU twice, turned round: see the kernel.
        let turned_heads =
            (2 * self.gpu.processors() as usize).div_ceil(layout.n_tile_count).min(kv_heads / 2);
        let params = BackwardParams {
            dk: grads.dk.address(),
            dv: grads.dv.address(),
            column_sums: column_sums.address(),
            dq: dq.address(),
            semaphores: counters.address() + 4 * 32,
            gates: gates.as_ref().map_or(0, Buffer::address),
            rows: rows.address(),
            segments: layout.segments.address(),
            n_tiles: layout.n_tiles.address(),
            ranges: plan.ranges.address(),
            spans: plan.spans.address(),
            next_tile: counters.address(),
            n_tile_count: int(layout.n_tile_count),
            m_tile_count: int(layout.m_tile_count),
            heads: int(heads),
            kv_heads: int(kv_heads),
            group_heads: int(group_heads),
            turned_heads: int(turned_heads),
            head_dim: int(head_dim),
            gate_stride: int(layout.gate_stride),
            window: self.window(),
            scale: self.spec.scale,
            scale_log2: self.scale_log2(),
        };
        let q = TensorMap::new(self.inputs.q, heads, head_dim, tile.block_m)?;
        let k = TensorMap::new(self.inputs.k, kv_heads, head_dim, tile.block_n)?;
        let v = TensorMap::new(self.inputs.v, kv_heads, head_dim, tile.block_n)?;
        let d = TensorMap::new(d_out, heads, head_dim, tile.block_m)?;
        let kernel = self.gpu.kernel(tile.source, &tile.defines, "attention_bwd")?;
        let work = layout.n_tile_count * kv_heads;
        let blocks = (self.gpu.processors() as usize).min(work) as u32;
        let launch = kernel.launch([blocks, 1, 1], tile.threads).shared(tile.shared);
        let launch = launch.arg(&q).arg(&k).arg(&v).arg(&d).arg(&params);
        // SAFETY: parameters as declared in the kernel; `new` and `backward` checked the sizes of
        // the operands, scratch is allocated here by the same formulas.
        unsafe { launch.run(|| self.shapes())? };
        let row_sums = self.finish_dq(layout, tile, &dq, grads)?;
        if let Some(dlog_gates) = &grads.dlog_gates {
            let inputs = GradientInputs {
                column_sums: column_sums.address(),
                row_sums: row_sums.address(),
                gate_stride: int(layout.gate_stride),
                m_tile_count: int(layout.m_tile_count),
                block_m: int(tile.block_m),
                rows_per_sum: int(tile.block_m / SUMS),
            };
            self.gate_gradient(layout, &inputs, dlog_gates)?;
        }
        Ok(())
    }

    pub(super) fn backward_rows(
        &self,
        layout: &Layout,
        tile: &Tile,
        (o, lse): (&Buffer<T>, &Buffer<f32>),
        d_out: &Buffer<T>,
        gates: Option<&Buffer<f32>>,
    ) -> Result<Buffer<f32>> {
        let heads = self.spec.heads;
        let rows = self.gpu.alloc::<f32>(4 * heads * layout.m_tile_count * tile.block_m)?;
        let kernel =
            self.gpu.kernel(Source::ATTENTION_ROWS, &self.type_defines(), "backward_rows")?;
        let grid = [layout.m_tile_count as u32, heads as u32, 1];
        let (at, o_at, d_at) = (rows.address(), o.address(), d_out.address());
        let (lse_at, gates_at) = (lse.address(), gates.map_or(0, Buffer::address));
        let (segments_at, m_tiles_at) = (layout.segments.address(), layout.m_tiles.address());
        let (heads, head_dim) = (int(heads), int(self.spec.head_dim));
        let stride = int(layout.gate_stride);
        let launch = kernel.launch(grid, 4 * tile.block_m as u32).arg(&at).arg(&o_at).arg(&d_at);
        let launch = launch.arg(&lse_at).arg(&gates_at).arg(&segments_at).arg(&m_tiles_at);
        // SAFETY: parameters as declared in attention_rows.cu; sizes by the layout.
        unsafe { launch.arg(&heads).arg(&head_dim).arg(&stride).run(|| self.shapes())? };
        Ok(rows)
    }

    pub(super) fn plan_backward(
        &self,
        layout: &Layout,
        tile: &Tile,
        gates: Option<&Buffer<f32>>,
    ) -> Result<Arc<BackwardPlan>> {
        let bounds = self.logit_bounds(layout)?;
        if bounds.is_some() {
            return Ok(Arc::new(self.make_backward_plan(layout, tile, gates, bounds.as_ref())?));
        }
        // Without pruning the plan depends on shapes alone.
        layout
            .backward_plans
            .get(self.plan_key(), || self.make_backward_plan(layout, tile, gates, None))
    }

    fn make_backward_plan(
        &self,
        layout: &Layout,
        tile: &Tile,
        gates: Option<&Buffer<f32>>,
        bounds: Option<&Buffer<f32>>,
    ) -> Result<BackwardPlan> {
        let heads = self.spec.heads;
        let params = self.plan_params(layout, gates, bounds, tile.block_m, tile.block_n);
        let spans = self.gpu.alloc::<i32>(2 * heads * layout.m_tile_count)?;
        let ranges = self.gpu.alloc::<i32>(2 * heads * layout.n_tile_count)?;
        let (spans_at, ranges_at) = (spans.address(), ranges.address());
        let (n_tiles_at, n_count) = (layout.n_tiles.address(), int(layout.n_tile_count));
        let kernel =
            self.gpu.kernel(Source::ATTENTION_PLAN, &self.type_defines(), "plan_backward_spans")?;
        let grid = [(heads * layout.m_tile_count).div_ceil(128) as u32, 1, 1];
        // SAFETY: parameters as declared in attention_plan.cu; sizes as allocated here.
        unsafe {
            kernel.launch(grid, 128).arg(&params).arg(&spans_at).run(|| self.shapes())?;
        }
        let kernel = self.gpu.kernel(
            Source::ATTENTION_PLAN,
            &self.type_defines(),
            "plan_backward_ranges",
        )?;
        let grid = [(heads * layout.n_tile_count).div_ceil(128) as u32, 1, 1];
        let launch = kernel.launch(grid, 128).arg(&params).arg(&spans_at).arg(&n_tiles_at);
        // SAFETY: as above.
        unsafe { launch.arg(&n_count).arg(&ranges_at).run(|| self.shapes())? };
        Ok(BackwardPlan { spans, ranges })
    }

    /// dQ to rows; returns the sums of dS over each eighth of a tile.
    fn finish_dq(
        &self,
        layout: &Layout,
        tile: &Tile,
        scratch: &Buffer<f32>,
        grads: &AttentionGrads<T>,
    ) -> Result<Buffer<f32>> {
        let heads = self.spec.heads;
        let sums = heads * layout.m_tile_count * SUMS;
        let row_sums = self.gpu.alloc::<f32>(sums)?;
        let kernel = self.gpu.kernel(Source::ATTENTION_ROWS, &self.type_defines(), "finish_dq")?;
        let grid = [layout.m_tile_count as u32, heads as u32, 1];
        let (dq_at, sums_at, scratch_at) =
            (grads.dq.address(), row_sums.address(), scratch.address());
        let (segments_at, m_tiles_at) = (layout.segments.address(), layout.m_tiles.address());
        let (heads, head_dim) = (int(heads), int(self.spec.head_dim));
        let block_m = int(tile.block_m);
        let launch = kernel.launch(grid, 256).arg(&dq_at).arg(&sums_at).arg(&scratch_at);
        let launch = launch.arg(&segments_at).arg(&m_tiles_at).arg(&heads).arg(&head_dim);
        // SAFETY: parameters as declared in attention_rows.cu; sizes by the layout.
        unsafe { launch.arg(&block_m).arg(&self.spec.scale).run(|| self.shapes())? };
        Ok(row_sums)
    }
}
