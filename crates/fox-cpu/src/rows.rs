//! Division of rows into tasks.

use fox_tensor::Segments;

/// Elements per task: enough to outweigh the scheduling cost.
const GRAIN: usize = 16 * 1024;

/// Rows of `width` elements per task. Depends on the shape alone.
pub fn rows_per_task(width: usize) -> usize {
    (GRAIN / width.max(1)).max(1)
}

/// Adds `partials[n][width]` in order to `acc`.
pub fn sum_partials(partials: &[f32], acc: &mut [f32]) {
    for partial in partials.chunks_exact(acc.len()) {
        acc.iter_mut().zip(partial).for_each(|(a, p)| *a += p);
    }
}

/// Consecutive query rows of one segment that make a task.
#[derive(Clone, Copy, Debug)]
pub struct RowChunk {
    /// Index of the segment.
    pub segment: usize,
    /// First row, and number of rows.
    pub row: usize,
    pub len: usize,
    /// Position of the first row in its sequence.
    pub position: usize,
    /// Whether the first row is the segment's first, and whether the last is its last.
    pub first: bool,
    pub last: bool,
}

/// Divides the segments' query rows into chunks of at most one task's rows.
pub fn row_chunks(segments: &Segments, width: usize) -> Vec<RowChunk> {
    let most = rows_per_task(width);
    let mut chunks = Vec::new();
    for (index, segment) in segments.as_slice().iter().enumerate() {
        for start in (0..segment.q_len).step_by(most) {
            let len = most.min(segment.q_len - start);
            chunks.push(RowChunk {
                segment: index,
                row: segment.q_start + start,
                len,
                position: segment.offset() + start,
                first: start == 0,
                last: start + len == segment.q_len,
            });
        }
    }
    chunks
}
