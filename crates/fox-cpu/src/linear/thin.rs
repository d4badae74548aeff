//! Products with few rows in f32: one pass over the weights in place, at memory bandwidth.
//!
//! Every element of the result is the sum over the inner dimension in one fixed order: lanes first, then the lanes of
//! the sum. The order does not depend on the number of rows or on register blocking, so products are batch-invariant.

use rayon::prelude::*;

use crate::shared::Shared;
use crate::simd::{Kernel, Level, Simd};

/// Minimum bytes of weights per task: enough to outweigh the scheduling cost.
const TASK_BYTES: usize = 96 * 1024;

/// Tasks per thread for large products, for load balance.
const TASKS_PER_THREAD: usize = 4;

/// Prefetch distance in rows.
const AHEAD: usize = 4;

#[inline(always)]
fn tail<S: Simd>(s: S, values: &[f32]) -> S::V {
    let mut lanes = [0.0; 16];
    lanes[..values.len()].copy_from_slice(values);
    // SAFETY: no vector has more than 16 lanes.
    unsafe { s.load(lanes.as_ptr()) }
}

/// Some rows of the weights against all rows of `x`.
struct WeightRows<'a> {
    /// `[width, inner]`.
    w: &'a [f32],
    /// `[m, inner]`.
    x: &'a [f32],
    inner: usize,
    first: usize,
    count: usize,
    bias: Option<&'a [f32]>,
    /// `[m, width]`; this task writes columns `first .. first + count`.
    y: Shared<'a>,
    width: usize,
}

impl Kernel for WeightRows<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let rows = self.x.len() / self.inner.max(1);
        // A few rows of `x` stay in L1 while all weights of this task are read: once from memory, and from L2 for the
        // next rows.
        let mut m = 0;
        while m < rows {
            m += match rows - m {
                // As many sums as there are registers for.
                4.. if S::MANY_REGISTERS => self.columns::<S, 4, 4>(s, m),
                4.. => self.columns::<S, 2, 4>(s, m),
                2.. => self.columns::<S, 2, 2>(s, m),
                // A single row is bound by memory bandwidth, which is highest for one sequential read.
                _ => self.columns::<S, 1, 1>(s, m),
            };
        }
    }
}

impl WeightRows<'_> {
    /// All weights of this task against `M` rows of `x` from `m` on; returns `M`.
    #[inline(always)]
    fn columns<S: Simd, const R: usize, const M: usize>(&self, s: S, m: usize) -> usize {
        let end = self.first + self.count;
        let mut n = self.first;
        while n + R <= end {
            self.tile::<S, R, M>(s, n, m);
            n += R;
        }
        while n < end {
            self.tile::<S, 1, M>(s, n, m);
            n += 1;
        }
        M
    }

    /// `R` rows of the weights from `n` on against `M` rows of `x` from `m` on.
    #[inline(always)]
    fn tile<S: Simd, const R: usize, const M: usize>(&self, s: S, n: usize, m: usize) {
        let (inner, full) = (self.inner, self.inner / S::LANES * S::LANES);
        let x = |i: usize| &self.x[(m + i) * inner..][..inner];
        let rows: [&[f32]; M] = std::array::from_fn(x);
        let mut sums = [[s.splat(0.0); M]; R];
        let mut at = 0;
        while at < full {
            // SAFETY: `at + LANES <= full <= inner`, for rows that exist.
            unsafe { self.add::<S, R, M>(s, n, &rows, at, &mut sums) };
            at += S::LANES;
        }
        if full < inner {
            for r in 0..R {
                let w = tail(s, &self.w[(n + r) * inner + full..][..inner - full]);
                for i in 0..M {
                    sums[r][i] = s.mul_add(w, tail(s, &rows[i][full..]), sums[r][i]);
                }
            }
        }
        for i in 0..M {
            // SAFETY: tasks write disjoint columns.
            let y = unsafe { self.y.slice((m + i) * self.width + n, R) };
            for r in 0..R {
                y[r] = s.sum(sums[r][i]) + self.bias.map_or(0.0, |bias| bias[n + r]);
            }
        }
    }

    /// One vector of each row.
    ///
    /// # Safety
    /// All rows must hold `LANES` values from `at` on.
    #[inline(always)]
    unsafe fn add<S: Simd, const R: usize, const M: usize>(
        &self,
        s: S,
        n: usize,
        rows: &[&[f32]; M],
        at: usize,
        sums: &mut [[S::V; M]; R],
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut w = [s.splat(0.0); R];
            for r in 0..R {
                let row = self.w.as_ptr().wrapping_add((n + r) * self.inner + at);
                w[r] = s.load(row);
                s.prefetch(row.wrapping_add(AHEAD * self.inner).cast());
            }
            for i in 0..M {
                let x = s.load(rows[i].as_ptr().add(at));
                for r in 0..R {
                    sums[r][i] = s.mul_add(w[r], x, sums[r][i]);
                }
            }
        }
    }
}

/// Columns of a task of a product, with `bytes` of weights each.
pub fn columns_per_task(bytes: usize, width: usize) -> usize {
    let task = bytes * width / (TASKS_PER_THREAD * rayon::current_num_threads());
    (task.max(TASK_BYTES) / bytes.max(1)).next_multiple_of(4).max(4)
}

/// `y[m, width] = x[m, inner] w[width, inner]^T + bias`.
pub fn multiply_thin(
    level: Level,
    w: &[f32],
    x: &[f32],
    inner: usize,
    bias: Option<&[f32]>,
    y: &mut [f32],
    width: usize,
) {
    assert!(inner > 0 && x.len().is_multiple_of(inner) && y.len() == x.len() / inner * width);
    assert!(w.len() == width * inner && bias.is_none_or(|bias| bias.len() == width));
    let step = columns_per_task(4 * inner, width);
    let y = Shared::new(y);
    let run = |first: usize| {
        let count = step.min(width - first);
        level.run(WeightRows { w, x, inner, first, count, bias, y, width });
    };
    if width <= step {
        run(0);
    } else {
        (0..width.div_ceil(step)).into_par_iter().for_each(|i| run(i * step));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fox_tensor::cases::Rng;

    #[test]
    fn thin_products_are_batch_invariant() {
        let mut rng = Rng::new(4);
        let (n, k) = (61, 200);
        let mut normals = |len: usize| (0..len).map(|_| rng.normal() as f32).collect::<Vec<f32>>();
        let (x, w) = (normals(19 * k), normals(n * k));
        for level in Level::available() {
            let product = |x: &[f32]| {
                let mut y = vec![f32::NAN; x.len() / k * n];
                multiply_thin(level, &w, x, k, None, &mut y, n);
                y
            };
            let all = product(&x);
            for m in 1..19 {
                assert_eq!(product(&x[..m * k]), all[..m * n], "{} {m}", level.name());
                assert_eq!(product(&x[m * k..]), all[m * n..], "{} {m}", level.name());
            }
        }
    }
}
