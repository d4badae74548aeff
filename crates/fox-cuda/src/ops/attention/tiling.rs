//! Device tables of segments: query tiles, key tiles and gate chunks.

use std::sync::Arc;

use fox_tensor::{Mask, Segments};

use super::Attention;
use super::backward::BackwardPlan;
use super::forward::ForwardPlan;
use super::spans::Span;
use super::tiles::TileConfig;
use crate::lru::LruCache;
use crate::params::{self, Param, kernel_params};
use crate::{Buffer, Error, Float, Gpu, Result};

/// Positions per block of the gate scans; the kernels' `CHUNK`.
pub(super) const CHUNK: usize = 256;
/// Alignment of a segment's gate prefixes.
pub(in crate::ops) const GATE_ALIGN: usize = 128;
/// Padding after the last segment's gate prefixes: key blocks overrun by less than this.
const GATE_GUARD: usize = 256;

kernel_params! {
    /// A segment with derived offsets.
    pub(crate) table struct Segment {
        q_start: usize,
        q_len: usize,
        k_start: usize,
        k_len: usize,
        /// First padded position of the gate prefixes.
        c_base: usize,
        /// Index of its first query tile.
        m_tile0: usize,
        /// Index of its first key tile.
        n_tile0: usize,
        unused: usize,
    }

    /// A query or key tile: segment and index within it.
    pub(crate) table struct BlockRef {
        segment: usize,
        block: usize,
    }

    /// A chunk of positions of a segment.
    pub(super) table struct ChunkRef {
        segment: usize,
        chunk: usize,
        /// Index of the segment's first chunk.
        first: usize,
        /// Chunks of the segment.
        count: usize,
    }
}

/// Tables for one set of segments and one pair of tile sizes.
pub(crate) struct Tiling {
    pub(in crate::ops) segments: Buffer<<Segment as Param>::Device>,
    pub(in crate::ops) m_tiles: Buffer<<BlockRef as Param>::Device>,
    pub(in crate::ops) m_tile_count: usize,
    /// Last keys of each segment first: the schedule of the Hopper backward.
    pub(in crate::ops) n_tiles: Buffer<<BlockRef as Param>::Device>,
    pub(in crate::ops) n_tile_count: usize,
    pub(super) chunks: Buffer<<ChunkRef as Param>::Device>,
    pub(super) chunk_count: usize,
    pub(in crate::ops) gate_stride: usize,
    pub(super) longest_q: usize,
    pub(in crate::ops) longest_k: usize,
    /// Rows covered by segments.
    pub(super) q_covered: usize,
    pub(super) k_covered: usize,
    pub(super) forward_plans: LruCache<PlanKey, ForwardPlan>,
    pub(super) backward_plans: LruCache<PlanKey, BackwardPlan>,
}

impl Tiling {
    fn new(gpu: &Gpu, segments: &Segments, block_m: usize, block_n: usize) -> Result<Self> {
        let (mut table, mut m_tiles, mut n_tiles, mut chunks) = (vec![], vec![], vec![], vec![]);
        let mut gate_stride = 0;
        let (mut longest_q, mut longest_k, mut q_covered, mut k_covered) = (1, 1, 0, 0);
        for (segment, s) in segments.as_slice().iter().enumerate() {
            let (m_count, n_count) = (s.q_len.div_ceil(block_m), s.k_len.div_ceil(block_n));
            table.push(Segment {
                q_start: s.q_start,
                q_len: s.q_len,
                k_start: s.k_start,
                k_len: s.k_len,
                c_base: gate_stride,
                m_tile0: m_tiles.len(),
                n_tile0: n_tiles.len(),
                unused: 0,
            });
            m_tiles.extend((0..m_count).map(|block| BlockRef { segment, block }));
            n_tiles.extend((0..n_count).rev().map(|block| BlockRef { segment, block }));
            let (first, count) = (chunks.len(), s.k_len.div_ceil(CHUNK));
            chunks.extend((0..count).map(|chunk| ChunkRef { segment, chunk, first, count }));
            gate_stride += s.k_len.next_multiple_of(GATE_ALIGN);
            longest_q = longest_q.max(s.q_len);
            longest_k = longest_k.max(s.k_len);
            q_covered += s.q_len;
            k_covered += s.k_len;
        }
        gate_stride += GATE_GUARD;
        if gate_stride > i32::MAX as usize / 2 {
            return Err(Error::argument(
                "attention",
                format!("{gate_stride} positions exceed the limit of one call; split the batch"),
            ));
        }
        Ok(Tiling {
            segments: gpu.upload(&params::rows("attention's segments", &table)?)?,
            m_tile_count: m_tiles.len(),
            m_tiles: gpu.upload(&params::rows("attention's tiles of queries", &m_tiles)?)?,
            n_tile_count: n_tiles.len(),
            n_tiles: gpu.upload(&params::rows("attention's tiles of keys", &n_tiles)?)?,
            chunk_count: chunks.len(),
            chunks: gpu.upload(&params::rows("attention's chunks of gates", &chunks)?)?,
            gate_stride,
            longest_q,
            longest_k,
            q_covered,
            k_covered,
            forward_plans: LruCache::default(),
            backward_plans: LruCache::default(),
        })
    }
}

/// Tables of the Hopper backward for queries that see all keys of their span.
pub(super) struct SpanTables {
    pub(super) segments: Buffer<<Segment as Param>::Device>,
    /// Longest spans first, and the last keys of each.
    pub(super) n_tiles: Buffer<<BlockRef as Param>::Device>,
    pub(super) n_tile_count: usize,
    /// Tiles of queries `begin, end` of each tile of keys `[heads][n_tiles]`.
    pub(super) ranges: Buffer<i32>,
}

impl SpanTables {
    pub(super) fn new(gpu: &Gpu, spans: &[Span], heads: usize, tile: &TileConfig) -> Result<Self> {
        let (mut segments, mut n_tiles, mut ranges) = (vec![], vec![], vec![]);
        for (segment, span) in spans.iter().enumerate() {
            let n_count = span.keys / tile.block_n;
            segments.push(Segment {
                q_start: span.row,
                // The kernel knows the position of the first query as `k_len - q_len`: after all keys.
                q_len: 0,
                k_start: span.k_row,
                k_len: span.keys,
                c_base: span.gates,
                m_tile0: span.row / tile.block_m,
                n_tile0: n_tiles.len(),
                unused: 0,
            });
            n_tiles.extend((0..n_count).rev().map(|block| BlockRef { segment, block }));
            let end = params::int("attention's spans", "rows", span.rows.div_ceil(tile.block_m))?;
            ranges.extend([0, end].repeat(n_count));
        }
        Ok(SpanTables {
            segments: gpu.upload(&params::rows("attention's spans", &segments)?)?,
            n_tile_count: n_tiles.len(),
            n_tiles: gpu.upload(&params::rows("attention's tiles of spans", &n_tiles)?)?,
            ranges: gpu.upload(&ranges.repeat(heads))?,
        })
    }
}

/// Inputs of a plan without pruning besides the tiling.
#[derive(Clone, PartialEq)]
pub(super) struct PlanKey {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    mask: Mask,
    window: Option<usize>,
}

impl<T: Float> Attention<'_, T> {
    pub(in crate::ops) fn tiling(&self, tile: &TileConfig) -> Result<Arc<Tiling>> {
        let segments = &self.spec.segments;
        self.gpu.attention.tilings.get((segments.clone(), tile.block_m, tile.block_n), || {
            Tiling::new(self.gpu, segments, tile.block_m, tile.block_n)
        })
    }

    pub(super) fn plan_key(&self) -> PlanKey {
        PlanKey {
            heads: self.spec.heads,
            kv_heads: self.spec.kv_heads,
            head_dim: self.spec.head_dim,
            mask: self.spec.mask,
            window: self.spec.window,
        }
    }
}
