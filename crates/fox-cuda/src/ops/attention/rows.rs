//! Row passes of the backward: statistics before the main kernel, conversion of dQ after it.

use fox_tensor::Mask;
use half::bf16;

use super::Attention;
use super::tiles::{TileConfig, padded_head_dim};
use super::tiling::{BlockRef, Segment, Tiling};
use crate::params::{ConstPtr, Float2, Float4, KernelParams, Ptr, Real, kernel_params};
use crate::source::source;
use crate::{Buffer, Float, Result, Source};

const ROWS: Source =
    source!("attention_rows", [], [Segment, BlockRef, BackwardRows, FinishDq, FillRows]);

kernel_params! {
    list struct BackwardRows {
        /// Gate prefix hi, lo, delta, log2(e) lse, `[heads][m_tiles * block_m]`.
        rows: Ptr<Float4>,
        /// [`COUNTER_INTS`] and semaphores `[heads][m_tiles][parts]`, or null.
        counters: Ptr<i32>,
        /// `[R_q, H * d]`.
        o: ConstPtr<Real>,
        /// `[R_q, H * d]`.
        d_out: ConstPtr<Real>,
        /// `[R_q, H]`.
        lse: ConstPtr<f32>,
        /// `[heads][gate_stride]`, or null.
        gates: ConstPtr<Float2>,
        segments: ConstPtr<Segment>,
        m_tiles: ConstPtr<BlockRef>,
        parts: usize,
        heads: usize,
        head_dim: usize,
        gate_stride: usize,
    }

    list struct FinishDq {
        /// `[R_q, H * d]`.
        dq: Ptr<bf16>,
        /// `[heads][m_tiles][SUMS]`, or `[heads][m_tiles * block_m]`.
        row_sums: Ptr<f32>,
        /// `[heads][m_tiles]` tiles of [`dq_scratch_len`].
        scratch: ConstPtr<f32>,
        segments: ConstPtr<Segment>,
        m_tiles: ConstPtr<BlockRef>,
        heads: usize,
        head_dim: usize,
        block_m: usize,
        sum_per_query: bool,
        scale: f32,
    }

    list struct FillRows {
        x: Ptr<f32>,
        value: f32,
        count: usize,
    }
}

/// Sums of dS per query tile of the Hopper kernel.
pub(super) const SUMS: usize = 8;

/// Parts of 64 x 64 into which the Hopper kernel divides dQ of a query tile: two halves, or 64 columns each of wide
/// heads.
pub(super) fn dq_parts(head_dim: usize) -> usize {
    if head_dim > 128 { padded_head_dim(head_dim) / 64 } else { 2 }
}

/// Floats of dQ scratch per query tile of the Hopper kernel: [`dq_parts`], each with the sums of dS of four warps, or
/// of its queries where the mask is bidirectional.
pub(super) fn dq_scratch_len(head_dim: usize, mask: Mask) -> usize {
    let sums = match mask {
        Mask::Causal => 4 * SUMS,
        Mask::Bidirectional => 64,
    };
    dq_parts(head_dim) * (64 * 64 + sums)
}

/// Integers before the semaphores of the Hopper kernel: the first counts tiles, the others keep it apart.
pub(super) const COUNTER_INTS: usize = 32;

/// All variants, for compilation checks.
pub(super) fn variants() -> Vec<(Source, Vec<String>)> {
    [0, 1].map(|wide| (ROWS, vec![format!("WIDE={wide}")])).into()
}

impl<T: Float> Attention<'_, T> {
    /// Row statistics `[heads][m_tiles * block_m][4]`: gate prefix hi and lo, delta, log2(e) lse. Zeroes `counters`,
    /// those of the Hopper kernel for this tiling: a memset would be another launch.
    pub(super) fn backward_rows(
        &self,
        tiling: &Tiling,
        tile: &TileConfig,
        (o, lse): (&Buffer<T>, &Buffer<f32>),
        d_out: &Buffer<T>,
        gates: Option<&Buffer<f32>>,
        counters: Option<&Buffer<i32>>,
    ) -> Result<Buffer<f32>> {
        let heads = self.spec.heads;
        let rows = self.gpu.alloc::<f32>(4 * heads * tiling.m_tile_count * tile.block_m)?;
        let params = BackwardRows {
            rows: rows.address().into(),
            counters: counters.map_or(0, Buffer::address).into(),
            o: o.address().into(),
            d_out: d_out.address().into(),
            lse: lse.address().into(),
            gates: gates.map_or(0, Buffer::address).into(),
            segments: tiling.segments.address().into(),
            m_tiles: tiling.m_tiles.address().into(),
            parts: dq_parts(self.spec.head_dim),
            heads,
            head_dim: self.spec.head_dim,
            gate_stride: tiling.gate_stride,
        };
        let grid = [tiling.m_tile_count, heads, 1];
        self.run_rows("backward_rows", grid, 4 * tile.block_m, params)?;
        Ok(rows)
    }

    /// Converts dQ from accumulator order to rows; returns the sums of dS over each eighth of a tile, or per query where
    /// the mask is bidirectional.
    pub(super) fn finish_dq(
        &self,
        tiling: &Tiling,
        tile: &TileConfig,
        scratch: &Buffer<f32>,
        dq: &Buffer<T>,
    ) -> Result<Buffer<f32>> {
        let heads = self.spec.heads;
        let sum_per_query = self.spec.mask == Mask::Bidirectional;
        let sums = if sum_per_query { tile.block_m } else { SUMS };
        let row_sums = self.gpu.alloc::<f32>(heads * tiling.m_tile_count * sums)?;
        let params = FinishDq {
            dq: dq.address().into(),
            row_sums: row_sums.address().into(),
            scratch: scratch.address().into(),
            segments: tiling.segments.address().into(),
            m_tiles: tiling.m_tiles.address().into(),
            heads,
            head_dim: self.spec.head_dim,
            block_m: tile.block_m,
            sum_per_query,
            scale: self.spec.scale,
        };
        let block = 128 * dq_parts(self.spec.head_dim);
        self.run_rows("finish_dq", [tiling.m_tile_count, heads, 1], block, params)?;
        Ok(row_sums)
    }

    pub(super) fn fill_minus_infinity(&self, x: &Buffer<f32>) -> Result<()> {
        let count = x.len();
        let params = FillRows { x: x.address().into(), value: f32::NEG_INFINITY, count };
        self.run_rows("fill", [count.div_ceil(256), 1, 1], 256, params)
    }

    fn run_rows<P: KernelParams>(
        &self,
        entry: &'static str,
        grid: [usize; 3],
        block: usize,
        params: P,
    ) -> Result<()> {
        self.launch_helper(ROWS, entry, grid, block, params)
    }
}
