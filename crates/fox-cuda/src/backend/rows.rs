//! Tables by row and by position: where a row stands in its segment, angles of RoPE.

use std::sync::Arc;

use fox_tensor::{Rope, Segments};

use super::{Cuda, int};
use crate::attention::Recent;
use crate::{Buffer, Result};

/// For each row: segment (-1 for none), index among the segment's queries, position, whether the next row
/// belongs to the segment.
pub(super) type RowTables = Recent<(Segments, usize), Buffer<i32>>;

/// Cosines and sines `[positions][d / 2]` by the bits of the base, the head dim and the positions.
pub(super) type RopeTables = Recent<(u64, usize, usize), Buffer<f32>>;

impl Cuda {
    pub(super) fn row_table(&self, segments: &Segments, rows: usize) -> Result<Arc<Buffer<i32>>> {
        self.row_tables.get((segments.clone(), rows), || {
            let mut table = [-1, 0, 0, 0].repeat(rows);
            for (n, s) in segments.as_slice().iter().enumerate() {
                for t in 0..s.q_len {
                    let next = i32::from(t + 1 < s.q_len);
                    let entry = [int(n), int(t), int(s.offset() + t), next];
                    table[4 * (s.q_start + t)..][..4].copy_from_slice(&entry);
                }
            }
            self.gpu.upload(&table)
        })
    }

    pub(super) fn rope_table(
        &self,
        rope: Rope,
        head_dim: usize,
        segments: &Segments,
    ) -> Result<Arc<Buffer<f32>>> {
        let longest = segments.as_slice().iter().map(|s| s.k_len).max().unwrap_or(0);
        // Few sizes, so that a growing sequence does not make a table at every step.
        let positions = longest.max(256).next_power_of_two();
        self.rope_tables.get((rope.base.to_bits(), head_dim, positions), || {
            let half = head_dim / 2;
            let mut table = Vec::with_capacity(2 * positions * half);
            for position in 0..positions {
                for m in 0..half {
                    let step = rope.base.powf(-2.0 * m as f64 / head_dim as f64);
                    let (sin, cos) = (position as f64 * step).sin_cos();
                    table.extend([cos as f32, sin as f32]);
                }
            }
            self.gpu.upload(&table)
        })
    }
}
