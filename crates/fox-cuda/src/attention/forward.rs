//! Attention forward: prefix, plan, main kernel.

use std::sync::Arc;

use super::layout::Layout;
use super::tensor_map::TensorMap;
use super::tiles::{self, Features, Tile};
use super::{Attention, int};
use crate::{Buffer, Float, KernelArg, Result, Source};

/// Result of the forward.
#[derive(Debug)]
pub struct AttentionOut<T> {
    /// Output `[R_q, H * d]`; zero for rows outside every segment.
    pub o: Buffer<T>,
    /// Natural log of the softmax denominator `[R_q, H]`; `-inf` for rows outside every segment.
    pub lse: Buffer<f32>,
    /// Blocks visited, and blocks the mask alone would leave, per head: `[H, 2]`.
    pub blocks: Arc<Buffer<i32>>,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct SortParams {
    keys: u64,
    histogram: u64,
    order: u64,
    bins: i32,
    group_heads: i32,
    longest: i32,
    unused: i32,
}

// SAFETY: mirrors the struct of the same name in attention_plan.cu.
unsafe impl KernelArg for SortParams {}

#[repr(C)]
#[derive(Clone, Copy)]
struct ForwardParams {
    o: u64,
    lse: u64,
    gates: u64,
    tiles: u64,
    order: u64,
    next_tile: u64,
    tile_count: i32,
    heads: i32,
    head_dim: i32,
    gate_stride: i32,
    window: i32,
    scale: f32,
}

// SAFETY: mirrors the struct of the same name in the forward kernels.
unsafe impl KernelArg for ForwardParams {}

/// What the portable kernel reads without tensor maps.
#[repr(C)]
#[derive(Clone, Copy)]
struct Operands {
    q: u64,
    k: u64,
    v: u64,
    kv_heads: i32,
    unused: i32,
}

// SAFETY: mirrors the struct of the same name in attention_fwd.cu.
unsafe impl KernelArg for Operands {}

/// Lengths are sorted to this precision: enough to start the longest first.
const SORT_BINS: usize = 256;
/// Ints of the kernel's `ForwardTile`.
const TILE_INTS: usize = 12;

/// Tiles of the forward and their order.
pub(super) struct ForwardPlan {
    tiles: Buffer<i32>,
    order: Buffer<i32>,
    blocks: Arc<Buffer<i32>>,
    count: usize,
}

impl<T: Float> Attention<'_, T> {
    /// Softmax attention with forget gates.
    pub fn forward(&self) -> Result<AttentionOut<T>> {
        let tile = self.forward_tile();
        let layout = self.layout(&tile)?;
        let (heads, head_dim) = (self.spec.heads, self.spec.head_dim);
        let (o, lse) = self.start_output(&layout)?;
        if layout.m_tile_count == 0 {
            let blocks = Arc::new(self.gpu.zeros(2 * heads)?);
            return Ok(AttentionOut { o, lse, blocks });
        }
        let gates = self.gate_prefix(&layout)?;
        let plan = self.plan_forward(&layout, &tile, gates.as_ref())?;
        let next_tile = self.gpu.zeros::<i32>(1)?;
        let params = ForwardParams {
            o: o.address(),
            lse: lse.address(),
            gates: gates.as_ref().map_or(0, Buffer::address),
            tiles: plan.tiles.address(),
            order: plan.order.address(),
            next_tile: next_tile.address(),
            tile_count: int(plan.count),
            heads: int(heads),
            head_dim: int(head_dim),
            gate_stride: int(layout.gate_stride),
            window: self.window(),
            scale: self.scale_log2(),
        };
        if T::WIDE {
            self.forward_single(&layout, &tile, gates.as_ref(), &o, &lse)?;
            return Ok(AttentionOut { o, lse, blocks: Arc::clone(&plan.blocks) });
        }
        let kernel = self.gpu.kernel(tile.source, &tile.defines, "attention_fwd")?;
        let kv_heads = self.spec.kv_heads;
        if self.hopper() {
            let blocks = (self.gpu.processors() as usize).min(plan.count) as u32;
            let q = TensorMap::new(self.inputs.q, heads, head_dim, tile.block_m)?;
            let k = TensorMap::new(self.inputs.k, kv_heads, head_dim, tile.block_n)?;
            let v = TensorMap::new(self.inputs.v, kv_heads, head_dim, tile.block_n)?;
            let launch = kernel.launch([blocks, 1, 1], tile.threads).shared(tile.shared);
            let launch = launch.arg(&q).arg(&k).arg(&v).arg(&params);
            // SAFETY: parameters as declared in the kernel; `new` checked the sizes of the operands,
            // and the plan's tiles stay inside the segments.
            unsafe { launch.run(|| self.shapes())? };
        } else {
            let operands = Operands {
                q: self.inputs.q.address(),
                k: self.inputs.k.address(),
                v: self.inputs.v.address(),
                kv_heads: int(kv_heads),
                unused: 0,
            };
            let launch = kernel.launch([plan.count as u32, 1, 1], tile.threads).shared(tile.shared);
            // SAFETY: as above.
            unsafe { launch.arg(&operands).arg(&params).run(|| self.shapes())? };
        }
        Ok(AttentionOut { o, lse, blocks: Arc::clone(&plan.blocks) })
    }

    /// Memory of output and row statistics; rows outside every segment have theirs.
    pub(super) fn start_output(&self, layout: &Layout) -> Result<(Buffer<T>, Buffer<f32>)> {
        let o = self.gpu.alloc::<T>(self.inputs.q.len())?;
        let lse = self.gpu.alloc::<f32>(self.q_rows * self.spec.heads)?;
        if layout.q_covered < self.q_rows {
            self.gpu.zero(&o)?;
            self.fill_minus_infinity(&lse)?;
        }
        Ok((o, lse))
    }

    pub(super) fn features(&self) -> Features {
        Features {
            gates: self.inputs.log_gates.is_some(),
            mask: self.spec.mask,
            window: self.spec.window.is_some(),
        }
    }

    fn forward_tile(&self) -> Tile {
        if T::WIDE {
            return tiles::single(self.spec.head_dim, true);
        }
        let choose = if self.hopper() { tiles::hopper_forward } else { tiles::portable_forward };
        choose(self.spec.head_dim, self.features())
    }

    fn fill_minus_infinity(&self, x: &Buffer<f32>) -> Result<()> {
        let kernel = self.gpu.kernel(Source::ATTENTION_ROWS, &self.type_defines(), "fill")?;
        let (at, value, count) = (x.address(), f32::NEG_INFINITY, int(x.len()));
        let launch = kernel.launch([x.len().div_ceil(256) as u32, 1, 1], 256);
        // SAFETY: parameters as declared in attention_rows.cu; the buffer has `count` floats.
        unsafe { launch.arg(&at).arg(&value).arg(&count).run(|| self.shapes()) }
    }

    /// How many key heads to work on together, so that their keys and values (`bytes_per_row` per
    /// position and head) stay in half of the L2 cache.
    pub(super) fn heads_per_group(&self, rows: usize, bytes_per_row: usize) -> usize {
        let budget = self.gpu.l2_bytes() / 2;
        (budget / (rows * bytes_per_row).max(1)).clamp(1, self.spec.kv_heads)
    }

    fn plan_forward(
        &self,
        layout: &Layout,
        tile: &Tile,
        gates: Option<&Buffer<f32>>,
    ) -> Result<Arc<ForwardPlan>> {
        let bounds = self.logit_bounds(layout)?;
        if bounds.is_some() {
            return Ok(Arc::new(self.make_forward_plan(layout, tile, gates, bounds.as_ref())?));
        }
        // Without pruning the plan depends on shapes alone.
        layout
            .forward_plans
            .get(self.plan_key(), || self.make_forward_plan(layout, tile, gates, None))
    }

    fn make_forward_plan(
        &self,
        layout: &Layout,
        tile: &Tile,
        gates: Option<&Buffer<f32>>,
        bounds: Option<&Buffer<f32>>,
    ) -> Result<ForwardPlan> {
        let heads = self.spec.heads;
        let count = heads * layout.m_tile_count;
        let params = self.plan_params(layout, gates, bounds, tile.block_m, tile.block_n);
        let group_heads = self.heads_per_group(layout.longest_k, 4 * self.spec.head_dim);
        let bins = self.spec.kv_heads.div_ceil(group_heads) * SORT_BINS;
        let tiles = self.gpu.alloc::<i32>(count * TILE_INTS)?;
        let keys = self.gpu.alloc::<i32>(count)?;
        let order = self.gpu.alloc::<i32>(count)?;
        let blocks = self.gpu.zeros::<i32>(2 * heads)?;
        let histogram = self.gpu.zeros::<i32>(bins)?;
        let sort = SortParams {
            keys: keys.address(),
            histogram: histogram.address(),
            order: order.address(),
            bins: int(SORT_BINS),
            group_heads: int(group_heads),
            longest: int(layout.longest_k.div_ceil(tile.block_n)),
            unused: 0,
        };
        let (tiles_at, blocks_at) = (tiles.address(), blocks.address());
        let (bins, count32) = (int(bins), int(count));
        let grid = [count.div_ceil(128) as u32, 1, 1];
        let kernel =
            self.gpu.kernel(Source::ATTENTION_PLAN, &self.type_defines(), "plan_forward")?;
        let launch =
            kernel.launch(grid, 128).arg(&params).arg(&sort).arg(&tiles_at).arg(&blocks_at);
        // SAFETY: parameters as declared in attention_plan.cu; sizes as allocated here.
        unsafe { launch.run(|| self.shapes())? };
        let kernel = self.gpu.kernel(Source::ATTENTION_PLAN, &self.type_defines(), "plan_scan")?;
        let launch = kernel.launch([1, 1, 1], 1024).arg(&sort.histogram).arg(&bins);
        // SAFETY: as above.
        unsafe { launch.run(|| self.shapes())? };
        let kernel =
            self.gpu.kernel(Source::ATTENTION_PLAN, &self.type_defines(), "plan_scatter")?;
        let launch = kernel.launch(grid, 128).arg(&sort).arg(&count32);
        // SAFETY: as above.
        unsafe { launch.run(|| self.shapes())? };
        Ok(ForwardPlan { tiles, order, blocks: Arc::new(blocks), count })
    }
}
