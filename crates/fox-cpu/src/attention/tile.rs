//! Register-blocked matrix product of the attention tiles.
//!
//! Scores are transposed: a tile has one *key* per row and one *query* per lane. Then the loops need no horizontal
//! reduction and no transposition: keys, values and gates are broadcast scalars, and the softmax runs down the rows.

use crate::simd::Simd;

/// `c[m x n] = a[m x k] b[k x n]`, or `c += ...` with `ADD`. Element `(r, p)` of `a` lies at
/// `a[r * lda + p]` with `ROWS`, else at `a[p * lda + r]`: the transpose of what is stored.
///
/// # Safety
/// `m` is a multiple of 8 and `n` of the vector width; all three operands are valid for the extents
/// and leading dimensions given (row `p` of `b` at `b[p * ldb ..]`, row `r` of `c` at `c[r * ldc ..]`),
/// and `c` overlaps neither `a` nor `b`.
#[inline(always)]
pub unsafe fn multiply<S: Simd, const ROWS: bool, const ADD: bool>(
    s: S,
    (m, n, k): (usize, usize, usize),
    a: *const f32,
    lda: usize,
    b: *const f32,
    ldb: usize,
    c: *mut f32,
    ldc: usize,
) {
    let wide = 2 * S::LANES;
    let mut col = 0;
    // One panel of `b` at a time stays in L1 while all rows of `a` are read.
    while col < n {
        // SAFETY: `col < n`, inside both operands.
        let (b, c) = unsafe { (b.add(col), c.add(col)) };
        let two = col + wide <= n;
        let mut row = 0;
        while row < m {
            // SAFETY: `row < m`, inside both operands.
            let (a, c) = unsafe { (a.add(if ROWS { row * lda } else { row }), c.add(row * ldc)) };
            // SAFETY: the block of rows `row..row+8` and one or two vectors of columns lies inside
            // the operands by the caller's promise.
            unsafe {
                match (S::MANY_REGISTERS, two) {
                    (true, true) => micro::<S, 8, 2, ROWS, ADD>(s, k, a, lda, b, ldb, c, ldc),
                    (true, false) => micro::<S, 8, 1, ROWS, ADD>(s, k, a, lda, b, ldb, c, ldc),
                    (false, true) => micro::<S, 4, 2, ROWS, ADD>(s, k, a, lda, b, ldb, c, ldc),
                    (false, false) => micro::<S, 4, 1, ROWS, ADD>(s, k, a, lda, b, ldb, c, ldc),
                }
            }
            row += if S::MANY_REGISTERS { 8 } else { 4 };
        }
        col += if two { wide } else { S::LANES };
    }
}

/// `MR` rows by `NV` vectors, held in registers over the whole inner dimension.
#[inline(always)]
unsafe fn micro<S: Simd, const MR: usize, const NV: usize, const ROWS: bool, const ADD: bool>(
    s: S,
    k: usize,
    a: *const f32,
    lda: usize,
    b: *const f32,
    ldb: usize,
    c: *mut f32,
    ldc: usize,
) {
    // SAFETY: every address below is one of the extents that `multiply` promises to be valid.
    unsafe {
        let mut acc = [[s.splat(0.0); NV]; MR];
        if ADD {
            for r in 0..MR {
                for v in 0..NV {
                    acc[r][v] = s.load(c.add(r * ldc + v * S::LANES));
                }
            }
        }
        for p in 0..k {
            let mut right = [s.splat(0.0); NV];
            for v in 0..NV {
                right[v] = s.load(b.add(p * ldb + v * S::LANES));
            }
            for r in 0..MR {
                let left = s.splat(*a.add(if ROWS { r * lda + p } else { p * lda + r }));
                for v in 0..NV {
                    acc[r][v] = s.mul_add(left, right[v], acc[r][v]);
                }
            }
        }
        for r in 0..MR {
            for v in 0..NV {
                s.store(c.add(r * ldc + v * S::LANES), acc[r][v]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Kernel, Level};

    struct Product<'a> {
        shape: (usize, usize, usize),
        a: &'a [f32],
        lda: usize,
        rows: bool,
        b: &'a [f32],
        c: &'a mut [f32],
    }

    impl Kernel for Product<'_> {
        type Out = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            let (_, n, _) = self.shape;
            let (a, b, c) = (self.a.as_ptr(), self.b.as_ptr(), self.c.as_mut_ptr());
            // SAFETY: the test's vectors have exactly the extents of `shape`.
            unsafe {
                if self.rows {
                    multiply::<S, true, true>(s, self.shape, a, self.lda, b, n, c, n);
                } else {
                    multiply::<S, false, true>(s, self.shape, a, self.lda, b, n, c, n);
                }
            }
        }
    }

    #[test]
    fn matches_the_plain_product_at_every_level() {
        let value = |i: usize| ((i * 7919) % 201) as f32 / 100.0 - 1.0;
        for level in Level::available() {
            for (m, n, k) in [(8, 16, 1), (16, 48, 7), (64, 64, 64), (24, 32, 33)] {
                for rows in [true, false] {
                    let a: Vec<f32> = (0..m * k).map(value).collect();
                    let b: Vec<f32> = (0..k * n).map(|i| value(i + 5)).collect();
                    let mut c: Vec<f32> = (0..m * n).map(|i| value(i + 9)).collect();
                    let mut expected = c.clone();
                    for (r, row) in expected.chunks_mut(n).enumerate() {
                        for (j, y) in row.iter_mut().enumerate() {
                            let at = |p| if rows { a[r * k + p] } else { a[p * m + r] };
                            *y += (0..k).map(|p| at(p) * b[p * n + j]).sum::<f32>();
                        }
                    }
                    let lda = if rows { k } else { m };
                    let shape = (m, n, k);
                    level.run(Product { shape, a: &a, lda, rows, b: &b, c: &mut c });
                    for (x, y) in c.iter().zip(&expected) {
                        assert!((x - y).abs() < 1e-4, "{} {m}x{n}x{k}", level.name());
                    }
                }
            }
        }
    }
}
