//! Attention forward: gate prefixes, tile plan, main kernel.

use std::sync::Arc;

use half::bf16;

use super::Attention;
use super::launch_cache::TileKey;
use super::plan::PlanParams;
use super::spans::Span;
use super::tensor_map::TensorMap;
use super::tiles::{Features, TileConfig};
use super::tiling::{BlockRef, Segment, Tiling};
use crate::params::{self, ConstPtr, Float2, Param, Ptr, kernel_params};
use crate::source::source;
use crate::{Buffer, Error, Float, Gpu, Result, Source};

pub(super) const FORWARD: Source = source!(
    "attention_fwd",
    ["softmax.cuh"],
    [Segment, BlockRef, ForwardTile, PortableOperands, ForwardParams]
);
pub(super) const FORWARD_SM90: Source = source!(
    "attention_fwd_sm90",
    ["softmax.cuh", "forward_half_blocks.cuh", "forward_full_blocks.cuh"],
    [Segment, BlockRef, ForwardTile, ForwardParams]
);

/// Result of the forward.
#[derive(Debug)]
pub struct AttentionOut<T> {
    /// Output `[R_q, H * d]`; zero for rows outside every segment.
    pub o: Buffer<T>,
    /// Natural log of the softmax denominator `[R_q, H]`; `-inf` for rows outside every segment.
    pub lse: Buffer<f32>,
    /// Tiles visited and tiles allowed by the mask, per head: `[H, 2]` as little-endian 64-bit integers.
    pub tiles: Arc<Buffer<i32>>,
}

kernel_params! {
    /// Work description of one tile of queries of one head, written by `plan_forward`.
    #[allow(dead_code)] // only kernels read the fields
    pub(super) table struct ForwardTile align(16) {
        /// Negative: end of the list.
        head: i32,
        kv_head: i32,
        /// First row in the tensor, and number of rows that are not padding.
        q_row: i32,
        q_valid: i32,
        /// Position of the first row relative to the segment's first key.
        position: i32,
        k_row: i32,
        k_len: i32,
        c_base: i32,
        /// Range of key tiles to visit.
        n_begin: i32,
        n_end: i32,
        unused: [i32; 2],
    }

    /// Counting sort of the tiles by length.
    pub(super) struct SortParams {
        /// `[heads * m_tiles]`.
        keys: Ptr<i32>,
        /// `[groups * bins]`, zeroed.
        histogram: Ptr<i32>,
        /// `[heads * m_tiles]`.
        order: Ptr<i32>,
        bins: usize,
        group_heads: usize,
        longest: usize,
    }

    pub(super) list struct PlanForward {
        p: PlanParams,
        sort: SortParams,
        /// `[heads * m_tiles]`.
        tiles: Ptr<ForwardTile>,
        /// Visited tiles and tiles allowed by the mask `[heads][2]`.
        blocks: Ptr<u64>,
    }

    pub(super) list struct PlanScan {
        histogram: Ptr<i32>,
        count: usize,
    }

    pub(super) list struct PlanScatter {
        sort: SortParams,
        count: usize,
    }

    struct ForwardParams {
        /// `[R_q, H * d]`.
        o: Ptr<bf16>,
        /// `[R_q, H]`.
        lse: Ptr<f32>,
        /// `[heads][gate_stride]`.
        gates: ConstPtr<Float2>,
        tiles: ConstPtr<ForwardTile>,
        order: ConstPtr<i32>,
        /// Counter of the persistent grid; Hopper only.
        next_tile: Ptr<i32>,
        tile_count: usize,
        heads: usize,
        head_dim: usize,
        gate_stride: usize,
        window: usize,
        /// Softmax scale times log2(e).
        scale: f32,
    }

    /// Operands of the portable kernel, which uses no tensor maps.
    struct PortableOperands {
        /// `[R_q, H * d]`.
        q: ConstPtr<bf16>,
        /// `[R_k, H_kv * d]`, like `v`.
        k: ConstPtr<bf16>,
        v: ConstPtr<bf16>,
        kv_heads: usize,
    }
}

/// Bins of the counting sort of tile lengths.
const SORT_BINS: usize = 256;

/// Tiles of the forward and the order in which they run.
pub(super) struct ForwardPlan {
    tiles: Buffer<<ForwardTile as Param>::Device>,
    order: Buffer<i32>,
    blocks: Arc<Buffer<i32>>,
    count: usize,
}

impl ForwardPlan {
    /// Tiles of queries that see all keys of their span, for `heads` heads in groups of `group`.
    pub(super) fn of_spans(
        gpu: &Gpu,
        spans: &[Span],
        (heads, group): (usize, usize),
        tile: &TileConfig,
    ) -> Result<Self> {
        let int = |x: usize| params::int("attention's tiles of spans", "position", x);
        let mut tiles = Vec::new();
        for head in 0..heads {
            for span in spans {
                for start in (0..span.rows).step_by(tile.block_m) {
                    tiles.push(ForwardTile {
                        head: int(head)?,
                        kv_head: int(head / group)?,
                        q_row: int(span.row + start)?,
                        q_valid: int(tile.block_m.min(span.rows - start))?,
                        // After all keys. The kernel reads no gates there, but those of the last key.
                        position: int(span.keys)?,
                        k_row: int(span.k_row)?,
                        k_len: int(span.keys)?,
                        c_base: int(span.gates)?,
                        n_begin: 0,
                        n_end: int(span.keys.div_ceil(tile.block_n))?,
                        unused: [0; 2],
                    });
                }
            }
        }
        let order = (0..tiles.len()).map(int).collect::<Result<Vec<_>>>()?;
        Ok(ForwardPlan {
            tiles: gpu.upload(&params::rows("attention's tiles of spans", &tiles)?)?,
            order: gpu.upload(&order)?,
            blocks: Arc::new(gpu.zeros(4 * heads)?),
            count: tiles.len(),
        })
    }
}

impl<T: Float> Attention<'_, T> {
    /// Softmax attention with forget gates.
    pub fn forward(&self) -> Result<AttentionOut<T>> {
        let (o, lse) = self.alloc_output()?;
        self.forward_into(o, lse)
    }

    /// [`forward`](Attention::forward) into existing buffers: `o` `[R_q, H * d]` and `lse` `[R_q, H]`.
    pub fn forward_into(&self, o: Buffer<T>, lse: Buffer<f32>) -> Result<AttentionOut<T>> {
        let fits = o.len() == self.inputs.q.len() && lse.len() == self.q_rows * self.spec.heads;
        if !fits || !self.gpu.owns(&o) || !self.gpu.owns(&lse) {
            let detail = format!("{} and {} elements for o and lse", o.len(), lse.len());
            return Err(Error::argument("attention", detail));
        }
        let key = self.tile_key(true);
        let tile = self.tile(key)?;
        let tiling = self.tiling(&tile)?;
        self.clear_uncovered_output(&tiling, &o, &lse)?;
        if tiling.m_tile_count == 0 {
            let blocks = Arc::new(self.gpu.zeros(4 * self.spec.heads)?);
            return Ok(AttentionOut { o, lse, tiles: blocks });
        }
        let gates = self.gate_prefix(&tiling)?;
        let plan = self.plan(&tiling, &tiling.forward_plans, |bounds| {
            self.make_forward_plan(&tiling, &tile, gates.as_ref(), bounds)
        })?;
        if T::WIDE {
            self.forward_f32(&tiling, (key, &tile), gates.as_ref(), &o, &lse)?;
        } else {
            self.forward_bf16(&tiling, (key, &tile), &plan, gates.as_ref(), (&o, &lse))?;
        }
        Ok(AttentionOut { o, lse, tiles: Arc::clone(&plan.blocks) })
    }

    pub(super) fn forward_bf16(
        &self,
        tiling: &Tiling,
        (key, tile): (TileKey, &TileConfig),
        plan: &ForwardPlan,
        gates: Option<&Buffer<f32>>,
        (o, lse): (&Buffer<T>, &Buffer<f32>),
    ) -> Result<()> {
        let (heads, kv_heads, head_dim) = (self.spec.heads, self.spec.kv_heads, self.spec.head_dim);
        let next_tile = self.zeros(1)?;
        let params = ForwardParams {
            o: o.address().into(),
            lse: lse.address().into(),
            gates: gates.map_or(0, Buffer::address).into(),
            tiles: plan.tiles.address().into(),
            order: plan.order.address().into(),
            next_tile: next_tile.address().into(),
            tile_count: plan.count,
            heads,
            head_dim,
            gate_stride: tiling.gate_stride,
            window: self.window(),
            scale: self.scale_log2(),
        };
        let kernel = self.main_kernel(key, tile, "attention_fwd")?;
        if self.uses_wgmma() {
            let blocks = (self.gpu.processors() as usize).min(plan.count);
            let q = TensorMap::new(self.inputs.q, heads, head_dim, tile.block_m)?;
            let k = TensorMap::new(self.inputs.k, kv_heads, head_dim, tile.block_n)?;
            let v = TensorMap::new(self.inputs.v, kv_heads, head_dim, tile.block_n)?;
            let launch = kernel.launch([blocks, 1, 1], tile.threads).shared(tile.shared);
            let launch = launch.opaque(q).opaque(k).opaque(v).params(params)?;
            // SAFETY: `new` checked the operands and that segments are in bounds; the plan's tiles lie in segments.
            return unsafe { launch.run(|| self.shapes()) };
        }
        let operands = PortableOperands {
            q: self.inputs.q.address().into(),
            k: self.inputs.k.address().into(),
            v: self.inputs.v.address().into(),
            kv_heads,
        };
        let launch = kernel.launch([plan.count, 1, 1], tile.threads).shared(tile.shared);
        // SAFETY: as above.
        unsafe { launch.params(operands)?.params(params)?.run(|| self.shapes()) }
    }

    /// Buffers for output and row statistics, initialized for rows outside every segment.
    pub(in crate::ops) fn alloc_cleared_output(
        &self,
        tiling: &Tiling,
    ) -> Result<(Buffer<T>, Buffer<f32>)> {
        let (o, lse) = self.alloc_output()?;
        self.clear_uncovered_output(tiling, &o, &lse)?;
        Ok((o, lse))
    }

    fn alloc_output(&self) -> Result<(Buffer<T>, Buffer<f32>)> {
        let o = self.gpu.alloc::<T>(self.inputs.q.len())?;
        Ok((o, self.gpu.alloc::<f32>(self.q_rows * self.spec.heads)?))
    }

    fn clear_uncovered_output(
        &self,
        tiling: &Tiling,
        o: &Buffer<T>,
        lse: &Buffer<f32>,
    ) -> Result<()> {
        if tiling.q_covered < self.q_rows {
            self.gpu.zero(o)?;
            self.fill_minus_infinity(lse)?;
        }
        Ok(())
    }

    pub(super) fn features(&self) -> Features {
        Features {
            gates: self.inputs.log_gates.is_some(),
            mask: self.spec.mask,
            window: self.spec.window.is_some(),
        }
    }

    /// Number of key heads to process together, such that their keys and values (`bytes_per_row` per position and head)
    /// fit half of the L2 cache.
    pub(super) fn heads_per_group(&self, rows: usize, bytes_per_row: usize) -> usize {
        let budget = self.gpu.l2_bytes() / 2;
        (budget / (rows * bytes_per_row).max(1)).clamp(1, self.spec.kv_heads)
    }

    fn make_forward_plan(
        &self,
        tiling: &Tiling,
        tile: &TileConfig,
        gates: Option<&Buffer<f32>>,
        bounds: Option<&Buffer<f32>>,
    ) -> Result<ForwardPlan> {
        let heads = self.spec.heads;
        let count = heads * tiling.m_tile_count;
        let group_heads = self.heads_per_group(tiling.longest_k, 4 * self.spec.head_dim);
        let bins = self.spec.kv_heads.div_ceil(group_heads) * SORT_BINS;
        let tiles = self.gpu.alloc(count)?;
        let keys = self.gpu.alloc::<i32>(count)?;
        let order = self.gpu.alloc::<i32>(count)?;
        let blocks = self.gpu.zeros::<i32>(4 * heads)?;
        let histogram = self.zeros(bins)?;
        let sort = SortParams {
            keys: keys.address().into(),
            histogram: histogram.address().into(),
            order: order.address().into(),
            bins: SORT_BINS,
            group_heads,
            longest: tiling.longest_k.div_ceil(tile.block_n),
        };
        let params = PlanForward {
            p: self.plan_params(tiling, tile, gates, bounds),
            sort,
            tiles: Buffer::address(&tiles).into(),
            blocks: blocks.address().into(),
        };
        let grid = [count.div_ceil(128), 1, 1];
        self.run_plan("plan_forward", grid, 128, params)?;
        let scan = PlanScan { histogram: sort.histogram, count: bins };
        self.run_plan("plan_scan", [1, 1, 1], 1024, scan)?;
        self.run_plan("plan_scatter", grid, 128, PlanScatter { sort, count })?;
        Ok(ForwardPlan { tiles, order, blocks: Arc::new(blocks), count })
    }
}
