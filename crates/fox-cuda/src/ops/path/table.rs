//! Device tables of PaTH attention: blocks of keys, and tiles of queries cut at the same positions.

use fox_tensor::{PATH_BLOCK, Segments};

use crate::ops::attention::tiling::GATE_ALIGN;
use crate::params::{self, Param, kernel_params};
use crate::{Buffer, Gpu, Result};

kernel_params! {
    /// A block of up to 64 keys.
    pub(super) table struct PathBlock {
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
    pub(super) table struct PathTile {
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
        /// Scratch tiles before those of this tile, which has one for each older block.
        slots: usize,
        /// Index of the first query in row sums.
        sums: usize,
    }
}

/// Tables of one set of segments.
pub(crate) struct PathTable {
    pub(super) blocks: Buffer<<PathBlock as Param>::Device>,
    pub(super) block_count: usize,
    pub(super) tiles: Buffer<<PathTile as Param>::Device>,
    /// Per tile, its first scratch tile; then their number.
    pub(super) slots: Vec<usize>,
}

impl PathTable {
    pub(super) fn new(gpu: &Gpu, segments: &Segments) -> Result<Self> {
        let (blocks, tiles, slots) = cut(segments);
        Ok(PathTable {
            block_count: blocks.len(),
            blocks: gpu.upload(&params::rows("PaTH's blocks of keys", &blocks)?)?,
            tiles: gpu.upload(&params::rows("PaTH's tiles of queries", &tiles)?)?,
            slots,
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

fn cut(segments: &Segments) -> (Vec<PathBlock>, Vec<PathTile>, Vec<usize>) {
    let (mut blocks, mut tiles, mut slots) = (Vec::new(), Vec::new(), vec![0]);
    let (mut gates, mut sums, mut used) = (0, 0, 0);
    for (segment, s) in segments.as_slice().iter().enumerate() {
        let (first, count) = (s.offset() / PATH_BLOCK, s.k_len.div_ceil(PATH_BLOCK));
        let (block0, tile0) = (blocks.len(), tiles.len());
        let tile_end = if s.q_len > 0 { tile0 + count - first } else { tile0 };
        for local in 0..count {
            let (start, end) = (local * PATH_BLOCK, ((local + 1) * PATH_BLOCK).min(s.k_len));
            blocks.push(PathBlock {
                row: s.k_start + start,
                rows: end - start,
                gates: gates + start,
                local,
                tile_begin: (tile0 + (local + 1).saturating_sub(first)).min(tile_end),
                tile_end,
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
            });
            used += local;
            slots.push(used);
        }
        gates += s.k_len.next_multiple_of(GATE_ALIGN);
        sums += s.q_len.next_multiple_of(PATH_BLOCK);
    }
    (blocks, tiles, slots)
}

#[cfg(test)]
mod tests {
    use fox_tensor::Segment;

    use super::*;

    #[test]
    fn tiles_end_at_blocks_of_keys() {
        let segment = |q_start, q_len, k_start, k_len| Segment { q_start, q_len, k_start, k_len };
        let list = vec![segment(2, 60, 0, 130), segment(62, 0, 130, 5), segment(62, 64, 140, 64)];
        let (blocks, tiles, slots) = cut(&Segments::new(list).unwrap());
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
}
