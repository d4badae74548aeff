//! Embedding lookup and its gradient.

use fox_tensor::{EmbeddingOps, Result, Tensor, check_embedding_bwd, check_embedding_fwd};
use rayon::prelude::*;

use crate::Cpu;
use crate::rows::rows_per_task;

impl EmbeddingOps for Cpu {
    fn embedding_fwd(&self, table: &Tensor, ids: &Tensor) -> Result<Tensor> {
        check_embedding_fwd(self, table, ids)?;
        let (width, rows) = (table.cols(), ids.len());
        let (table_data, ids) = (self.real(table), self.buffer(ids).as_i32());
        self.produce([rows, width], table.device(), |y| {
            forward(table_data, ids, width, y);
        })
    }

    fn embedding_bwd(
        &self,
        dy: &Tensor,
        ids: &Tensor,
        vocab: usize,
        pad: Option<usize>,
        acc: Option<Tensor>,
    ) -> Result<Tensor> {
        check_embedding_bwd(self, dy, ids, vocab, acc.as_ref())?;
        let (width, data, ids) = (dy.cols(), self.real(dy), self.buffer(ids).as_i32());
        self.accumulate(acc, [vocab, width], dy.device(), |sum| {
            backward(data, ids, width, pad, sum);
            Ok(())
        })
    }
}

/// `y[R, C]`, row by row from `table[V, C]`.
pub fn forward(table: &[f32], ids: &[i32], width: usize, y: &mut [f32]) {
    let step = rows_per_task(width);
    y.par_chunks_mut(step * width).zip(ids.par_chunks(step)).for_each(|(y, ids)| {
        for (y, &id) in y.chunks_exact_mut(width).zip(ids) {
            y.copy_from_slice(&table[id as usize * width..][..width]);
        }
    });
}

/// Tasks of the backward pass, each for a range of the vocabulary.
const TASKS: usize = 32;

/// Adds row `r` of `dy` to row `ids[r]` of `dtable`, in the order of the rows. Each task reads all ids
/// and processes those of its range, so no two tasks write the same row.
pub fn backward(dy: &[f32], ids: &[i32], width: usize, pad: Option<usize>, dtable: &mut [f32]) {
    let vocab = dtable.len() / width.max(1);
    let range = vocab.div_ceil(TASKS).max(1);
    dtable.par_chunks_mut(range * width).enumerate().for_each(|(task, dtable)| {
        let ids_here = task * range..task * range + dtable.len() / width;
        for (dy, &id) in dy.chunks_exact(width).zip(ids) {
            let id = id as usize;
            if ids_here.contains(&id) && pad != Some(id) {
                let row = &mut dtable[(id - ids_here.start) * width..][..width];
                row.iter_mut().zip(dy).for_each(|(t, d)| *t += d);
            }
        }
    });
}
