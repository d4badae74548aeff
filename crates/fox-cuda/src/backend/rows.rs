//! Tables by row and by position: segment and position of a row, angles of RoPE.

use std::sync::Arc;

use fox_tensor::{Rope, Segments};

use super::Cuda;
use crate::lru::LruCache;
use crate::params::{self, Param, kernel_params};
use crate::{Buffer, Result};

kernel_params! {
    /// The segment and position of a row.
    pub(crate) table struct RowInfo align(16) {
        /// Number of the segment, -1 outside every segment.
        segment: i32,
        /// Index among the segment's queries.
        index: usize,
        /// Position among the segment's keys.
        position: usize,
        /// Whether the next row belongs to the segment.
        has_next: bool,
    }
}

/// One entry for each row.
pub(crate) type RowTable = Buffer<<RowInfo as Param>::Device>;
pub(crate) type RowTables = LruCache<(Segments, usize), RowTable>;

/// Cosines and sines `[positions][d / 2]` by embedding, head dim and positions.
pub(crate) type RopeTables = LruCache<([u64; 6], usize, usize), Buffer<f32>>;

impl Cuda {
    pub(crate) fn row_table(&self, segments: &Segments, rows: usize) -> Result<Arc<RowTable>> {
        self.row_tables.get((segments.clone(), rows), || {
            let outside = RowInfo { segment: -1, index: 0, position: 0, has_next: false };
            let mut table = vec![outside; rows];
            for (n, s) in segments.as_slice().iter().enumerate() {
                let segment = params::int("the table of rows", "segment", n)?;
                for t in 0..s.q_len {
                    let (position, has_next) = (s.offset() + t, t + 1 < s.q_len);
                    table[s.q_start + t] = RowInfo { segment, index: t, position, has_next };
                }
            }
            self.gpu.upload(&params::rows("the table of rows", &table)?)
        })
    }

    pub(crate) fn rope_table(
        &self,
        rope: Rope,
        head_dim: usize,
        segments: &Segments,
    ) -> Result<Arc<Buffer<f32>>> {
        let longest = segments.as_slice().iter().map(|s| s.k_len).max().unwrap_or(0);
        // Few sizes, so that a growing sequence does not make a table at every step.
        let positions = longest.max(256).next_power_of_two();
        self.rope_tables.get((rope.key(), head_dim, positions), || {
            let half = head_dim / 2;
            let mut table = Vec::with_capacity(2 * positions * half);
            for position in 0..positions {
                for m in 0..half {
                    let step = rope.frequency(m, head_dim);
                    let (sin, cos) = (position as f64 * step).sin_cos();
                    table.extend([cos as f32, sin as f32]);
                }
            }
            self.gpu.upload(&table)
        })
    }
}
