//! Device tables of segments divided into chunks.

use std::sync::Arc;

use fox_tensor::Segments;

use crate::backend::Cuda;
use crate::lru::LruCache;
use crate::params::{self, Param, kernel_params};
use crate::{Buffer, Result};

kernel_params! {
    /// First row and number of rows of a chunk.
    pub(super) table struct Chunk {
        row: usize,
        rows: usize,
    }

    /// A segment: its first chunk, the number of its chunks, its first row and the number of its rows.
    pub(super) table struct ChunkedSegment align(16) {
        first: usize,
        count: usize,
        row: usize,
        rows: usize,
    }
}

/// Segments divided into chunks.
pub(crate) struct ChunkTable {
    /// All chunks, segment by segment.
    pub(super) chunks: Buffer<<Chunk as Param>::Device>,
    /// One per segment.
    pub(super) segments: Buffer<<ChunkedSegment as Param>::Device>,
    /// Number of chunks.
    pub(super) count: usize,
    /// Rows of the longest segment, and of all of them.
    pub(super) longest: usize,
    pub(super) covered: usize,
}

/// Tables by (first row, rows) of the segments and chunk length.
pub(crate) type ChunkTables = LruCache<(Vec<(usize, usize)>, usize), ChunkTable>;

/// Divides segments, given as (first row, rows), into chunks of `len` rows.
fn cut(ranges: &[(usize, usize)], len: usize) -> (Vec<ChunkedSegment>, Vec<Chunk>) {
    let (mut segments, mut chunks) = (Vec::with_capacity(ranges.len()), Vec::new());
    for &(row, rows) in ranges {
        segments.push(ChunkedSegment { first: chunks.len(), count: rows.div_ceil(len), row, rows });
        let starts = (0..rows).step_by(len);
        chunks.extend(starts.map(|start| Chunk { row: row + start, rows: len.min(rows - start) }));
    }
    (segments, chunks)
}

impl Cuda {
    /// The queries of the segments in chunks of `len` rows.
    pub(super) fn chunk_table(&self, segments: &Segments, len: usize) -> Result<Arc<ChunkTable>> {
        let rows: Vec<_> = segments.as_slice().iter().map(|s| (s.q_start, s.q_len)).collect();
        self.chunk_tables.get((rows.clone(), len), || {
            let (segments, chunks) = cut(&rows, len);
            Ok(ChunkTable {
                chunks: self.gpu.upload(&params::rows("the table of chunks", &chunks)?)?,
                segments: self.gpu.upload(&params::rows("the table of segments", &segments)?)?,
                count: chunks.len(),
                longest: rows.iter().map(|(_, len)| *len).max().unwrap_or(0),
                covered: rows.iter().map(|(_, len)| len).sum(),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_partition_segments() {
        let (segments, chunks) = cut(&[(3, 130), (133, 0), (140, 64)], 64);
        let segments: Vec<_> = segments.iter().map(|r| [r.first, r.count, r.row, r.rows]).collect();
        assert_eq!(segments, [[0, 3, 3, 130], [3, 0, 133, 0], [3, 1, 140, 64]]);
        let chunks: Vec<_> = chunks.iter().map(|c| [c.row, c.rows]).collect();
        assert_eq!(chunks, [[3, 64], [67, 64], [131, 2], [140, 64]]);
    }
}
