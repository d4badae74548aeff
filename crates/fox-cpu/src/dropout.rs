//! Dropout with counter-based masks.

use fox_tensor::{DROPOUT_GROUP, Dropout, DropoutOps, Result, Tensor, check_dropout};
use rayon::prelude::*;

use crate::Cpu;
use crate::rows::rows_per_task;

impl DropoutOps for Cpu {
    fn dropout(&self, x: &Tensor, dropout: &Dropout) -> Result<Tensor> {
        check_dropout(self, x, dropout)?;
        let (width, data) = (x.cols(), self.real(x));
        self.produce(x.shape(), x.device(), |y| drop_rows(data, width, dropout, y))
    }
}

/// `y[R, C]`.
fn drop_rows(x: &[f32], width: usize, dropout: &Dropout, y: &mut [f32]) {
    let rows = rows_per_task(width);
    let step = rows * width.max(1);
    y.par_chunks_mut(step).zip(x.par_chunks(step)).enumerate().for_each(|(task, (y, x))| {
        for (r, (y, x)) in y.chunks_mut(width).zip(x.chunks(width)).enumerate() {
            let number = dropout.rows.number(task * rows + r);
            drop_row(x, number.wrapping_mul(width as u64), dropout, y);
        }
    });
}

/// One row, whose first element has index `first` in the whole batch.
fn drop_row(x: &[f32], first: u64, dropout: &Dropout, y: &mut [f32]) {
    let (threshold, scale) = (dropout.threshold(), dropout.scale());
    let mut index = first;
    let mut hashes = dropout.hashes(index / DROPOUT_GROUP) >> (16 * (index % DROPOUT_GROUP));
    for (y, x) in y.iter_mut().zip(x) {
        if index.is_multiple_of(DROPOUT_GROUP) {
            hashes = dropout.hashes(index / DROPOUT_GROUP);
        }
        *y = if hashes as u16 >= threshold { x * scale } else { 0.0 };
        hashes >>= 16;
        index = index.wrapping_add(1);
    }
}
