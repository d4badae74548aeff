//! Weights in bf16 and int8, in the panels that the products read.
//!
//! Inputs are padded with zeros to whole blocks of values that share a scale, columns to whole panels. bfloat16 keeps
//! the upper half of each f32, rounded to nearest even; 8-bit values share a scale per block, the largest magnitude
//! being 127, and are stored as unsigned with an offset of 128.

use std::any::Any;
use std::sync::Arc;

use fox_tensor::{DType, Result, Storage, WeightFormat, quantize_int8};
use rayon::prelude::*;

use super::panels::{Format, PANEL, Panels, multiply_panels};
use crate::pool::{Buffer, Pool};
use crate::simd::{BLOCK, Level, to_bf16};

/// A packed matrix `[rows, cols]`.
pub struct Packed {
    rows: usize,
    cols: usize,
    format: Format,
    /// `[panels, steps, PANEL]`, a word per step and column.
    words: Buffer,
    /// `[panels, padded / BLOCK, PANEL]`; empty for bf16.
    scales: Buffer,
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
        let format = match format {
            WeightFormat::F32 => return Ok(None),
            WeightFormat::Bf16 => Format::Bf16,
            WeightFormat::Int8 => Format::Int8,
        };
        let (panels, padded) = (rows.div_ceil(PANEL), cols.next_multiple_of(BLOCK));
        let scales = if format == Format::Int8 { padded / BLOCK * PANEL } else { 0 };
        let mut packed = Packed {
            rows,
            cols,
            format,
            words: pool.zeros(panels * padded / format.inputs() * PANEL)?,
            scales: pool.zeros(panels * scales)?,
        };
        let words =
            packed.words.as_u32_mut().par_chunks_mut((padded / format.inputs() * PANEL).max(1));
        match format {
            Format::Bf16 => {
                words.zip(w.par_chunks((PANEL * cols).max(1))).for_each(|(words, w)| {
                    pack_bf16(w, cols, words);
                })
            }
            Format::Int8 => {
                let parts = words.zip(packed.scales.par_chunks_mut(scales.max(1)));
                parts.zip(w.par_chunks((PANEL * cols).max(1))).for_each(|((words, scales), w)| {
                    pack_int8(w, cols, words, scales);
                });
            }
        }
        Ok(Some(packed))
    }

    fn padded(&self) -> usize {
        self.cols.next_multiple_of(BLOCK)
    }

    /// The values as f32, `out: [rows, cols]`.
    pub fn unpack(&self, out: &mut [f32]) {
        let (padded, inputs) = (self.padded(), self.format.inputs());
        let words = self.words.as_u32();
        out.par_chunks_mut(self.cols.max(1)).enumerate().for_each(|(row, out)| {
            let (panel, column) = (row / PANEL, row % PANEL);
            for (k, out) in out.iter_mut().enumerate() {
                let word = words[(panel * padded / inputs + k / inputs) * PANEL + column];
                *out = match self.format {
                    Format::Bf16 => f32::from_bits((word >> (16 * (k % 2))) << 16),
                    Format::Int8 => {
                        let value = (word >> (8 * (k % 4))) as u8 ^ 0x80;
                        let scale = (panel * padded / BLOCK + k / BLOCK) * PANEL + column;
                        f32::from(value as i8) * self.scales[scale]
                    }
                };
            }
        });
    }

    /// `y[m, rows] = x[m, cols] w^T + bias` for any number of rows.
    pub fn multiply(
        &self,
        level: Level,
        pool: &Arc<Pool>,
        x: &[f32],
        bias: Option<&[f32]>,
        y: &mut [f32],
    ) -> Result<()> {
        if self.cols == 0 || self.rows == 0 {
            y.chunks_exact_mut(self.rows.max(1)).for_each(|y| match bias {
                Some(bias) => y.copy_from_slice(bias),
                None => y.fill(0.0),
            });
            return Ok(());
        }
        let w = Panels {
            words: self.words.as_u32(),
            scales: &self.scales,
            inner: self.padded(),
            width: self.rows,
        };
        multiply_panels(level, pool, self.format, w, x, self.cols, bias, y)
    }
}

/// Packs up to `PANEL` rows of weights.
fn pack_bf16(w: &[f32], cols: usize, words: &mut [u32]) {
    for (column, row) in w.chunks_exact(cols.max(1)).enumerate() {
        for (step, pair) in row.chunks(2).enumerate() {
            let upper = pair.get(1).map_or(0, |x| to_bf16(*x));
            words[step * PANEL + column] = u32::from(to_bf16(pair[0])) | u32::from(upper) << 16;
        }
    }
}

/// Packs up to `PANEL` rows of weights.
fn pack_int8(w: &[f32], cols: usize, words: &mut [u32], scales: &mut [f32]) {
    // Zeros, also where there are no weights.
    words.fill(0x8080_8080);
    for (column, row) in w.chunks_exact(cols.max(1)).enumerate() {
        for (b, values) in row.chunks(BLOCK).enumerate() {
            let mut rounded = [0i8; BLOCK];
            scales[b * PANEL + column] = quantize_int8(values, &mut rounded);
            for (step, four) in rounded.chunks_exact(4).enumerate() {
                let bytes = [four[0], four[1], four[2], four[3]].map(|x| x as u8 ^ 0x80);
                words[(b * BLOCK / 4 + step) * PANEL + column] = u32::from_le_bytes(bytes);
            }
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use fox_tensor::cases::Rng;

    /// Every instruction set, also without the optional instructions.
    fn levels() -> Vec<Level> {
        let mut levels = Level::available();
        levels.extend(Level::available().into_iter().map(Level::plain));
        levels
    }

    fn normals(rng: &mut Rng, len: usize) -> Vec<f32> {
        (0..len).map(|_| rng.normal() as f32).collect()
    }

    fn from_bf16(x: u16) -> f32 {
        f32::from_bits(u32::from(x) << 16)
    }

    /// The activations that a product reads.
    fn rounded(x: &[f32], cols: usize, format: WeightFormat) -> Vec<f64> {
        let block = |x: &[f32]| -> Vec<f64> {
            let largest = x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            let to = |x: &f32| match format {
                WeightFormat::Bf16 => f64::from(from_bf16(to_bf16(*x))),
                _ => {
                    f64::from((x * (127.0 / largest)).round_ties_even())
                        * f64::from(largest / 127.0)
                }
            };
            x.iter().map(to).collect()
        };
        x.chunks(cols).flat_map(|row| row.chunks(BLOCK).flat_map(block)).collect()
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
    fn packed_products_match_rounded_operands() {
        let pool = Pool::new(true);
        let mut rng = Rng::new(3);
        let shapes =
            [(1, 5, 64), (3, 37, 65), (4, 8, 7), (6, 129, 200), (9, 70, 1100), (150, 33, 130)];
        for (m, n, k) in shapes {
            let (x, w) = (normals(&mut rng, m * k), normals(&mut rng, n * k));
            let bias = normals(&mut rng, n);
            for format in [WeightFormat::Bf16, WeightFormat::Int8] {
                let packed = Packed::new(&pool, &w, n, k, format).unwrap().unwrap();
                let mut unpacked = vec![0.0; n * k];
                packed.unpack(&mut unpacked);
                assert!(w.iter().zip(&unpacked).all(|(a, b)| (a - b).abs() < 0.02));
                let read = rounded(&x, k, format);
                for level in levels() {
                    let mut y = vec![f32::NAN; m * n];
                    packed.multiply(level, &pool, &x, Some(&bias), &mut y).unwrap();
                    for (i, y) in y.iter().enumerate() {
                        let (x, w) = (&read[i / n * k..][..k], &unpacked[i % n * k..][..k]);
                        let exact: f64 = x.iter().zip(w).map(|(a, b)| a * f64::from(*b)).sum();
                        let exact = exact + f64::from(bias[i % n]);
                        let off = (f64::from(*y) - exact).abs();
                        assert!(off < 1e-4, "{level:?} {format:?} {m} {n} {k}: {y} {exact}");
                    }
                }
            }
        }
    }

    /// Every row in batches of other sizes; and every instruction set with a fused multiply-add.
    #[test]
    fn packed_products_are_batch_invariant() {
        let pool = Pool::new(false);
        let mut rng = Rng::new(4);
        let (n, k) = (61, 200);
        let (x, w) = (normals(&mut rng, 151 * k), normals(&mut rng, n * k));
        for format in [WeightFormat::Bf16, WeightFormat::Int8] {
            let packed = Packed::new(&pool, &w, n, k, format).unwrap().unwrap();
            let product = |level: Level, x: &[f32]| {
                let mut y = vec![f32::NAN; x.len() / k * n];
                packed.multiply(level, &pool, x, None, &mut y).unwrap();
                y
            };
            let mut fused = Vec::new();
            for level in levels() {
                let all = product(level, &x);
                for m in (1..21).chain([63, 64, 65, 128, 140]) {
                    assert_eq!(product(level, &x[..m * k]), all[..m * n], "{level:?} {m}");
                    assert_eq!(product(level, &x[m * k..]), all[m * n..], "{level:?} {m}");
                }
                if level.name() != "portable" {
                    fused.push(all);
                }
            }
            assert!(fused.windows(2).all(|pair| pair[0] == pair[1]), "{format:?}");
        }
    }

    #[test]
    fn not_a_number_reaches_its_row_only() {
        let pool = Pool::new(true);
        let (n, k) = (40, 130);
        let w = vec![0.5; n * k];
        for format in [WeightFormat::Bf16, WeightFormat::Int8] {
            let packed = Packed::new(&pool, &w, n, k, format).unwrap().unwrap();
            for level in levels() {
                for bad in [f32::NAN, f32::INFINITY] {
                    let mut x = vec![1.0; 3 * k];
                    x[k + 100] = bad;
                    let mut y = vec![0.0; 3 * n];
                    packed.multiply(level, &pool, &x, None, &mut y).unwrap();
                    let finite: Vec<bool> = y.iter().map(|y| y.is_finite()).collect();
                    let want = [[true; 40], [false; 40], [true; 40]].concat();
                    assert_eq!(finite, want, "{level:?} {format:?} {bad}");
                }
            }
        }
    }
}
