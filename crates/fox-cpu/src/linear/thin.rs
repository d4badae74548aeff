//! Products with few rows: one pass over the weights in place, at memory bandwidth.
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

/// Weights of a product `x w^T`, row by row.
pub trait Weights: Copy + Send + Sync {
    /// Values that share a scale; 0 when there are none.
    const BLOCK: usize;
    /// Bytes of a row.
    fn row_bytes(self) -> usize;
    /// Whether there are `rows` rows of `inner` values each.
    fn holds(self, rows: usize, inner: usize) -> bool;
    /// `LANES` values of row `n` from `at` on.
    ///
    /// # Safety
    /// The row must exist, and hold that many values from `at` on.
    unsafe fn load<S: Simd>(self, s: S, n: usize, at: usize) -> S::V;
    /// Prefetches the cache line of row `n` at `at`, which may be past the end.
    fn prefetch<S: Simd>(self, s: S, n: usize, at: usize);
    /// The last `count < LANES` values of row `n`, and zeros.
    fn load_tail<S: Simd>(self, s: S, n: usize, at: usize, count: usize) -> S::V;
    /// The scale of the block of row `n` that begins at `at`.
    fn scale(self, n: usize, at: usize) -> f32;
}

/// Weights `[N, K]` of a tensor in f32.
#[derive(Clone, Copy)]
pub struct Plain<'a> {
    pub data: &'a [f32],
    pub inner: usize,
}

impl Weights for Plain<'_> {
    const BLOCK: usize = 0;

    fn row_bytes(self) -> usize {
        4 * self.inner
    }

    fn holds(self, rows: usize, inner: usize) -> bool {
        self.inner == inner && self.data.len() == rows * inner
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, n: usize, at: usize) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { s.load(self.data.as_ptr().add(n * self.inner + at)) }
    }

    #[inline(always)]
    fn prefetch<S: Simd>(self, s: S, n: usize, at: usize) {
        s.prefetch(self.data.as_ptr().wrapping_add(n * self.inner + at).cast());
    }

    #[inline(always)]
    fn load_tail<S: Simd>(self, s: S, n: usize, at: usize, count: usize) -> S::V {
        tail(s, &self.data[n * self.inner + at..][..count])
    }

    #[inline(always)]
    fn scale(self, _: usize, _: usize) -> f32 {
        1.0
    }
}

#[inline(always)]
fn tail<S: Simd>(s: S, values: &[f32]) -> S::V {
    let mut lanes = [0.0; 16];
    lanes[..values.len()].copy_from_slice(values);
    // SAFETY: no vector has more than 16 lanes.
    unsafe { s.load(lanes.as_ptr()) }
}

/// Some rows of the weights against all rows of `x`.
struct WeightRows<'a, W> {
    w: W,
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

impl<W: Weights> Kernel for WeightRows<'_, W> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // Registers for sums: with scales, each element takes a second one for the block under way.
        let registers = if S::MANY_REGISTERS { 16 } else { 8 };
        let each = if W::BLOCK > 0 { 2 } else { 1 };
        let rows = self.x.len() / self.inner.max(1);
        let tall = registers / (4 * each);
        // A few rows of `x` stay in L1 while all weights of this task are read: once from memory, and from L2 for the
        // next rows.
        let mut m = 0;
        while m < rows {
            m += match (rows - m, tall) {
                (4.., 4) => self.columns::<S, 4, 4>(s, m),
                (4.., 2) => self.columns::<S, 2, 4>(s, m),
                (4.., _) => self.columns::<S, 1, 4>(s, m),
                (2.., _) => self.columns::<S, 2, 2>(s, m),
                // A single row is bound by memory bandwidth, which is highest for one sequential read.
                _ => self.columns::<S, 1, 1>(s, m),
            };
        }
    }
}

impl<W: Weights> WeightRows<'_, W> {
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
        if W::BLOCK == 0 {
            let mut at = 0;
            while at < full {
                // SAFETY: `at + LANES <= full <= inner`, for rows that exist.
                unsafe { self.add::<S, R, M>(s, n, &rows, at, &mut sums) };
                at += S::LANES;
            }
        } else {
            // Rows with scales are padded to whole blocks, and so is `x`.
            let mut block = 0;
            while block < inner {
                let mut part = [[s.splat(0.0); M]; R];
                for i in 0..W::BLOCK / S::LANES {
                    // SAFETY: a block is a multiple of `LANES` and `inner` of the block.
                    unsafe { self.add::<S, R, M>(s, n, &rows, block + i * S::LANES, &mut part) };
                }
                for r in 0..R {
                    let scale = s.splat(self.w.scale(n + r, block));
                    for i in 0..M {
                        sums[r][i] = s.mul_add(part[r][i], scale, sums[r][i]);
                    }
                }
                block += W::BLOCK;
            }
        }
        if W::BLOCK == 0 && full < inner {
            for r in 0..R {
                let w = self.w.load_tail(s, n + r, full, inner - full);
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
                w[r] = self.w.load(s, n + r, at);
                self.w.prefetch(s, n + r + AHEAD, at);
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

/// `y[m, width] = x[m, inner] w[width, inner]^T + bias`. With scales, `inner` must be a multiple of the
/// block.
pub fn multiply_thin<W: Weights>(
    level: Level,
    w: W,
    x: &[f32],
    inner: usize,
    bias: Option<&[f32]>,
    y: &mut [f32],
    width: usize,
) {
    assert!(inner > 0 && x.len().is_multiple_of(inner) && y.len() == x.len() / inner * width);
    assert!(w.holds(width, inner) && bias.is_none_or(|bias| bias.len() == width));
    assert!(W::BLOCK == 0 || (inner.is_multiple_of(W::BLOCK) && W::BLOCK.is_multiple_of(16)));
    let row = w.row_bytes().max(1);
    let bytes = row * width / (TASKS_PER_THREAD * rayon::current_num_threads());
    let step = (bytes.max(TASK_BYTES) / row).next_multiple_of(4).max(4);
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
