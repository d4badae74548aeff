//! Products with weights in bf16 and int8, for any number of rows.
//!
//! Weights are stored in panels of 32 columns: one 4-byte word per column and step, steps in order, so a panel is one
//! sequential read. A few rows of activations are multiplied with a panel at a time, with their sums in registers. A
//! single row is bound by memory bandwidth; more rows reuse a panel from L2.
//!
//! Every element of the result is summed along the inputs in one order, whatever the number of rows: products are
//! batch-invariant.

use std::sync::Arc;

use fox_tensor::Result;
use rayon::prelude::*;

use super::thin::columns_per_task;
use crate::pool::Pool;
use crate::rows::rows_per_task;
use crate::shared::Shared;
use crate::simd::{BLOCK, Dot, DotKernel, Level, Simd};

/// Columns of a panel: two vectors of AVX-512, so that 8 rows have 16 sums in registers, enough for the latency.
pub const PANEL: usize = 32;

/// Prefetch distance in words: 16 KiB.
const AHEAD: usize = 4096;

/// Rows that pass over the panels of a task together, so that their activations stay in L2.
const ROW_CHUNK: usize = 128;

/// Words between the rows of packed activations: without them, rows of 2,048 inputs would compete for one set of L1.
const GAP: usize = 16;

/// Weights `[width, inner]` in panels.
#[derive(Clone, Copy)]
pub struct Panels<'a> {
    /// `[panels, steps, PANEL]`.
    pub words: &'a [u32],
    /// `[panels, inner / BLOCK, PANEL]`, or empty.
    pub scales: &'a [f32],
    /// Inputs, a multiple of `BLOCK`.
    pub inner: usize,
    /// Columns of the result.
    pub width: usize,
}

/// The format of the weights, which decides the arithmetic.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Bf16,
    Int8,
}

impl Format {
    /// Inputs per word.
    pub fn inputs(self) -> usize {
        match self {
            Format::Bf16 => 2,
            Format::Int8 => 4,
        }
    }

    #[inline]
    fn run<K: DotKernel>(self, level: Level, kernel: K) {
        match self {
            Format::Bf16 => level.run_bf16(kernel),
            Format::Int8 => level.run_int8(kernel),
        }
    }
}

/// Words of a row of packed activations: those of the steps, then for each block its scale and its offset. Enough for
/// every instruction set.
fn row_words(inner: usize) -> usize {
    inner + 2 * (inner / BLOCK) + GAP
}

/// Rounds rows of activations for the products.
struct Pack<'a> {
    /// `[rows, cols]`.
    x: &'a [f32],
    cols: usize,
    /// `[rows, row_words]`.
    out: &'a mut [u32],
    inner: usize,
}

impl DotKernel for Pack<'_> {
    #[inline(always)]
    fn run<D: Dot>(self, dot: D) {
        let (blocks, words) = (self.inner / BLOCK, BLOCK / D::INPUTS * D::WORDS);
        let rows =
            self.x.chunks_exact(self.cols).zip(self.out.chunks_exact_mut(row_words(self.inner)));
        for (x, out) in rows {
            let (out, scales) = out.split_at_mut(blocks * words);
            for (b, out) in out.chunks_exact_mut(words).enumerate() {
                let (rest, padded) = (&x[b * BLOCK..], &mut [0.0; BLOCK]);
                let block = match rest.first_chunk() {
                    Some(block) => block,
                    None => {
                        padded[..rest.len()].copy_from_slice(rest);
                        padded
                    }
                };
                let (scale, offset) = dot.pack(block, out);
                if D::SCALED {
                    (scales[2 * b], scales[2 * b + 1]) = (scale.to_bits(), offset as u32);
                }
            }
        }
    }
}

/// Some panels against all rows.
struct Multiply<'a> {
    w: Panels<'a>,
    /// `[rows, row_words]`.
    x: &'a [u32],
    first: usize,
    count: usize,
    bias: Option<&'a [f32]>,
    /// `[rows, width]`; this task writes the columns of its panels.
    y: Shared<'a>,
}

impl DotKernel for Multiply<'_> {
    #[inline(always)]
    fn run<D: Dot>(self, dot: D) {
        let rows = self.x.len() / row_words(self.w.inner);
        for start in (0..rows).step_by(ROW_CHUNK) {
            let end = rows.min(start + ROW_CHUNK);
            for panel in self.first..self.first + self.count {
                let mut m = start;
                while m < end {
                    let lanes = <D::S as Simd>::LANES;
                    // The register tile: 16 sums with AVX-512, at most 8 vectors of sums otherwise. Few rows take all
                    // columns at a time, so that the panel is read once.
                    m += match (end - m, lanes) {
                        (8.., 16) if m == start => self.panel::<D, 8, 2, true>(dot, panel, m),
                        (8.., 16) => self.panel::<D, 8, 2, false>(dot, panel, m),
                        (4.., _) if m == start => self.panel::<D, 4, 2, true>(dot, panel, m),
                        (4.., _) => self.panel::<D, 4, 2, false>(dot, panel, m),
                        (2.., 16) => self.panel::<D, 2, 2, true>(dot, panel, m),
                        (2.., 8) => self.panel::<D, 2, 4, true>(dot, panel, m),
                        (2.., _) => self.panel::<D, 2, 8, true>(dot, panel, m),
                        // The hardware prefetches one sequential read as fast; hints only cost issue slots.
                        (_, 16) => self.panel::<D, 1, 2, false>(dot, panel, m),
                        (_, 8) => self.panel::<D, 1, 4, false>(dot, panel, m),
                        _ => self.panel::<D, 1, 8, false>(dot, panel, m),
                    };
                }
            }
        }
    }
}

impl Multiply<'_> {
    /// A panel against `M` rows from `m` on, `V` vectors of columns at a time, prefetched for the first rows; returns
    /// `M`.
    #[inline(always)]
    fn panel<D: Dot, const M: usize, const V: usize, const PREFETCH: bool>(
        &self,
        dot: D,
        panel: usize,
        m: usize,
    ) -> usize {
        let columns = V * <D::S as Simd>::LANES;
        self.tile::<D, M, V, PREFETCH>(dot, panel, 0, m);
        for column in (columns..PANEL).step_by(columns) {
            if panel * PANEL + column < self.w.width {
                self.tile::<D, M, V, false>(dot, panel, column, m);
            }
        }
        M
    }

    /// `V` vectors of columns of a panel from `column` on against `M` rows from `m` on.
    #[inline(always)]
    fn tile<D: Dot, const M: usize, const V: usize, const PREFETCH: bool>(
        &self,
        dot: D,
        panel: usize,
        column: usize,
        m: usize,
    ) {
        let (s, lanes) = (dot.simd(), <D::S as Simd>::LANES);
        let (blocks, steps) = (self.w.inner / BLOCK, BLOCK / D::INPUTS);
        let words = &self.w.words[panel * blocks * steps * PANEL..][..blocks * steps * PANEL];
        let w = words.as_ptr().wrapping_add(column);
        let stride = row_words(self.w.inner);
        let x = &self.x[m * stride..][..M * stride];
        let scales = match D::SCALED {
            true => &self.w.scales[panel * blocks * PANEL..][..blocks * PANEL],
            false => &[],
        };
        let mut totals = [[s.splat(0.0); V]; M];
        for block in 0..blocks {
            let scale_of = |i: usize| i * stride + blocks * steps * D::WORDS + 2 * block;
            let mut sums = [[dot.start(s.splat(0.0), 0); V]; M];
            for i in 0..M {
                let offset = if D::SCALED { x[scale_of(i) + 1] as i32 } else { 0 };
                for j in 0..V {
                    sums[i][j] = dot.start(totals[i][j], offset);
                }
            }
            for step in block * steps..(block + 1) * steps {
                // SAFETY: the step exists, so its `PANEL` words are in `words`, of which `V` vectors from `column` on
                // are read, and its `D::WORDS` words are in each of the `M` rows of `x`.
                unsafe {
                    let w = w.add(step * PANEL);
                    let weights: [D::Weights; V] = load::<D, V>(dot, w);
                    if PREFETCH {
                        // The whole step, also for the columns that come later.
                        s.prefetch(w.wrapping_add(AHEAD).cast());
                        s.prefetch(w.wrapping_add(AHEAD + PANEL / 2).cast());
                    }
                    for i in 0..M {
                        let x = dot.splat(x.as_ptr().add(i * stride + step * D::WORDS));
                        for j in 0..V {
                            sums[i][j] = dot.add(weights[j], x, sums[i][j]);
                        }
                    }
                }
            }
            for i in 0..M {
                let scale = if D::SCALED { f32::from_bits(x[scale_of(i)]) } else { 1.0 };
                for j in 0..V {
                    let w = scales.as_ptr().wrapping_add(block * PANEL + column + j * lanes);
                    // SAFETY: with scales, a block has those of `PANEL` columns.
                    totals[i][j] = unsafe { dot.finish(sums[i][j], totals[i][j], scale, w) };
                }
            }
        }
        for (i, totals) in totals.iter().enumerate() {
            self.store::<D, V>(dot, m + i, panel * PANEL + column, totals);
        }
    }

    /// Writes columns from `n` on of row `m`, as many as the result has, with the bias.
    #[inline(always)]
    fn store<D: Dot, const V: usize>(
        &self,
        dot: D,
        m: usize,
        n: usize,
        totals: &[<D::S as Simd>::V; V],
    ) {
        let (s, lanes) = (dot.simd(), <D::S as Simd>::LANES);
        let count = (V * lanes).min(self.w.width - n);
        let mut values = [0.0; PANEL];
        for (j, total) in totals.iter().enumerate() {
            // SAFETY: `V` vectors are at most `PANEL` values.
            unsafe { s.store(values[j * lanes..].as_mut_ptr(), *total) };
        }
        // SAFETY: tasks write disjoint columns.
        let y = unsafe { self.y.slice(m * self.w.width + n, count) };
        match self.bias {
            Some(bias) => {
                let bias = &bias[n..][..count];
                y.iter_mut().zip(values.iter().zip(bias)).for_each(|(y, (x, b))| *y = x + b);
            }
            None => y.copy_from_slice(&values[..count]),
        }
    }
}

/// Weights of `V` vectors of columns.
///
/// # Safety
/// `p` must be valid for reading their words.
#[inline(always)]
unsafe fn load<D: Dot, const V: usize>(dot: D, p: *const u32) -> [D::Weights; V] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut weights = [dot.load(p); V];
        for (j, weights) in weights.iter_mut().enumerate().skip(1) {
            *weights = dot.load(p.add(j * <D::S as Simd>::LANES));
        }
        weights
    }
}

/// `y[m, width] = x[m, cols] w^T + bias`, where activations are rounded as the format of the weights asks.
pub fn multiply_panels(
    level: Level,
    pool: &Arc<Pool>,
    format: Format,
    w: Panels<'_>,
    x: &[f32],
    cols: usize,
    bias: Option<&[f32]>,
    y: &mut [f32],
) -> Result<()> {
    let panels = w.width.div_ceil(PANEL);
    assert!(cols > 0 && x.len().is_multiple_of(cols) && w.inner == cols.next_multiple_of(BLOCK));
    assert!(w.words.len() == panels * PANEL * w.inner / format.inputs());
    assert!(format == Format::Bf16 || w.scales.len() == panels * PANEL * w.inner / BLOCK);
    let rows = x.len() / cols;
    assert!(y.len() == rows * w.width && bias.is_none_or(|bias| bias.len() == w.width));
    let (stride, inner) = (row_words(w.inner), w.inner);
    let mut packed = pool.take(rows * stride)?;
    let out = packed.as_u32_mut();
    let most = rows_per_task(cols);
    if rows <= most {
        format.run(level, Pack { x, cols, out, inner });
    } else {
        let tasks = x.par_chunks(most * cols).zip(out.par_chunks_mut(most * stride));
        tasks.for_each(|(x, out)| format.run(level, Pack { x, cols, out, inner }));
    }
    let (x, y) = (packed.as_u32(), Shared::new(y));
    let bytes = 4 * inner / format.inputs() + 4 * inner / BLOCK;
    let step = columns_per_task(bytes, w.width).div_ceil(PANEL);
    let run = |first: usize| {
        let count = step.min(panels - first);
        format.run(level, Multiply { w, x, first, count, bias, y });
    };
    if panels <= step {
        run(0);
    } else {
        (0..panels.div_ceil(step)).into_par_iter().for_each(|i| run(i * step));
    }
    Ok(())
}
