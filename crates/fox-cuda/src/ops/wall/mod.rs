//! Wall attention; see `wall.cuh`. `tensors` implements the op trait.

mod spans;
mod tensors;

use std::sync::Arc;

use fox_tensor::{Acp, WALL_BLOCK};

use super::attention::tiles::{TileConfig, padded_head_dim, portable_column_splits};
use super::attention::tiling::{BlockRef, Segment, Tiling};
use super::attention::{self, Attention, BackwardPlan};
use super::path::PathTable;
use super::path::spans::span_sizes;
use super::path::table::{ONE_SPAN, PathSpan, PathTile, SpanSizes};
use crate::params::{ConstPtr, Float2, Float4, Int2, Ptr, Real, kernel_params};
use crate::source::source;
use crate::{Buffer, Float, Generation, Result, Source};

const FORWARD: Source =
    source!("wall", ["wall.cuh"], [Segment, BlockRef, PathTile, PathSpan, WallParams]);
const BACKWARD: Source =
    source!("wall_bwd", ["wall.cuh"], [Segment, BlockRef, PathTile, PathSpan, WallParams]);
const SPANS: Source =
    source!("wall_spans", ["wall.cuh"], [Segment, BlockRef, PathTile, PathSpan, WallParams]);

/// Threads of the kernels over tiles, and of those over rows.
const THREADS: usize = 128;
const WARP: usize = 32;

kernel_params! {
    #[derive(Default)]
    struct WallParams {
        /// `[R, H * d]`, like `d_out`, `o`, `x`, `far` and `dq`.
        q: ConstPtr<Real>,
        /// `[R, H_kv * d]`, like `v`, `dk` and `dv`.
        k: ConstPtr<Real>,
        v: ConstPtr<Real>,
        d_out: ConstPtr<Real>,
        o: Ptr<Real>,
        /// Queries decayed to the start of their block.
        x: Ptr<Real>,
        /// Keys of every query head decayed to the end of their block.
        far: Ptr<Real>,
        dq: Ptr<Real>,
        dk: Ptr<Real>,
        dv: Ptr<Real>,
        /// `[R, H * d]`, like `e`, `dx`, `dfar` and `dlog_decays`.
        log_decays: ConstPtr<f32>,
        e: Ptr<f32>,
        dx: Ptr<f32>,
        dfar: Ptr<f32>,
        dlog_decays: Ptr<f32>,
        /// Products of the decays of every block `[tiles][H * d]`.
        decay: Ptr<f32>,
        /// Sums of later gradients of the summed log decays `[tiles][H * d]`.
        totals: Ptr<f64>,
        /// Scores inside blocks, and their gradients, `[H][tiles][64][64]`.
        own: Ptr<f32>,
        down: Ptr<f32>,
        /// `[R, H]`, like `delta`.
        lse: Ptr<f32>,
        delta: Ptr<f32>,
        /// Visited and visible tiles `[H][2]`.
        blocks: Ptr<u64>,
        /// `[H][gate_stride]`.
        gates: ConstPtr<Float2>,
        column_sums: Ptr<f32>,
        /// `[H][tiles][64]`.
        row_sums: Ptr<f32>,
        segments: ConstPtr<Segment>,
        tiles: ConstPtr<BlockRef>,
        /// Blocks of keys `begin, end` of each block of queries `[H][tiles]`; null without pruning.
        spans: ConstPtr<Int2>,
        /// Blocks of each segment that are closed; null without.
        closed: ConstPtr<i32>,
        /// Tiles of 64 rows, and spans older than some.
        older_tiles: ConstPtr<PathTile>,
        older_spans: ConstPtr<PathSpan>,
        /// Keys at the end of their span and their values, `[levels, R, H * d]`; values are null with one level.
        kl: Ptr<Real>,
        vl: Ptr<Real>,
        /// Virtual queries `[virtual_tiles * 64, H * d]`, like their outputs and the gradients of these, null in the
        /// forward; statistics `[virtual_tiles * 64, H]`.
        xs: Ptr<Real>,
        os: ConstPtr<Real>,
        ds: Ptr<Real>,
        lses: ConstPtr<f32>,
        /// Gate prefix hi and lo, delta, log2(e) lse of virtual queries `[H][virtual_tiles * 64]`.
        rows: Ptr<Float4>,
        /// From the backward of forgetting attention: gradients of virtual queries in the order of accumulators, of keys
        /// and values `[levels, R, H * d]`, all without the scale, and column sums `[levels][H][gate_stride]`.
        dq_tiles: ConstPtr<f32>,
        dkl: ConstPtr<Real>,
        dvl: ConstPtr<Real>,
        columns_older: ConstPtr<f32>,
        /// Gradients of `x`, `far` and the summed log decays from pairs of different spans `[R, H * d]`, or null.
        dx_older: Ptr<f32>,
        dfar_older: Ptr<f32>,
        difference_older: Ptr<f32>,
        /// Blocks of the smallest spans, and of those of each level; levels with spans, and all rows.
        span_blocks: usize,
        sizes: SpanSizes,
        levels: usize,
        all_rows: usize,
        virtual_tiles: usize,
        tile_count: usize,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        gate_stride: usize,
        window: usize,
        scale: f32,
    }
}

/// Typical variants, for compilation checks.
pub(super) fn variants() -> Vec<(Source, Vec<String>)> {
    let kinds = [(64, false), (128, false), (256, false), (64, true), (256, true)];
    let of = |(head_dim, wide)| {
        [FORWARD, BACKWARD].into_iter().flat_map(move |source| {
            [true, false].map(|gates| (source, tile(source, head_dim, gates, wide).defines))
        })
    };
    kinds.into_iter().flat_map(of).collect()
}

/// The kernels over spans, which GPUs with wgmma use in bf16.
pub(super) fn span_variants(generation: Generation) -> Vec<(Source, Vec<String>)> {
    let of =
        |head_dim| [true, false].map(|gates| (SPANS, tile(SPANS, head_dim, gates, false).defines));
    [64, 128].into_iter().filter(|_| generation.has_wgmma()).flat_map(of).collect()
}

/// Launch configuration of either direction: as in stick-breaking attention, and a factor per channel.
fn tile(source: Source, head_dim: usize, gates: bool, wide: bool) -> TileConfig {
    let head_dim = padded_head_dim(head_dim);
    let (rows, size, prefixes) = if wide { (8, 4, 2) } else { (64 * (head_dim + 8), 2, 1) };
    let shared = (4 * rows + 2 * 64 * 72) * size + ((prefixes + 4) * 64 + head_dim) * 4 + 16;
    let defines = vec![
        format!("HEAD_DIM={head_dim}"),
        format!("WIDE={}", i32::from(wide)),
        format!("GATES={}", i32::from(gates)),
        format!("SHARED_BYTES={shared}"),
    ];
    TileConfig {
        source,
        block_m: WALL_BLOCK,
        block_n: WALL_BLOCK,
        threads: THREADS,
        shared,
        defines,
    }
}

/// Buffers of [`WallParams`] that both directions need.
struct Prepared<T> {
    x: Buffer<T>,
    far: Buffer<T>,
    e: Buffer<f32>,
    decay: Buffer<f32>,
    own: Buffer<f32>,
    gates: Option<Buffer<f32>>,
    plan: Option<Arc<BackwardPlan>>,
    /// Blocks and spans, where there is more than one span.
    table: Option<Arc<PathTable>>,
}

/// Gradients in buffers.
struct Gradients<T> {
    attention: attention::AttentionGrads<T>,
    dlog_decays: Buffer<f32>,
}

/// Closed blocks before the keys of each segment: how many, and keys and products of them in the rows and tiles of the
/// call.
struct Past {
    closed: Buffer<i32>,
    blocks: Vec<PastBlock>,
}

/// Addresses of one closed block, and where it goes.
struct PastBlock {
    far: u64,
    decay: u64,
    row: usize,
    tile: usize,
}

/// A call on rows that queries and keys share.
struct Wall<'a, T> {
    attention: Attention<'a, T>,
    log_decays: &'a Buffer<f32>,
    past: Option<Past>,
}

impl<T: Float> Wall<'_, T> {
    fn tile(&self, source: Source) -> TileConfig {
        let Attention { spec, inputs, .. } = &self.attention;
        tile(source, spec.head_dim, inputs.log_gates.is_some(), T::WIDE)
    }

    /// Launches a kernel with `shared` bytes of dynamic shared memory.
    fn run(
        &self,
        (source, entry): (Source, &str),
        grid: [usize; 3],
        (threads, shared): (usize, usize),
        params: WallParams,
    ) -> Result<()> {
        let kernel = self.attention.gpu.kernel(source, &self.tile(source).defines, entry)?;
        let launch = kernel.launch(grid, threads).shared(shared);
        // SAFETY: `Attention::new` checked the operands; all other buffers are allocated for this tiling.
        unsafe { launch.params(params)?.run(|| self.attention.shapes()) }
    }

    /// Decays queries and keys to the borders of their blocks, and computes the scores inside blocks.
    fn prepare(&self, tiling: &Tiling) -> Result<(Prepared<T>, WallParams)> {
        let Attention { gpu, spec, inputs, .. } = &self.attention;
        let (heads, tiles, len) = (spec.heads, tiling.m_tile_count, inputs.q.len());
        let width = heads * spec.head_dim;
        let gates = self.attention.gate_prefix(tiling)?;
        let plan = match (&spec.acp, &gates) {
            (Acp::On { .. }, Some(gates)) => {
                let tile = self.tile(FORWARD);
                Some(self.attention.plan_backward(tiling, &tile, Some(gates))?)
            }
            _ => None,
        };
        // With grouped heads, query heads share values but not keys.
        let refused = plan.is_some() || self.past.is_some() || heads != spec.kv_heads;
        let sizes = span_sizes(&self.attention, refused);
        let span_blocks = sizes[0];
        let table = || {
            gpu.attention
                .paths
                .get((spec.segments.clone(), sizes), || PathTable::new(gpu, &spec.segments, sizes))
        };
        let table = (span_blocks != ONE_SPAN).then(table).transpose()?;
        let held = Prepared {
            x: gpu.alloc::<T>(len)?,
            far: gpu.alloc::<T>(len)?,
            e: gpu.alloc::<f32>(len)?,
            decay: gpu.alloc::<f32>(tiles * width)?,
            own: gpu.alloc::<f32>(heads * tiles * WALL_BLOCK * WALL_BLOCK)?,
            gates,
            plan,
            table,
        };
        let params = WallParams {
            q: inputs.q.address().into(),
            k: inputs.k.address().into(),
            v: inputs.v.address().into(),
            log_decays: self.log_decays.address().into(),
            x: held.x.address().into(),
            far: held.far.address().into(),
            e: held.e.address().into(),
            decay: held.decay.address().into(),
            own: held.own.address().into(),
            gates: held.gates.as_ref().map_or(0, Buffer::address).into(),
            segments: tiling.segments.address().into(),
            tiles: tiling.m_tiles.address().into(),
            spans: held.plan.as_ref().map_or(0, |plan| plan.spans.address()).into(),
            closed: self.past.as_ref().map_or(0, |past| past.closed.address()).into(),
            older_tiles: held.table.as_ref().map_or(0, |table| table.tiles.address()).into(),
            older_spans: held.table.as_ref().map_or(0, |table| table.span_table.address()).into(),
            span_blocks,
            sizes,
            levels: held.table.as_ref().map_or(0, |table| table.levels()),
            all_rows: len / width,
            virtual_tiles: held.table.as_ref().map_or(0, |table| table.virtual_tiles()),
            tile_count: tiles,
            heads,
            kv_heads: spec.kv_heads,
            head_dim: spec.head_dim,
            gate_stride: tiling.gate_stride,
            window: self.attention.window(),
            scale: spec.scale,
            ..WallParams::default()
        };
        for block in self.past.iter().flat_map(|past| &past.blocks) {
            let size = size_of::<T>();
            let (far, bytes) = (held.far.address(), WALL_BLOCK * width * size);
            let decay = held.decay.address() + (block.tile * width * 4) as u64;
            // SAFETY: a closed block has these rows by the checks of the op, and its place is inside the buffers.
            unsafe {
                gpu.copy(far + (block.row * width * size) as u64, block.far, bytes)?;
                gpu.copy(decay, block.decay, width * 4)?;
            }
        }
        let grid = [tiles, heads, 1];
        self.run((FORWARD, "wall_prepare"), grid, (THREADS, 0), params)?;
        self.run((FORWARD, "wall_own_scores"), grid, (THREADS, 0), params)?;
        Ok((held, params))
    }

    fn forward(&self) -> Result<attention::AttentionOut<T>> {
        let heads = self.attention.spec.heads;
        let tiling = self.attention.tiling(&self.tile(FORWARD))?;
        let (o, lse) = self.attention.alloc_cleared_output(&tiling)?;
        let blocks = Arc::new(self.attention.gpu.zeros::<i32>(4 * heads)?);
        if tiling.m_tile_count > 0 {
            let (held, params) = self.prepare(&tiling)?;
            let params = WallParams {
                o: o.address().into(),
                lse: lse.address().into(),
                blocks: blocks.address().into(),
                ..params
            };
            let tiled = (THREADS, self.tile(FORWARD).shared);
            self.run((FORWARD, "wall_fwd"), [tiling.m_tile_count, heads, 1], tiled, params)?;
            self.spans_forward(&tiling, &held, params)?;
        }
        Ok(attention::AttentionOut { o, lse, tiles: blocks })
    }

    fn backward(
        &self,
        o: &Buffer<T>,
        lse: &Buffer<f32>,
        d_out: &Buffer<T>,
    ) -> Result<Gradients<T>> {
        let Attention { gpu, spec, inputs, .. } = &self.attention;
        let config = self.tile(BACKWARD);
        let tiling = self.attention.tiling(&config)?;
        let grads = self.attention.alloc_cleared_gradients(&tiling, d_out)?;
        let dlog_decays = gpu.zeros::<f32>(self.log_decays.len())?;
        let (tiles, heads, kv_heads) = (tiling.m_tile_count, spec.heads, spec.kv_heads);
        if tiles == 0 {
            return Ok(Gradients { attention: grads, dlog_decays });
        }
        let (len, d) = (inputs.q.len(), spec.head_dim);
        let rows = len / (heads * d);
        // Rows outside of all segments are summed over heads, too.
        let (dx, dfar) = (gpu.alloc::<f32>(len)?, gpu.zeros::<f32>(len)?);
        let down = gpu.alloc::<f32>(heads * tiles * WALL_BLOCK * WALL_BLOCK)?;
        let (delta, totals) =
            (gpu.alloc::<f32>(rows * heads)?, gpu.alloc::<f64>(tiles * heads * d)?);
        let column_sums = gpu.alloc::<f32>(heads * tiling.gate_stride)?;
        let row_sums = gpu.alloc::<f32>(heads * tiles * WALL_BLOCK)?;
        let (held, params) = self.prepare(&tiling)?;
        let params = WallParams {
            o: o.address().into(),
            lse: lse.address().into(),
            d_out: d_out.address().into(),
            dq: grads.dq.address().into(),
            dk: grads.dk.address().into(),
            dv: grads.dv.address().into(),
            dx: dx.address().into(),
            dfar: dfar.address().into(),
            dlog_decays: dlog_decays.address().into(),
            totals: totals.address().into(),
            down: down.address().into(),
            delta: delta.address().into(),
            column_sums: column_sums.address().into(),
            row_sums: row_sums.address().into(),
            ..params
        };
        let run = |entry, grid, size| self.run((BACKWARD, entry), grid, size, params);
        let (over_queries, tiled, rows_of) =
            ([tiles, heads, 1], (THREADS, config.shared), (WARP, 0));
        let row_blocks = rows.div_ceil(THREADS / WARP);
        run("wall_delta", [row_blocks, heads, 1], (THREADS, 0))?;
        run("wall_bwd_keys", [tiles, kv_heads, portable_column_splits(d)], tiled)?;
        run("wall_bwd_queries", over_queries, tiled)?;
        let older = self.spans_backward(&tiling, &held, params)?;
        let params = older.as_ref().map_or(params, |older| older.params);
        let run = |entry, grid, size| self.run((BACKWARD, entry), grid, size, params);
        run("wall_finish", [tiles, heads, d.div_ceil(WARP)], (THREADS, 0))?;
        run("wall_sum_heads", [row_blocks, kv_heads, 1], (THREADS, 0))?;
        run("wall_decay_totals", over_queries, (THREADS, 0))?;
        run("wall_decay_scan", [spec.segments.len(), heads, d.div_ceil(WARP)], rows_of)?;
        run("wall_decay_gradient", over_queries, (THREADS, 0))?;
        let sums = (&column_sums, &row_sums);
        let gates = grads.dlog_gates.as_ref();
        self.attention.gate_gradient_of_rows(&tiling, &config, sums, gates)?;
        Ok(Gradients { attention: grads, dlog_decays })
    }
}
