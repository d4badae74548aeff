//! Weights in bf16 and int8, for products with few rows, which are bound by memory bandwidth.
//!
//! Rows are padded with zeros to whole blocks of values that share a scale. bfloat16 keeps the upper half of each
//! f32, rounded to nearest even; 8-bit values share a scale per block, the largest magnitude being 127.

use std::any::Any;
use std::sync::Arc;

use fox_tensor::{DType, INT8_BLOCK as BLOCK, Result, Storage, WeightFormat, quantize_int8};
use rayon::prelude::*;

use super::product::{Matrix, multiply_columns};
use super::thin::{Weights, multiply_thin};
use crate::pool::{Buffer, Pool};
use crate::simd::{Level, Simd};

/// Rows that are unpacked at once for products with many rows.
const UNPACKED_ROWS: usize = 1024;

/// A packed matrix `[rows, cols]`.
pub struct Packed {
    rows: usize,
    cols: usize,
    values: Values,
}

enum Values {
    /// `[rows, padded]`.
    Bf16(Buffer),
    /// `[rows, padded]`, and scales `[rows, padded / BLOCK]`.
    Int8(Buffer, Buffer),
}

#[derive(Clone, Copy)]
struct Bf16<'a> {
    data: &'a [u16],
    padded: usize,
}

#[derive(Clone, Copy)]
struct Int8<'a> {
    data: &'a [i8],
    scales: &'a [f32],
    padded: usize,
}

impl Packed {
    /// Packs `w: [rows, cols]`; `None` for a format that needs no packing.
    pub fn new(
        pool: &Arc<Pool>,
        w: &[f32],
        rows: usize,
        cols: usize,
        format: WeightFormat,
    ) -> Result<Option<Self>> {
        let padded = cols.next_multiple_of(BLOCK);
        let values = match format {
            WeightFormat::F32 => return Ok(None),
            WeightFormat::Bf16 => {
                let mut data = pool.zeros(rows * padded / 2)?;
                let out = data.as_u16_mut().par_chunks_mut(padded);
                out.zip(w.par_chunks(cols)).for_each(|(out, row)| {
                    out.iter_mut().zip(row).for_each(|(out, x)| *out = to_bf16(*x));
                });
                Values::Bf16(data)
            }
            WeightFormat::Int8 => {
                let mut data = pool.zeros(rows * padded / 4)?;
                let mut scales = pool.zeros(rows * padded / BLOCK)?;
                let out = data.as_i8_mut().par_chunks_mut(padded);
                let scales_out = scales.par_chunks_mut(padded / BLOCK);
                out.zip(scales_out).zip(w.par_chunks(cols)).for_each(|((out, scales), row)| {
                    let blocks = out.chunks_mut(BLOCK).zip(row.chunks(BLOCK));
                    for ((out, x), scale) in blocks.zip(scales) {
                        *scale = quantize_int8(x, out);
                    }
                });
                Values::Int8(data, scales)
            }
        };
        Ok(Some(Packed { rows, cols, values }))
    }

    fn padded(&self) -> usize {
        self.cols.next_multiple_of(BLOCK)
    }

    /// The values as f32, rows `first ..` as many as fit `out: [.., cols]`.
    pub fn unpack(&self, first: usize, out: &mut [f32]) {
        let padded = self.padded();
        out.par_chunks_mut(self.cols).enumerate().for_each(|(r, out)| {
            let row = first + r;
            match &self.values {
                Values::Bf16(data) => {
                    let values = &data.as_u16()[row * padded..][..self.cols];
                    out.iter_mut().zip(values).for_each(|(out, x)| *out = from_bf16(*x));
                }
                Values::Int8(data, scales) => {
                    let values = &data.as_i8()[row * padded..][..self.cols];
                    let scales = &scales[row * (padded / BLOCK)..];
                    for (c, (out, x)) in out.iter_mut().zip(values).enumerate() {
                        *out = f32::from(*x) * scales[c / BLOCK];
                    }
                }
            }
        });
    }

    /// `y[m, rows] = x[m, cols] w^T + bias`, as [`multiply_thin`].
    pub fn multiply_thin(
        &self,
        level: Level,
        pool: &Arc<Pool>,
        x: &[f32],
        bias: Option<&[f32]>,
        y: &mut [f32],
    ) -> Result<()> {
        let padded = self.padded();
        let copy;
        let x = if padded == self.cols {
            x
        } else {
            let mut wider = pool.zeros(x.len() / self.cols * padded)?;
            for (wide, row) in wider.chunks_mut(padded).zip(x.chunks(self.cols)) {
                wide[..self.cols].copy_from_slice(row);
            }
            copy = wider;
            &copy
        };
        match &self.values {
            Values::Bf16(data) => {
                let w = Bf16 { data: data.as_u16(), padded };
                multiply_thin(level, w, x, padded, bias, y, self.rows);
            }
            Values::Int8(data, scales) => {
                let w = Int8 { data: data.as_i8(), scales, padded };
                multiply_thin(level, w, x, padded, bias, y, self.rows);
            }
        }
        Ok(())
    }

    /// `y[m, rows] += x[m, cols] w^T`, unpacking some rows at a time for the matrix product.
    pub fn multiply(&self, pool: &Arc<Pool>, x: &[f32], y: &mut [f32]) -> Result<()> {
        let m = x.len() / self.cols;
        let mut part = pool.take(UNPACKED_ROWS.min(self.rows) * self.cols)?;
        for first in (0..self.rows).step_by(UNPACKED_ROWS) {
            let count = UNPACKED_ROWS.min(self.rows - first);
            let w = &mut part[..count * self.cols];
            self.unpack(first, w);
            let (a, b) = (Matrix::new(x, m, self.cols), Matrix::new(w, count, self.cols).t());
            multiply_columns(a, b, y, self.rows, first);
        }
        Ok(())
    }
}

impl Storage for Packed {
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }

    fn holds(&self, len: usize, dtype: DType) -> bool {
        self.rows * self.cols == len && dtype == DType::F32
    }

    fn is_packed(&self) -> bool {
        true
    }
}

impl Weights for Bf16<'_> {
    const BLOCK: usize = 0;

    fn row_bytes(self) -> usize {
        2 * self.padded
    }

    fn holds(self, rows: usize, inner: usize) -> bool {
        self.padded == inner && self.data.len() == rows * inner
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, n: usize, at: usize) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { s.load_bf16(self.data.as_ptr().add(n * self.padded + at)) }
    }

    #[inline(always)]
    fn prefetch<S: Simd>(self, s: S, n: usize, at: usize) {
        s.prefetch(self.data.as_ptr().wrapping_add(n * self.padded + at).cast());
    }

    #[inline(always)]
    fn load_tail<S: Simd>(self, s: S, _: usize, _: usize, _: usize) -> S::V {
        // Rows are padded to whole vectors.
        s.splat(0.0)
    }

    #[inline(always)]
    fn scale(self, _: usize, _: usize) -> f32 {
        1.0
    }
}

impl Weights for Int8<'_> {
    const BLOCK: usize = BLOCK;

    fn row_bytes(self) -> usize {
        self.padded + 4 * self.padded / BLOCK
    }

    fn holds(self, rows: usize, inner: usize) -> bool {
        self.padded == inner && self.data.len() == rows * inner
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, n: usize, at: usize) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { s.load_i8(self.data.as_ptr().add(n * self.padded + at)) }
    }

    #[inline(always)]
    fn prefetch<S: Simd>(self, s: S, n: usize, at: usize) {
        s.prefetch(self.data.as_ptr().wrapping_add(n * self.padded + at).cast());
    }

    #[inline(always)]
    fn load_tail<S: Simd>(self, s: S, _: usize, _: usize, _: usize) -> S::V {
        // Rows are padded to whole blocks.
        s.splat(0.0)
    }

    #[inline(always)]
    fn scale(self, n: usize, at: usize) -> f32 {
        self.scales[(n * self.padded + at) / BLOCK]
    }
}

/// The nearest bfloat16, ties to even; NaN stays NaN.
fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

fn from_bf16(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fox_tensor::cases::Rng;

    fn normals(rng: &mut Rng, len: usize) -> Vec<f32> {
        (0..len).map(|_| rng.normal() as f32).collect()
    }

    #[test]
    fn bf16_rounds_to_nearest_even() {
        for (x, want) in [
            (1.0, 1.0),
            (1.0 + 1.0 / 256.0, 1.0),
            (1.0 + 3.0 / 256.0, 1.015625),
            (-3.3, -3.296875),
            (f32::MAX, f32::INFINITY),
            (f32::NEG_INFINITY, f32::NEG_INFINITY),
            (0.0, 0.0),
        ] {
            assert_eq!(from_bf16(to_bf16(x)), want, "{x}");
        }
        assert!(from_bf16(to_bf16(f32::NAN)).is_nan());
    }

    #[test]
    fn packed_products_match_unpacked_weights() {
        let pool = Pool::new(true);
        let mut rng = Rng::new(3);
        for level in Level::available() {
            for (m, n, k) in [(1, 5, 64), (3, 37, 65), (4, 8, 7), (6, 129, 200), (9, 70, 1100)] {
                let (x, w) = (normals(&mut rng, m * k), normals(&mut rng, n * k));
                let bias = normals(&mut rng, n);
                for format in [WeightFormat::Bf16, WeightFormat::Int8] {
                    let packed = Packed::new(&pool, &w, n, k, format).unwrap().unwrap();
                    let mut unpacked = vec![0.0; n * k];
                    packed.unpack(0, &mut unpacked);
                    assert!(w.iter().zip(&unpacked).all(|(a, b)| (a - b).abs() < 0.02));
                    let mut y = vec![f32::NAN; m * n];
                    packed.multiply_thin(level, &pool, &x, Some(&bias), &mut y).unwrap();
                    let mut many = bias.repeat(m);
                    packed.multiply(&pool, &x, &mut many).unwrap();
                    for (i, (thin, many)) in y.iter().zip(&many).enumerate() {
                        let (x, w) = (&x[i / n * k..][..k], &unpacked[i % n * k..][..k]);
                        let exact: f64 =
                            x.iter().zip(w).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                        let exact = exact + f64::from(bias[i % n]);
                        for y in [thin, many] {
                            assert!(
                                (f64::from(*y) - exact).abs() < 1e-4,
                                "{m} {n} {k}: {y} {exact}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn packed_products_are_batch_invariant() {
        let pool = Pool::new(false);
        let mut rng = Rng::new(4);
        let (n, k) = (61, 200);
        let (x, w) = (normals(&mut rng, 19 * k), normals(&mut rng, n * k));
        for level in Level::available() {
            for format in [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Int8] {
                let packed = Packed::new(&pool, &w, n, k, format).unwrap();
                let product = |x: &[f32]| {
                    let mut y = vec![f32::NAN; x.len() / k * n];
                    match &packed {
                        Some(packed) => {
                            packed.multiply_thin(level, &pool, x, None, &mut y).unwrap();
                        }
                        None => {
                            let plain = super::super::thin::Plain { data: &w, inner: k };
                            multiply_thin(level, plain, x, k, None, &mut y, n);
                        }
                    }
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
}
