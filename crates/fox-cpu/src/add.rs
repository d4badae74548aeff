//! Sums in place.

use rayon::prelude::*;

use crate::rows::rows_per_task;
use crate::simd::{Level, simd_fn, update};

simd_fn! {
    fn add_to<'k, S>(s, x: &'k [f32], y: &'k mut [f32]) {
        update(s, [x], y, |[x], y| s.add(x, y));
    }
}

/// `y += x`.
pub fn add(level: Level, x: &[f32], y: &mut [f32]) {
    let step = rows_per_task(1);
    y.par_chunks_mut(step).zip(x.par_chunks(step)).for_each(|(y, x)| add_to(level, x, y));
}
