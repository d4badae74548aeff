//! The triangular systems of the delta rule, in blocks: products off the diagonal, substitution on it.

use crate::linear::{Matrix, multiply_here};
use crate::simd::{Level, scale_add, simd_fn};

/// Rows that are substituted one by one.
const BLOCK: usize = 16;

/// A strictly lower triangle `[n, n]`, and the strengths of the writes.
pub struct System<'a> {
    pub level: Level,
    pub n: usize,
    pub lower: &'a [f32],
    pub write: &'a [f32],
}

/// Two matrices `[n, width]` in rows `stride` apart.
pub struct Sides<'a> {
    pub x: &'a mut [f32],
    pub scaled: &'a mut [f32],
    pub width: usize,
    pub stride: usize,
}

impl System<'_> {
    /// `e_i = e_i - sum_{j < i} L_ij w_j`, `w_i = write_i e_i`: `x` is `e`, `scaled` is `w`.
    pub fn forward(&self, sides: &mut Sides<'_>) {
        let Sides { x, scaled, width, stride } = sides;
        let (n, width, stride) = (self.n, *width, *stride);
        for start in (0..n).step_by(BLOCK) {
            let rows = BLOCK.min(n - start);
            if start > 0 {
                let left = Matrix::strided(&self.lower[start * n..], rows, start, n);
                let above = Matrix::strided(scaled, start, width, stride);
                multiply_here(-1.0, left, above, &mut x[start * stride..], stride, true);
            }
            substitute(self.level, self, start, rows, x, scaled, width, stride);
        }
    }

    /// `u_j = u_j - sum_{i > j} L_ij e_i`, `e_j = write_j u_j`: `x` is `u`, `scaled` is `e`.
    pub fn backward(&self, sides: &mut Sides<'_>) {
        let Sides { x, scaled, width, stride } = sides;
        let (n, width, stride) = (self.n, *width, *stride);
        for start in (0..n).step_by(BLOCK).rev() {
            let rows = BLOCK.min(n - start);
            let end = start + rows;
            if end < n {
                let below = Matrix::strided(&self.lower[end * n + start..], n - end, rows, n);
                let right = Matrix::strided(&scaled[end * stride..], n - end, width, stride);
                multiply_here(-1.0, below.t(), right, &mut x[start * stride..], stride, true);
            }
            substitute_back(self.level, self, start, rows, x, scaled, width, stride);
        }
    }
}

simd_fn! {
    fn substitute<'k, S>(
        s, system: &'k System<'k>, start: usize, rows: usize,
        x: &'k mut [f32], scaled: &'k mut [f32], width: usize, stride: usize,
    ) {
        for i in start..start + rows {
            let row = &mut x[i * stride..][..width];
            for j in start..i {
                let factor = -system.lower[i * system.n + j];
                scale_add(s, factor, &scaled[j * stride..][..width], row);
            }
            let out = &mut scaled[i * stride..][..width];
            out.fill(0.0);
            scale_add(s, system.write[i], row, out);
        }
    }
}

simd_fn! {
    fn substitute_back<'k, S>(
        s, system: &'k System<'k>, start: usize, rows: usize,
        x: &'k mut [f32], scaled: &'k mut [f32], width: usize, stride: usize,
    ) {
        for j in (start..start + rows).rev() {
            let row = &mut x[j * stride..][..width];
            for i in j + 1..start + rows {
                let factor = -system.lower[i * system.n + j];
                scale_add(s, factor, &scaled[i * stride..][..width], row);
            }
            let out = &mut scaled[j * stride..][..width];
            out.fill(0.0);
            scale_add(s, system.write[j], row, out);
        }
    }
}
