//! Rows of a table, and their gradient.

use rayon::prelude::*;

use crate::rows::rows_per_task;

/// `y[R, C]`, row by row from `table[V, C]`.
pub fn forward(table: &[f32], ids: &[i32], width: usize, y: &mut [f32]) {
    let step = rows_per_task(width);
    y.par_chunks_mut(step * width).zip(ids.par_chunks(step)).for_each(|(y, ids)| {
        for (y, &id) in y.chunks_exact_mut(width).zip(ids) {
            y.copy_from_slice(&table[id as usize * width..][..width]);
        }
    });
}

/// Tasks of the backward pass; each owns a range of the vocabulary.
const PARTS: usize = 32;

/// Adds row `r` of `dy` to row `ids[r]` of `dtable`, in the order of the rows. Each task reads all ids
/// and keeps those of its own range, so no two tasks touch the same row.
pub fn backward(dy: &[f32], ids: &[i32], width: usize, pad: Option<usize>, dtable: &mut [f32]) {
    let vocab = dtable.len() / width.max(1);
    let share = vocab.div_ceil(PARTS).max(1);
    dtable.par_chunks_mut(share * width).enumerate().for_each(|(part, dtable)| {
        let own = part * share..part * share + dtable.len() / width;
        for (dy, &id) in dy.chunks_exact(width).zip(ids) {
            let id = id as usize;
            if own.contains(&id) && pad != Some(id) {
                let row = &mut dtable[(id - own.start) * width..][..width];
                row.iter_mut().zip(dy).for_each(|(t, d)| *t += d);
            }
        }
    });
}
