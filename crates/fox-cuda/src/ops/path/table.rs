//! Device tables of PaTH attention: blocks of keys, and tiles of queries cut at the same positions.

use std::sync::Arc;

use fox_tensor::{PATH_BLOCK, Segments};

use crate::lru::LruCache;
use crate::ops::attention::Attention;
use crate::ops::attention::spans::{Span, SpanTiles};
use crate::ops::attention::tiling::GATE_ALIGN;
use crate::params::{self, Param, kernel_params};
use crate::{Buffer, Float, Gpu, Result};

kernel_params! {
    /// A block of up to 64 keys.
    pub(in crate::ops) table struct PathBlock {
        /// The first row, and number of rows.
        row: usize,
        rows: usize,
        /// Padded position of the first key in the gate prefixes.
        gates: usize,
        /// Number of the block in its segment.
        local: usize,
        /// Tiles of later queries.
        tile_begin: usize,
        tile_end: usize,
    }

    /// The queries at the positions of one block.
    pub(in crate::ops) table struct PathTile {
        /// The first row, and number of rows.
        row: usize,
        rows: usize,
        /// Position of the first query in its block.
        lane: usize,
        /// The block: its index in the table, and its number in the segment.
        block: usize,
        local: usize,
        /// Padded position of the segment's first key in the gate prefixes.
        gates: usize,
        segment: usize,
        /// Keys of the segment.
        keys: usize,
        /// Scratch tiles before those of this tile, which has one for each older block of its span.
        slots: usize,
        /// Index of the first query in row sums.
        sums: usize,
        /// Index of the segment's first span.
        spans: usize,
    }

    /// Blocks of keys with the virtual queries of later tiles.
    pub(in crate::ops) table struct PathSpan {
        /// The first block.
        block: usize,
        /// Padded position of the first key in the gate prefixes.
        pub(super) gates: usize,
        /// The first later tile of queries, and their number.
        tile0: usize,
        pub(super) tiles: usize,
        /// The first of its virtual tiles, an even number.
        pub(super) first: usize,
        /// Row of the first key.
        pub(super) row: usize,
    }
}

/// More blocks than a segment has: all of them are one span.
pub(in crate::ops) const ONE_SPAN: usize = 1 << 30;

/// Tables of one set of segments.
pub(crate) struct PathTable {
    pub(super) blocks: Buffer<<PathBlock as Param>::Device>,
    pub(super) block_count: usize,
    pub(in crate::ops) tiles: Buffer<<PathTile as Param>::Device>,
    /// Per tile, its first scratch tile; then their number.
    pub(super) slots: Vec<usize>,
    pub(super) span_blocks: usize,
    /// Spans with later queries, on both sides.
    pub(in crate::ops) spans: Vec<PathSpan>,
    pub(in crate::ops) span_table: Buffer<<PathSpan as Param>::Device>,
    /// By heads, key heads and head dim.
    tables: LruCache<[usize; 3], SpanTiles>,
}

impl PathTable {
    pub(in crate::ops) fn new(gpu: &Gpu, segments: &Segments, span_blocks: usize) -> Result<Self> {
        let Cut { blocks, tiles, slots, spans } = cut(segments, span_blocks);
        Ok(PathTable {
            block_count: blocks.len(),
            blocks: gpu.upload(&params::rows("PaTH's blocks of keys", &blocks)?)?,
            tiles: gpu.upload(&params::rows("PaTH's tiles of queries", &tiles)?)?,
            slots,
            span_blocks,
            span_table: gpu.upload(&params::rows("PaTH's spans", &spans)?)?,
            spans,
            tables: LruCache::default(),
        })
    }

    /// Virtual tiles of all spans, with padding.
    pub(in crate::ops) fn virtual_tiles(&self) -> usize {
        self.spans.last().map_or(0, |s| s.first + s.tiles.next_multiple_of(2))
    }

    /// The spans as the kernels of forgetting attention see them.
    pub(in crate::ops) fn span_tiles<T: Float>(
        &self,
        attention: &Attention<'_, T>,
    ) -> Result<Arc<SpanTiles>> {
        let spec = attention.spec;
        let span = |s: &PathSpan| Span {
            row: s.first * PATH_BLOCK,
            rows: s.tiles * PATH_BLOCK,
            k_row: s.row,
            keys: self.span_blocks * PATH_BLOCK,
            gates: s.gates,
        };
        self.tables.get([spec.heads, spec.kv_heads, spec.head_dim], || {
            attention.span_tiles(&self.spans.iter().map(span).collect::<Vec<_>>())
        })
    }

    pub(super) fn tile_count(&self) -> usize {
        self.slots.len() - 1
    }

    /// Divides the tiles into ranges with at most `most` scratch tiles each, or one tile.
    pub(super) fn ranges(&self, most: usize) -> Vec<std::ops::Range<usize>> {
        let (mut ranges, mut start) = (Vec::new(), 0);
        for tile in 1..=self.tile_count() {
            let full = tile == self.tile_count() || self.slots[tile + 1] - self.slots[start] > most;
            if full {
                ranges.push(start..tile);
                start = tile;
            }
        }
        ranges
    }
}

/// Rows of the tables.
struct Cut {
    blocks: Vec<PathBlock>,
    tiles: Vec<PathTile>,
    slots: Vec<usize>,
    spans: Vec<PathSpan>,
}

/// Virtual tiles of the segments' spans, with padding.
pub(super) fn virtual_tiles(segments: &Segments, span_blocks: usize) -> usize {
    let of_segment = |s: &fox_tensor::Segment| {
        let (first, count) = (s.offset() / PATH_BLOCK, s.k_len.div_ceil(PATH_BLOCK));
        let ends = (span_blocks..count).step_by(span_blocks);
        ends.map(|end| (count - end.max(first)).next_multiple_of(2)).sum::<usize>()
    };
    segments.as_slice().iter().filter(|s| s.q_len > 0).map(of_segment).sum()
}

fn cut(segments: &Segments, span_blocks: usize) -> Cut {
    let (mut blocks, mut tiles, mut slots) = (Vec::new(), Vec::new(), vec![0]);
    let (mut spans, mut virtual_tiles) = (Vec::new(), 0);
    let (mut gates, mut sums, mut used) = (0, 0, 0);
    for (segment, s) in segments.as_slice().iter().enumerate() {
        let (first, count) = (s.offset() / PATH_BLOCK, s.k_len.div_ceil(PATH_BLOCK));
        let (block0, tile0) = (blocks.len(), tiles.len());
        let tile_end = if s.q_len > 0 { tile0 + count - first } else { tile0 };
        // The first tile at or after a block.
        let tile_at = |local: usize| (tile0 + local.saturating_sub(first)).min(tile_end);
        let segment_spans = spans.len();
        for local in 0..count {
            let (start, end) = (local * PATH_BLOCK, ((local + 1) * PATH_BLOCK).min(s.k_len));
            blocks.push(PathBlock {
                row: s.k_start + start,
                rows: end - start,
                gates: gates + start,
                local,
                tile_begin: tile_at(local + 1),
                tile_end: tile_at((local / span_blocks + 1) * span_blocks),
            });
            let newer = local + span_blocks;
            if local % span_blocks == 0 && newer < count && s.q_len > 0 {
                let tile0 = tile_at(newer);
                spans.push(PathSpan {
                    block: block0 + local,
                    gates: gates + start,
                    tile0,
                    tiles: tile_end - tile0,
                    first: virtual_tiles,
                    row: s.k_start + start,
                });
                virtual_tiles += (tile_end - tile0).next_multiple_of(2);
            }
            if s.q_len == 0 || local < first {
                continue;
            }
            let position = start.max(s.offset());
            let query = position - s.offset();
            tiles.push(PathTile {
                row: s.q_start + query,
                rows: end - position,
                lane: position - start,
                block: block0 + local,
                local,
                gates,
                segment,
                keys: s.k_len,
                slots: used,
                sums: sums + query,
                spans: segment_spans,
            });
            used += local % span_blocks;
            slots.push(used);
        }
        gates += s.k_len.next_multiple_of(GATE_ALIGN);
        sums += s.q_len.next_multiple_of(PATH_BLOCK);
    }
    Cut { blocks, tiles, slots, spans }
}

#[cfg(test)]
mod tests {
    use fox_tensor::Segment;

    use super::*;

    #[test]
    fn tiles_end_at_blocks_of_keys() {
        let segment = |q_start, q_len, k_start, k_len| Segment { q_start, q_len, k_start, k_len };
        let list = vec![segment(2, 60, 0, 130), segment(62, 0, 130, 5), segment(62, 64, 140, 64)];
        let Cut { blocks, tiles, slots, .. } = cut(&Segments::new(list).unwrap(), ONE_SPAN);
        let tiles: Vec<_> =
            tiles.iter().map(|t| [t.row, t.rows, t.lane, t.block, t.local, t.sums]).collect();
        // Queries from position 70 on: 58 of the second block, 2 of the third.
        assert_eq!(tiles, [[2, 58, 6, 1, 1, 0], [60, 2, 0, 2, 2, 58], [62, 64, 0, 4, 0, 64]]);
        assert_eq!(slots, [0, 1, 3, 3]);
        let blocks: Vec<_> =
            blocks.iter().map(|b| [b.row, b.rows, b.gates, b.tile_begin, b.tile_end]).collect();
        assert_eq!(
            blocks,
            [
                [0, 64, 0, 0, 2],
                [64, 64, 64, 1, 2],
                [128, 2, 128, 2, 2],
                [130, 5, 256, 2, 2],
                [140, 64, 384, 3, 3]
            ]
        );
    }

    #[test]
    fn later_tiles_are_virtual_at_each_span() {
        // Seven blocks with queries from the third on, and four blocks.
        let list = vec![
            Segment { q_start: 0, q_len: 300, k_start: 0, k_len: 440 },
            Segment { q_start: 300, q_len: 200, k_start: 440, k_len: 200 },
        ];
        let segments = Segments::new(list).unwrap();
        let Cut { blocks, tiles, slots, spans } = cut(&segments, 2);
        let spans: Vec<_> =
            spans.iter().map(|s| [s.block, s.gates, s.tile0, s.tiles, s.first, s.row]).collect();
        let want = [
            [0, 0, 0, 5, 0, 0],
            [2, 128, 2, 3, 6, 128],
            [4, 256, 4, 1, 10, 256],
            [7, 512, 7, 2, 12, 440],
        ];
        assert_eq!(spans, want);
        assert_eq!(virtual_tiles(&segments, 2), 14);
        assert_eq!(tiles.iter().map(|t| t.spans).collect::<Vec<_>>(), [0, 0, 0, 0, 0, 3, 3, 3, 3]);
        assert_eq!(slots, [0, 0, 1, 1, 2, 2, 2, 3, 3, 4]);
        let later: Vec<_> = blocks.iter().map(|b| [b.tile_begin, b.tile_end]).collect();
        let first = [[0, 0], [0, 0], [1, 2], [2, 2], [3, 4], [4, 4], [5, 5]];
        assert_eq!(later[..7], first);
        assert_eq!(later[7..], [[6, 7], [7, 7], [8, 9], [9, 9]]);
    }
}
