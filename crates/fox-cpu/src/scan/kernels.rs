//! Loops over the rows of small matrices.

use crate::simd::{dot, exp, map, scale_add, simd_fn, update};

/// Rows of a matrix with a row stride.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    pub data: &'a [f32],
    pub stride: usize,
}

impl<'a> Rows<'a> {
    pub fn new(data: &'a [f32], stride: usize) -> Self {
        Rows { data, stride }
    }

    #[inline(always)]
    pub fn row(&self, r: usize, width: usize) -> &'a [f32] {
        &self.data[r * self.stride..][..width]
    }
}

simd_fn! {
    /// `y = e^x`.
    pub fn exponential<'k, S>(s, x: &'k [f32], y: &'k mut [f32]) {
        map(s, [x], y, |[x]| exp(s, x));
    }
}

simd_fn! {
    /// `y += x`.
    pub fn add<'k, S>(s, x: &'k [f32], y: &'k mut [f32]) {
        update(s, [x], y, |[x], y| s.add(x, y));
    }
}

simd_fn! {
    /// `y = a x b`, element by element.
    pub fn multiply<'k, S>(s, a: f32, x: &'k [f32], b: &'k [f32], y: &'k mut [f32]) {
        let a = s.splat(a);
        map(s, [x, b], y, |[x, b]| s.mul(s.mul(a, x), b));
    }
}

simd_fn! {
    /// `y = x y`, element by element.
    pub fn multiply_into<'k, S>(s, x: &'k [f32], y: &'k mut [f32]) {
        update(s, [x], y, |[x], y| s.mul(x, y));
    }
}

simd_fn! {
    /// `y += x b`, element by element.
    pub fn add_products<'k, S>(s, x: &'k [f32], b: &'k [f32], y: &'k mut [f32]) {
        update(s, [x, b], y, |[x, b], y| s.mul_add(x, b, y));
    }
}

simd_fn! {
    /// `y_r = a f_r x_r`, row by row; rows of `y` begin `stride` apart.
    pub fn scale_rows<'k, S>(
        s, a: f32, factors: &'k [f32], x: Rows<'k>, width: usize, y: &'k mut [f32], stride: usize,
    ) {
        for (r, factor) in factors.iter().enumerate() {
            let factor = s.splat(a * factor);
            map(s, [x.row(r, width)], &mut y[r * stride..][..width], |[x]| s.mul(factor, x));
        }
    }
}

simd_fn! {
    /// `y_r = a f_r y_r`, row by row.
    pub fn scale_own_rows<'k, S>(
        s, a: f32, factors: &'k [f32], width: usize, y: &'k mut [f32], stride: usize,
    ) {
        for (y, factor) in y.chunks_mut(stride).zip(factors) {
            let factor = s.splat(a * factor);
            update(s, [], &mut y[..width], |[], y| s.mul(factor, y));
        }
    }
}

simd_fn! {
    /// `y_r = a y_r` for every row that begins in `y`.
    pub fn scale_columns<'k, S>(s, a: f32, width: usize, y: &'k mut [f32], stride: usize) {
        let factor = s.splat(a);
        for y in y.chunks_mut(stride) {
            update(s, [], &mut y[..width], |[], y| s.mul(factor, y));
        }
    }
}

simd_fn! {
    /// `y_r += a f_r x_r`, row by row.
    pub fn add_scaled_rows<'k, S>(
        s, a: f32, factors: &'k [f32], x: Rows<'k>, width: usize, y: &'k mut [f32], stride: usize,
    ) {
        for (r, factor) in factors.iter().enumerate() {
            scale_add(s, a * factor, x.row(r, width), &mut y[r * stride..][..width]);
        }
    }
}

simd_fn! {
    /// `out_r += f_r <x_r, y_r>`.
    pub fn add_row_dots<'k, S>(
        s, factors: &'k [f32], x: Rows<'k>, y: Rows<'k>, width: usize, out: &'k mut [f32],
    ) {
        for (r, (out, factor)) in out.iter_mut().zip(factors).enumerate() {
            *out += factor * dot(s, x.row(r, width), y.row(r, width));
        }
    }
}

simd_fn! {
    /// `sum_r <x_r, y_r>`.
    pub fn block_dot<'k, S>(s, rows: usize, x: Rows<'k>, y: Rows<'k>, width: usize) -> f32 {
        (0..rows).map(|r| dot(s, x.row(r, width), y.row(r, width))).sum()
    }
}

simd_fn! {
    /// `D_ij = a_{j+1} ... a_i` for `j <= i`, 0 above; `[n, n]` for `n` decays.
    pub fn decay_matrix<'k, S>(s, decay: &'k [f32], d: &'k mut [f32]) {
        let n = decay.len();
        for i in 0..n {
            let (above, row) = d.split_at_mut(i * n);
            let row = &mut row[..n];
            row[i..].fill(0.0);
            if i > 0 {
                let factor = s.splat(decay[i]);
                map(s, [&above[(i - 1) * n..][..i]], &mut row[..i], |[x]| s.mul(factor, x));
            }
            row[i] = 1.0;
        }
    }
}

simd_fn! {
    /// With `G = B * P`, element by element: adds its row sums to `sums` and subtracts its column
    /// sums. `scratch` has `n` elements.
    pub fn flow_sums<'k, S>(
        s, n: usize, b: &'k [f32], p: &'k [f32], sums: &'k mut [f32], scratch: &'k mut [f32],
    ) {
        scratch.fill(0.0);
        for i in 0..n {
            let (b, p) = (&b[i * n..][..n], &p[i * n..][..n]);
            sums[i] += dot(s, b, p);
            update(s, [b, p], scratch, |[b, p], sum| s.mul_add(b, p, sum));
        }
        sums.iter_mut().zip(scratch).for_each(|(sum, column)| *sum -= *column);
    }
}

simd_fn! {
    /// Running products of rows: `p_i = a_0 * ... * a_i`, all `[n, width]`.
    pub fn prefix_products<'k, S>(s, width: usize, a: &'k [f32], p: &'k mut [f32]) {
        for i in 0..a.len() / width {
            let (above, row) = p.split_at_mut(i * width);
            let (a, row) = (&a[i * width..][..width], &mut row[..width]);
            match i {
                0 => row.copy_from_slice(a),
                _ => map(s, [a, &above[(i - 1) * width..]], row, |[a, p]| s.mul(a, p)),
            }
        }
    }
}

simd_fn! {
    /// Running products from the end: `p_i = a_{i+1} * ... * a_{n-1}`, all `[n, width]`.
    pub fn suffix_products<'k, S>(s, width: usize, a: &'k [f32], p: &'k mut [f32]) {
        let n = a.len() / width;
        for i in (0..n).rev() {
            let (row, below) = p[i * width..].split_at_mut(width);
            match i + 1 == n {
                true => row.fill(1.0),
                false => {
                    let a = &a[(i + 1) * width..][..width];
                    map(s, [a, &below[..width]], row, |[a, p]| s.mul(a, p));
                }
            }
        }
    }
}

/// Sums from the end, in place: `x_i = sum_{j >= i} x_j` of rows of `width`.
pub fn suffix_sums(width: usize, x: &mut [f32]) {
    for i in (0..(x.len() / width).saturating_sub(1)).rev() {
        let (row, below) = x[i * width..].split_at_mut(width);
        row.iter_mut().zip(below).for_each(|(x, sum)| *x += *sum);
    }
}
