//! Device tables of PaTH attention: blocks of keys, and tiles of queries cut at the same positions.

use std::ops::Range;
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
        /// Index of the segment's first span of each level.
        spans: [usize; LEVELS],
    }

    /// Blocks of keys with the virtual queries of later tiles in the same span of the next level.
    pub(in crate::ops) table struct PathSpan {
        /// The product of its first part: of a block, or behind those of all blocks that of a span of the level below.
        part: usize,
        /// Padded position of the first key in the gate prefixes.
        pub(super) gates: usize,
        /// The first later tile of queries, and their number.
        tile0: usize,
        pub(super) tiles: usize,
        /// The first of its virtual tiles, an even number.
        pub(super) first: usize,
        /// Row of the first key.
        pub(super) row: usize,
        /// Blocks of the span, and its level.
        pub(super) blocks: usize,
        pub(super) level: usize,
        /// Whether its keys are carried on to the end of a span of the next level.
        carried: bool,
        /// Sums of the gradient of its product before those of this span: one for every `SUM_TILES` virtual tiles.
        pub(super) sums: usize,
    }
}

/// Sizes of spans; see `path.cuh`.
pub(in crate::ops) const LEVELS: usize = 4;
/// Blocks of a span at each level, each a multiple of the one before or [`ONE_SPAN`].
pub(in crate::ops) type SpanSizes = [usize; LEVELS];
/// More blocks than a segment has: all of them are one span.
pub(in crate::ops) const ONE_SPAN: usize = 1 << 30;
/// Virtual tiles of 64 queries per thread block of `path_span_products`.
pub(super) const SUM_TILES: usize = 32;

/// Tables of one set of segments.
pub(crate) struct PathTable {
    pub(super) blocks: Buffer<<PathBlock as Param>::Device>,
    pub(super) block_count: usize,
    pub(in crate::ops) tiles: Buffer<<PathTile as Param>::Device>,
    /// Per tile, its first scratch tile; then their number.
    pub(super) slots: Vec<usize>,
    pub(super) sizes: SpanSizes,
    /// Spans with later queries, and those inside them, on both sides; by levels.
    pub(in crate::ops) spans: Vec<PathSpan>,
    pub(in crate::ops) span_table: Buffer<<PathSpan as Param>::Device>,
    /// The spans of each level.
    pub(super) levels: Vec<Range<usize>>,
    /// By heads, key heads, head dim and rows of keys.
    tables: LruCache<[usize; 4], SpanTiles>,
}

impl PathTable {
    pub(in crate::ops) fn new(gpu: &Gpu, segments: &Segments, sizes: SpanSizes) -> Result<Self> {
        let Cut { blocks, tiles, slots, spans, levels } = cut(segments, sizes);
        Ok(PathTable {
            block_count: blocks.len(),
            blocks: gpu.upload(&params::rows("PaTH's blocks of keys", &blocks)?)?,
            tiles: gpu.upload(&params::rows("PaTH's tiles of queries", &tiles)?)?,
            slots,
            sizes,
            levels,
            span_table: gpu.upload(&params::rows("PaTH's spans", &spans)?)?,
            spans,
            tables: LruCache::default(),
        })
    }

    /// Virtual tiles of all spans, with padding.
    pub(in crate::ops) fn virtual_tiles(&self) -> usize {
        self.spans.last().map_or(0, |s| s.first + s.tiles.next_multiple_of(2))
    }

    /// Products of blocks and of spans.
    pub(super) fn products(&self) -> usize {
        self.block_count + self.spans.len()
    }

    /// Thread blocks of `path_span_products` that have sums.
    pub(super) fn sums(&self) -> usize {
        self.spans.last().map_or(0, |s| s.sums + s.tiles.div_ceil(SUM_TILES))
    }

    /// The spans as the kernels of forgetting attention see them, longest first. Every level has its own keys `[levels,
    /// R_k, H_kv * d]` and gate prefixes `[levels][heads][gate_stride]`.
    pub(in crate::ops) fn span_tiles<T: Float>(
        &self,
        attention: &Attention<'_, T>,
        gate_stride: usize,
    ) -> Result<Arc<SpanTiles>> {
        let spec = attention.spec;
        let k_rows = attention.inputs.k.len() / (spec.kv_heads * spec.head_dim);
        let span = |s: &PathSpan| Span {
            row: s.first * PATH_BLOCK,
            rows: s.tiles * PATH_BLOCK,
            k_row: s.level * k_rows + s.row,
            keys: s.blocks * PATH_BLOCK,
            gates: s.level * spec.heads * gate_stride + s.gates,
        };
        self.tables.get([spec.heads, spec.kv_heads, spec.head_dim, k_rows], || {
            let levels = self.levels.iter().rev().flat_map(|level| &self.spans[level.clone()]);
            attention.span_tiles(&levels.filter(|s| s.tiles > 0).map(span).collect::<Vec<_>>())
        })
    }

    /// Levels with spans.
    pub(in crate::ops) fn levels(&self) -> usize {
        self.levels.len()
    }

    pub(super) fn tile_count(&self) -> usize {
        self.slots.len() - 1
    }

    /// Divides the tiles into ranges with at most `most` scratch tiles each, or one tile.
    pub(super) fn ranges(&self, most: usize) -> Vec<Range<usize>> {
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
    levels: Vec<Range<usize>>,
}

/// Blocks of a segment, and how its spans divide them.
struct Divided<'a> {
    sizes: &'a SpanSizes,
    /// The first block with queries, and the number of blocks.
    first: usize,
    count: usize,
    /// Blocks of 64 keys.
    full: usize,
}

impl<'a> Divided<'a> {
    fn new(s: &fox_tensor::Segment, sizes: &'a SpanSizes) -> Self {
        let (first, count) = (s.offset() / PATH_BLOCK, s.k_len.div_ceil(PATH_BLOCK));
        Divided { sizes, first, count, full: if s.q_len > 0 { s.k_len / PATH_BLOCK } else { 0 } }
    }

    /// Number of the span of the next level that has span `n` of a level.
    fn outer(&self, level: usize, n: usize) -> usize {
        self.sizes.get(level + 1).map_or(0, |outer| n * self.sizes[level] / outer)
    }

    /// The blocks with queries that see all of span `n` in the same span of the next level.
    fn later(&self, level: usize, n: usize) -> Range<usize> {
        let start = ((n + 1) * self.sizes[level]).max(self.first);
        let outer = self.sizes.get(level + 1).unwrap_or(&ONE_SPAN);
        let end = ((self.outer(level, n) + 1) * outer).min(self.count);
        start..end.max(start)
    }

    /// Whether span `n` of a level is in one of the next that is needed.
    fn is_carried(&self, level: usize, n: usize) -> bool {
        level + 1 < LEVELS && self.is_needed(level + 1, self.outer(level, n))
    }

    /// Whether queries see all of span `n` of a level, or of one around it.
    fn is_needed(&self, level: usize, n: usize) -> bool {
        let is_full = (n + 1) * self.sizes[level] <= self.full;
        is_full && (!self.later(level, n).is_empty() || self.is_carried(level, n))
    }

    /// The spans of a level that are needed.
    fn spans(&self, level: usize) -> impl Iterator<Item = usize> {
        (0..).take_while(move |n| self.is_needed(level, *n))
    }
}

/// Virtual tiles of the segments' spans, with padding.
pub(super) fn virtual_tiles(segments: &Segments, sizes: &SpanSizes) -> usize {
    let of_segment = |s: &fox_tensor::Segment| {
        let divided = Divided::new(s, sizes);
        let of_level = |level: usize| {
            let tiles = |n: usize| divided.later(level, n).len().next_multiple_of(2);
            divided.spans(level).map(tiles).sum::<usize>()
        };
        (0..LEVELS).map(of_level).sum::<usize>()
    };
    segments.as_slice().iter().map(of_segment).sum()
}

fn cut(segments: &Segments, sizes: SpanSizes) -> Cut {
    let (mut blocks, mut tiles, mut slots) = (Vec::new(), Vec::<PathTile>::new(), vec![0]);
    // Of each segment: its first block, first tile, and position in the gate prefixes.
    let mut starts = Vec::new();
    let (mut gates, mut sums, mut used) = (0, 0, 0);
    for (segment, s) in segments.as_slice().iter().enumerate() {
        let (first, count) = (s.offset() / PATH_BLOCK, s.k_len.div_ceil(PATH_BLOCK));
        let (block0, tile0) = (blocks.len(), tiles.len());
        let tile_end = if s.q_len > 0 { tile0 + count - first } else { tile0 };
        // The first tile at or after a block.
        let tile_at = |local: usize| (tile0 + local.saturating_sub(first)).min(tile_end);
        starts.push((block0, tile0, gates));
        for local in 0..count {
            let (start, end) = (local * PATH_BLOCK, ((local + 1) * PATH_BLOCK).min(s.k_len));
            blocks.push(PathBlock {
                row: s.k_start + start,
                rows: end - start,
                gates: gates + start,
                local,
                tile_begin: tile_at(local + 1),
                tile_end: tile_at((local / sizes[0] + 1) * sizes[0]),
            });
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
                spans: [0; LEVELS],
            });
            used += local % sizes[0];
            slots.push(used);
        }
        gates += s.k_len.next_multiple_of(GATE_ALIGN);
        sums += s.q_len.next_multiple_of(PATH_BLOCK);
    }
    let (spans, levels) = cut_spans(segments, &sizes, &starts, (blocks.len(), &mut tiles));
    Cut { blocks, tiles, slots, spans, levels }
}

/// The spans of all levels; sets the first ones of the tiles. `starts` are the first block, first tile and gates of
/// each segment.
fn cut_spans(
    segments: &Segments,
    sizes: &SpanSizes,
    starts: &[(usize, usize, usize)],
    (block_count, tiles): (usize, &mut [PathTile]),
) -> (Vec<PathSpan>, Vec<Range<usize>>) {
    let (mut spans, mut levels) = (Vec::new(), Vec::new());
    let (mut virtual_tiles, mut sums) = (0, 0);
    // The product of each segment's first block, or first span of the level below.
    let mut parts: Vec<usize> = starts.iter().map(|start| start.0).collect();
    for (level, &size) in sizes.iter().enumerate() {
        let (start, below) = (spans.len(), if level == 0 { 1 } else { sizes[level - 1] });
        for (segment, s) in segments.as_slice().iter().enumerate() {
            let (_, tile0, gates) = starts[segment];
            let (divided, first) = (Divided::new(s, sizes), spans.len());
            let end = starts.get(segment + 1).map_or(tiles.len(), |next| next.1);
            tiles[tile0..end].iter_mut().for_each(|tile| tile.spans[level] = first);
            for n in divided.spans(level) {
                let (later, position) = (divided.later(level, n), n * size * PATH_BLOCK);
                spans.push(PathSpan {
                    part: parts[segment] + n * (size / below),
                    gates: gates + position,
                    tile0: tile0 + later.start - divided.first,
                    tiles: later.len(),
                    first: virtual_tiles,
                    row: s.k_start + position,
                    blocks: size,
                    level,
                    carried: divided.is_carried(level, n),
                    sums,
                });
                virtual_tiles += later.len().next_multiple_of(2);
                sums += later.len().div_ceil(SUM_TILES);
            }
            parts[segment] = block_count + first;
        }
        if spans.len() > start {
            levels.push(start..spans.len());
        }
    }
    (spans, levels)
}

#[cfg(test)]
mod tests {
    use fox_tensor::Segment;

    use super::*;

    #[test]
    fn tiles_end_at_blocks_of_keys() {
        let segment = |q_start, q_len, k_start, k_len| Segment { q_start, q_len, k_start, k_len };
        let list = vec![segment(2, 60, 0, 130), segment(62, 0, 130, 5), segment(62, 64, 140, 64)];
        let Cut { blocks, tiles, slots, .. } =
            cut(&Segments::new(list).unwrap(), [ONE_SPAN; LEVELS]);
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
        let sizes = [2, ONE_SPAN, ONE_SPAN, ONE_SPAN];
        let Cut { blocks, tiles, slots, spans, .. } = cut(&segments, sizes);
        let spans: Vec<_> =
            spans.iter().map(|s| [s.part, s.gates, s.tile0, s.tiles, s.first, s.row]).collect();
        let want = [
            [0, 0, 0, 5, 0, 0],
            [2, 128, 2, 3, 6, 128],
            [4, 256, 4, 1, 10, 256],
            [7, 512, 7, 2, 12, 440],
        ];
        assert_eq!(spans, want);
        assert_eq!(virtual_tiles(&segments, &sizes), 14);
        assert_eq!(
            tiles.iter().map(|t| t.spans[0]).collect::<Vec<_>>(),
            [0, 0, 0, 0, 0, 3, 3, 3, 3]
        );
        assert_eq!(slots, [0, 0, 1, 1, 2, 2, 2, 3, 3, 4]);
        let later: Vec<_> = blocks.iter().map(|b| [b.tile_begin, b.tile_end]).collect();
        let first = [[0, 0], [0, 0], [1, 2], [2, 2], [3, 4], [4, 4], [5, 5]];
        assert_eq!(later[..7], first);
        assert_eq!(later[7..], [[6, 7], [7, 7], [8, 9], [9, 9]]);
    }

    #[test]
    fn larger_spans_contain_whole_smaller_ones() {
        // Eleven blocks, the last with 40 keys.
        let list = vec![Segment { q_start: 0, q_len: 680, k_start: 0, k_len: 680 }];
        let segments = Segments::new(list).unwrap();
        let sizes = [1, 2, 4, ONE_SPAN];
        let Cut { tiles, spans, levels, .. } = cut(&segments, sizes);
        // Blocks 8 and 9 are seen by block 10 as a span of two, which is in no full span of four.
        let of = |level: usize| -> Vec<_> {
            spans[levels[level].clone()]
                .iter()
                .map(|s| [s.part, s.tile0, s.tiles, s.first])
                .collect()
        };
        let blocks = |n: usize| [n, n + 1, usize::from(n.is_multiple_of(2)), n.div_ceil(2) * 2];
        assert_eq!(of(0), (0..10).map(blocks).collect::<Vec<_>>());
        let pairs =
            [[11, 2, 2, 10], [13, 4, 0, 12], [15, 6, 2, 12], [17, 8, 0, 14], [19, 10, 1, 14]];
        assert_eq!(of(1), pairs);
        assert_eq!(of(2), [[21, 4, 7, 16], [23, 8, 3, 24]]);
        assert_eq!(virtual_tiles(&segments, &sizes), 28);
        let carried: Vec<_> = spans.iter().map(|s| s.carried).collect();
        assert_eq!(carried, [vec![true; 10], vec![true; 4], vec![false; 3]].concat());
        assert_eq!(tiles[10].spans, [0, 10, 15, 17]);
    }
}
