//! Segments as the kernels want them: lists of blocks of queries, blocks of keys and chunks of gates.

use std::sync::{Arc, Mutex, PoisonError};

use fox_tensor::{Mask, Segments};

use super::backward::BackwardPlan;
use super::forward::ForwardPlan;
use super::tiles::Tile;
use super::{Attention, int};
use crate::{Buffer, Error, Float, Gpu, Result};

/// Positions per block of the gate scans; the kernels' `CHUNK`.
pub(super) const CHUNK: usize = 256;
/// Alignment of a segment's gate prefixes.
const GATE_ALIGN: usize = 128;
/// Blocks of keys may reach beyond the last segment's prefixes by less than this.
const GATE_GUARD: usize = 256;

/// Lists for one set of segments and one pair of block sizes.
pub(crate) struct Layout {
    pub(super) segments: Buffer<i32>,
    pub(super) m_tiles: Buffer<i32>,
    pub(super) m_tile_count: usize,
    /// Last keys of each segment first: the order of work of the backward, see its kernel.
    pub(super) n_tiles: Buffer<i32>,
    pub(super) n_tile_count: usize,
    pub(super) chunks: Buffer<i32>,
    pub(super) chunk_count: usize,
    pub(super) gate_stride: usize,
    pub(super) longest_q: usize,
    pub(super) longest_k: usize,
    /// Rows that belong to some segment.
    pub(super) q_covered: usize,
    pub(super) k_covered: usize,
    pub(super) forward_plans: Recent<PlanKey, ForwardPlan>,
    pub(super) backward_plans: Recent<PlanKey, BackwardPlan>,
}

impl Layout {
    fn new(gpu: &Gpu, segments: &Segments, block_m: usize, block_n: usize) -> Result<Self> {
        let (mut table, mut m_tiles, mut n_tiles, mut chunks) = (vec![], vec![], vec![], vec![]);
        let mut gate_stride = 0;
        let (mut longest_q, mut longest_k, mut q_covered, mut k_covered) = (1, 1, 0, 0);
        for (index, s) in segments.as_slice().iter().enumerate() {
            let (m_count, n_count) = (s.q_len.div_ceil(block_m), s.k_len.div_ceil(block_n));
            table.extend([s.q_start, s.q_len, s.k_start, s.k_len, gate_stride].map(int));
            table.extend([int(m_tiles.len() / 2), int(n_tiles.len() / 2), 0]);
            m_tiles.extend((0..m_count).flat_map(|m| [int(index), int(m)]));
            n_tiles.extend((0..n_count).rev().flat_map(|n| [int(index), int(n)]));
            let (first, count) = (chunks.len() / 4, s.k_len.div_ceil(CHUNK));
            chunks.extend((0..count).flat_map(|c| [index, c, first, count].map(int)));
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
                format!("{gate_stride} positions in one call are too many"),
            ));
        }
        Ok(Layout {
            segments: gpu.upload(&table)?,
            m_tile_count: m_tiles.len() / 2,
            m_tiles: gpu.upload(&m_tiles)?,
            n_tile_count: n_tiles.len() / 2,
            n_tiles: gpu.upload(&n_tiles)?,
            chunk_count: chunks.len() / 4,
            chunks: gpu.upload(&chunks)?,
            gate_stride,
            longest_q,
            longest_k,
            q_covered,
            k_covered,
            forward_plans: Recent::default(),
            backward_plans: Recent::default(),
        })
    }
}

/// What a plan without pruning depends on besides the layout.
#[derive(Clone, PartialEq)]
pub(super) struct PlanKey {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) mask: Mask,
    pub(super) window: Option<usize>,
}

/// The values used last: a training run asks for the same ones at every step.
pub(crate) struct Recent<K, V>(Mutex<Vec<(K, Arc<V>)>>);

impl<K, V> Default for Recent<K, V> {
    fn default() -> Self {
        Recent(Mutex::default())
    }
}

impl<K: PartialEq, V> Recent<K, V> {
    const CAPACITY: usize = 64;

    pub(crate) fn get(&self, key: K, make: impl FnOnce() -> Result<V>) -> Result<Arc<V>> {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = match entries.iter().rposition(|(k, _)| *k == key) {
            Some(found) => entries.remove(found),
            None => (key, Arc::new(make()?)),
        };
        let value = Arc::clone(&entry.1);
        entries.push(entry);
        if entries.len() > Self::CAPACITY {
            entries.remove(0);
        }
        Ok(value)
    }

    pub(crate) fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// Layouts by segments and block sizes.
pub(crate) type LayoutCache = Recent<(Segments, usize, usize), Layout>;

impl<T: Float> Attention<'_, T> {
    pub(super) fn layout(&self, tile: &Tile) -> Result<Arc<Layout>> {
        let segments = &self.spec.segments;
        self.gpu.layouts.get((segments.clone(), tile.block_m, tile.block_n), || {
            Layout::new(self.gpu, segments, tile.block_m, tile.block_n)
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
