//! Forward pass of one block of queries over the key blocks it visits.

use std::ops::Range;

use super::BLOCK;
use super::tile::multiply;
use super::visits::{Prefix, View};
use crate::shared::Shared;
use crate::simd::{Kernel, Simd, exp};

/// Initial maximum: finite, so that differences of maxima are never NaN.
pub const NO_MAXIMUM: f32 = -1e30;

/// The forward pass of up to [`BLOCK`] queries of one head.
pub struct Forward<'a> {
    pub head_dim: usize,
    /// Width of the gathered rows: `head_dim` rounded up to whole vectors.
    pub padded_dim: usize,
    /// Keys and values of the segment, gathered, `[k_len up to a block, padded_dim]`.
    pub k: &'a [f32],
    pub v: &'a [f32],
    pub prefix: Option<&'a Prefix>,
    pub view: View,
    /// Queries, `[R, q_width]`; this head starts at `column`.
    pub q: &'a [f32],
    pub q_width: usize,
    pub column: usize,
    pub scale: f32,
    /// First query row, number of queries and position of the first.
    pub row: usize,
    pub queries: usize,
    pub position: usize,
    /// Key blocks to visit.
    pub keys: Range<usize>,
    /// Output `[R, q_width]` and row statistics `[R, heads]`.
    pub o: Shared<'a>,
    pub lse: Shared<'a>,
    pub heads: usize,
    pub head: usize,
    /// At least [`Forward::scratch_len`] values.
    pub scratch: &'a mut [f32],
}

impl Forward<'_> {
    /// Scratch for one block: queries and output (transposed), scores, maxima and sums.
    pub fn scratch_len(head_dim: usize) -> usize {
        (2 * head_dim + BLOCK + 2) * BLOCK
    }
}

impl Kernel for Forward<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (d, width) = (self.head_dim, 2 * S::LANES);
        let (qt, rest) = std::mem::take(&mut self.scratch).split_at_mut(d * BLOCK);
        let (ot, rest) = rest.split_at_mut(d * BLOCK);
        let (scores, rest) = rest.split_at_mut(BLOCK * BLOCK);
        let (maxima, sums) = rest.split_at_mut(BLOCK);
        let sums = &mut sums[..BLOCK];
        maxima.fill(NO_MAXIMUM);
        sums.fill(0.0);
        let panels = self.begin::<S>(qt, ot);
        for block in self.keys.clone() {
            for panel in 0..panels {
                let Some((base, rows)) = self.scores(s, qt, panel, block, scores) else { continue };
                let lane = panel * width;
                let tile = Tile { scores, rows, width, base, first: self.position + lane };
                let (maxima, sums) = (&mut maxima[lane..], &mut sums[lane..]);
                let out = &mut ot[lane * d..][..d * width];
                softmax(s, tile, self.prefix, self.view.mask, maxima, sums, out);
                self.add_values(s, base, rows, scores, out);
            }
        }
        for i in 0..self.queries {
            let inverse = if sums[i] > 0.0 { 1.0 / sums[i] } else { 0.0 };
            self.write::<S>(i, ot, inverse, maxima[i] + sums[i].ln());
        }
    }
}

/// Steps shared by softmax and stick-breaking attention.
impl Forward<'_> {
    /// Transposes the queries into panels and clears the output; returns the number of panels.
    #[inline(always)]
    pub fn begin<S: Simd>(&self, qt: &mut [f32], ot: &mut [f32]) -> usize {
        let (d, width) = (self.head_dim, 2 * S::LANES);
        let panels = self.queries.div_ceil(width);
        self.check();
        ot[..panels * d * width].fill(0.0);
        let source = &self.q[self.row * self.q_width + self.column..];
        transpose_panels(source, self.q_width, self.queries, d, width, self.scale, qt);
        panels
    }

    /// Asserts the lengths that the unsafe code below relies on: gathered keys and values, and with gates the prefix
    /// sums, reach to the end of the last block, and the prefix sums a block past the last query.
    #[inline(always)]
    fn check(&self) {
        let rows = self.keys.end * BLOCK;
        assert!(self.queries <= BLOCK && self.head_dim.is_multiple_of(8));
        assert!(self.head_dim <= self.padded_dim && self.padded_dim.is_multiple_of(16));
        assert!(self.k.len().min(self.v.len()) >= rows * self.padded_dim);
        let sums = rows.max(self.position + self.queries + BLOCK);
        assert!(self.prefix.is_none_or(|c| c.high().len() >= sums));
    }

    /// Scores of the visible keys of a block for a panel of queries, `-inf` for masked pairs: returns the first key and
    /// the number of keys, if there are any.
    #[inline(always)]
    pub fn scores<S: Simd>(
        &self,
        s: S,
        qt: &[f32],
        panel: usize,
        block: usize,
        scores: &mut [f32],
    ) -> Option<(usize, usize)> {
        let (d, dp, width) = (self.head_dim, self.padded_dim, 2 * S::LANES);
        let lane = panel * width;
        let n = width.min(self.queries - lane);
        let first = self.position + lane;
        let (from, to) = clip(self.view.keys(first, first + n - 1), block)?;
        let (rows, base) = (to - from, block * BLOCK + from);
        let scores = &mut scores[..rows * width];
        assert!(block < self.keys.end && qt.len() >= (lane + width) * d);
        // SAFETY: keys reach to the end of the block by `check`, `rows` is a multiple of 8, `scores` has just been
        // cut to `rows * width` and `qt` holds this panel of `d * width` values.
        unsafe {
            let (q, k) = (qt.as_ptr().add(lane * d), self.k.as_ptr().add(base * dp));
            let scores = scores.as_mut_ptr();
            multiply::<S, true, false>(s, (rows, width, d), k, dp, q, width, scores, width);
        }
        if !self.view.sees_all(base..base + rows, first, first + width - 1) {
            hide(&self.view, scores, width, base, first);
        }
        Some((base, rows))
    }

    /// `ot[d, width] += V^T W` for the weights of `rows` keys from `base` on.
    #[inline(always)]
    pub fn add_values<S: Simd>(
        &self,
        s: S,
        base: usize,
        rows: usize,
        weights: &[f32],
        ot: &mut [f32],
    ) {
        let (d, dp, width) = (self.head_dim, self.padded_dim, 2 * S::LANES);
        let shape = (d, width, rows);
        assert!(weights.len() >= rows * width && ot.len() >= d * width);
        assert!(self.v.len() >= (base + rows) * dp);
        // SAFETY: values, weights and output are as long as asserted; `d` is a multiple of 8 by `check`.
        unsafe {
            let v = self.v.as_ptr().add(base * dp);
            let (weights, ot) = (weights.as_ptr(), ot.as_mut_ptr());
            multiply::<S, false, true>(s, shape, v, dp, weights, width, ot, width);
        }
    }

    /// Writes the output of query `i`, times `factor`, and its statistic.
    #[inline(always)]
    pub fn write<S: Simd>(&self, i: usize, ot: &[f32], factor: f32, statistic: f32) {
        let (d, width, row) = (self.head_dim, 2 * S::LANES, self.row + i);
        let (lane, at) = (i / width * width, i % width);
        // SAFETY: no other task writes this row's columns of this head.
        unsafe {
            let out = self.o.slice(row * self.q_width + self.column, d);
            for (p, o) in out.iter_mut().enumerate() {
                *o = ot[lane * d + p * width + at] * factor;
            }
            self.lse.slice(row * self.heads + self.head, 1)[0] = statistic;
        }
    }
}

/// Transposes rows of `d` values into panels of `width` lanes, `[panel][d][width]`, times `scale`;
/// lanes past the last row are zero.
#[inline(always)]
pub fn transpose_panels(
    source: &[f32],
    stride: usize,
    rows: usize,
    d: usize,
    width: usize,
    scale: f32,
    out: &mut [f32],
) {
    for (panel, out) in out.chunks_exact_mut(d * width).take(rows.div_ceil(width)).enumerate() {
        let lanes = width.min(rows - panel * width);
        if lanes < width {
            out.fill(0.0);
        }
        for lane in 0..lanes {
            let row = &source[(panel * width + lane) * stride..][..d];
            for (p, x) in row.iter().enumerate() {
                out[p * width + lane] = x * scale;
            }
        }
    }
}

/// The rows of a key block in the range `seen`, extended to multiples of 8.
#[inline(always)]
pub fn clip(seen: Range<usize>, block: usize) -> Option<(usize, usize)> {
    let start = block * BLOCK;
    let from = seen.start.max(start) - start;
    let to = seen.end.min(start + BLOCK).saturating_sub(start);
    (from < to).then(|| (from & !7, to.next_multiple_of(8)))
}

/// Sets the scores of masked pairs to `-inf`.
#[inline(always)]
pub fn hide(view: &View, scores: &mut [f32], stride: usize, base: usize, first: usize) {
    for (r, row) in scores.chunks_exact_mut(stride).enumerate() {
        let lanes = view.lanes(base + r, first, stride);
        row[..lanes.start].fill(f32::NEG_INFINITY);
        row[lanes.end..].fill(f32::NEG_INFINITY);
    }
}

/// Scores of `rows` keys from position `base` on, for `width` queries from position `first` on.
pub struct Tile<'a> {
    pub scores: &'a mut [f32],
    pub rows: usize,
    pub width: usize,
    pub base: usize,
    pub first: usize,
}

/// Online softmax: adds the decay, updates the running maxima and sums, converts scores to weights and rescales the
/// output.
#[inline(always)]
pub fn softmax<S: Simd>(
    s: S,
    tile: Tile<'_>,
    prefix: Option<&Prefix>,
    mask: fox_tensor::Mask,
    maxima: &mut [f32],
    sums: &mut [f32],
    ot: &mut [f32],
) {
    let Tile { scores, rows, width, base, first } = tile;
    assert!(scores.len() >= rows * width && maxima.len() >= width && sums.len() >= width);
    assert!(prefix.is_none_or(|c| c.high().len() >= (base + rows).max(first + width)));
    let bidirectional = mask == fox_tensor::Mask::Bidirectional;
    for lane in (0..width).step_by(S::LANES) {
        // SAFETY: all offsets stay below the lengths asserted above, and below `ot.len()`.
        unsafe {
            let scores = scores.as_mut_ptr().add(lane);
            let old = s.load(maxima.as_ptr().add(lane));
            let mut maximum = old;
            match prefix {
                None => {
                    for r in 0..rows {
                        maximum = s.max(s.load(scores.add(r * width)), maximum);
                    }
                }
                Some(c) => {
                    let i = first + lane;
                    let (high, low) =
                        (s.load(c.high()[i..].as_ptr()), s.load(c.low()[i..].as_ptr()));
                    let (key_high, key_low) =
                        (c.high().as_ptr().add(base), c.low().as_ptr().add(base));
                    for r in 0..rows {
                        let at = scores.add(r * width);
                        let near = s.sub(high, s.splat(*key_high.add(r)));
                        let mut decay = s.add(near, s.sub(low, s.splat(*key_low.add(r))));
                        if bidirectional {
                            decay = s.min(decay, s.sub(s.splat(0.0), decay));
                        }
                        let score = s.add(s.load(at), decay);
                        maximum = s.max(score, maximum);
                        s.store(at, score);
                    }
                }
            }
            let mut sum = s.splat(0.0);
            for r in 0..rows {
                let at = scores.add(r * width);
                let weight = exp(s, s.sub(s.load(at), maximum));
                sum = s.add(sum, weight);
                s.store(at, weight);
            }
            let fade = exp(s, s.sub(old, maximum));
            s.store(maxima.as_mut_ptr().add(lane), maximum);
            let sums = sums.as_mut_ptr().add(lane);
            s.store(sums, s.mul_add(s.load(sums), fade, sum));
            for p in 0..ot.len() / width {
                let at = ot.as_mut_ptr().add(p * width + lane);
                s.store(at, s.mul(s.load(at), fade));
            }
        }
    }
}
