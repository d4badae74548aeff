//! Backward pass of a range of key blocks over the queries that visit them: all five products while a tile is in cache.

use std::ops::Range;

use fox_tensor::Mask;

use super::BLOCK;
use super::forward::{clip, hide};
use super::tile::multiply;
use super::visits::{Prefix, View};
use crate::simd::{Kernel, Simd, exp};

/// Row statistic of queries that do not exist: their weights become zero.
pub const NO_QUERY: f32 = 1e30;

/// A head's queries and output gradients, gathered: as rows `[q_len up to a block, padded_dim]` and as
/// transposed panels `[panel][head_dim][lanes]`; queries are scaled.
pub struct Queries<'a> {
    pub q: &'a [f32],
    pub q_panels: &'a [f32],
    pub d_out: &'a [f32],
    pub d_out_panels: &'a [f32],
    /// Log of the softmax denominator; [`NO_QUERY`] past the last query.
    pub lse: &'a [f32],
    /// `<d_out_i, o_i>`.
    pub delta: &'a [f32],
}

/// The backward pass of one head for a range of its key blocks.
pub struct Backward<'a> {
    pub head_dim: usize,
    pub padded_dim: usize,
    /// Keys and values of the segment, gathered.
    pub k: &'a [f32],
    pub v: &'a [f32],
    pub prefix: Option<&'a Prefix>,
    pub view: View,
    pub queries: Queries<'a>,
    pub q_len: usize,
    /// Position of the first query.
    pub offset: usize,
    /// Key blocks visited by each query block.
    pub visits: &'a [Range<usize>],
    /// The key blocks of this range; `dk` and `dv` have these rows only.
    pub keys: Range<usize>,
    pub dk: &'a mut [f32],
    pub dv: &'a mut [f32],
    /// `sum_i +-dS_ij` per key of this range.
    pub columns: &'a mut [f32],
    /// Partial query gradient of this range, unscaled, `[q_len up to a block, padded_dim]`, zeroed.
    pub dq: &'a mut [f32],
    /// `sum_j +-dS_ij` per query; only with gates.
    pub rows: Option<&'a mut [f32]>,
    /// At least [`Backward::scratch_len`] values.
    pub scratch: &'a mut [f32],
}

impl Backward<'_> {
    /// Scratch: weights, gradients of scores, column sums lane by lane.
    pub fn scratch_len() -> usize {
        2 * BLOCK * BLOCK + BLOCK * 16
    }
}

impl Kernel for Backward<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let width = 2 * S::LANES;
        let (weights, rest) = std::mem::take(&mut self.scratch).split_at_mut(BLOCK * BLOCK);
        let (grads, sums) = rest.split_at_mut(BLOCK * BLOCK);
        for block in self.keys.clone() {
            sums.fill(0.0);
            for (m, _) in self.visits.iter().enumerate().filter(|(_, keys)| keys.contains(&block)) {
                let queries = BLOCK.min(self.q_len - m * BLOCK);
                let mut spans = [None; BLOCK / 8];
                for panel in 0..queries.div_ceil(width) {
                    let lane = panel * width;
                    let n = width.min(queries - lane);
                    let first = self.offset + m * BLOCK + lane;
                    spans[panel] = clip(self.view.keys(first, first + n - 1), block);
                    let Some((from, to)) = spans[panel] else { continue };
                    let tile = Tile {
                        rows: to - from,
                        base: block * BLOCK + from,
                        query: m * BLOCK + lane,
                        first,
                        weights: &mut weights[from * BLOCK + lane..],
                        grads: &mut grads[from * BLOCK + lane..],
                        sums: &mut sums[from * S::LANES..],
                    };
                    self.scores(s, tile);
                }
                let (dp, index) = (self.padded_dim, block - self.keys.start);
                let (key, query, block_len) = (index * BLOCK * dp, m * BLOCK * dp, BLOCK * dp);
                Products {
                    padded_dim: dp,
                    weights,
                    grads,
                    q: &self.queries.q[query..][..block_len],
                    d_out: &self.queries.d_out[query..][..block_len],
                    k: &self.k[block * block_len..][..block_len],
                    dk: &mut self.dk[key..][..block_len],
                    dv: &mut self.dv[key..][..block_len],
                    dq: &mut self.dq[query..][..block_len],
                }
                .add(s, &spans[..queries.div_ceil(width)], queries);
            }
            let columns = &mut self.columns[(block - self.keys.start) * BLOCK..][..BLOCK];
            for (column, sums) in columns.iter_mut().zip(sums.chunks_exact(S::LANES)) {
                // SAFETY: the chunk has `LANES` values.
                *column = s.sum(unsafe { s.load(sums.as_ptr()) });
            }
        }
    }
}

/// The last three products of a tile, all its operands one block of [`BLOCK`] rows: `padded_dim` wide,
/// or `BLOCK` wide for `weights` and `grads`, which hold one key per row.
pub struct Products<'a> {
    pub padded_dim: usize,
    pub weights: &'a [f32],
    pub grads: &'a [f32],
    pub q: &'a [f32],
    pub d_out: &'a [f32],
    pub k: &'a [f32],
    pub dk: &'a mut [f32],
    pub dv: &'a mut [f32],
    pub dq: &'a mut [f32],
}

impl Products<'_> {
    /// `dV += P^T dO`, `dK += dS^T Q` and `dQ += dS K` over `queries` queries, where each panel of them
    /// has the keys of its span.
    #[inline(always)]
    pub fn add<S: Simd>(mut self, s: S, spans: &[Option<(usize, usize)>], queries: usize) {
        let width = 2 * S::LANES;
        if queries == BLOCK && spans.iter().all(|span| *span == Some((0, BLOCK))) {
            return self.tile(s, 0..BLOCK, 0..BLOCK);
        }
        for (panel, span) in spans.iter().enumerate() {
            if let &Some((from, to)) = span {
                self.tile(s, from..to, panel * width..(panel + 1) * width);
            }
        }
    }

    #[inline(always)]
    fn tile<S: Simd>(&mut self, s: S, keys: Range<usize>, lanes: Range<usize>) {
        let (dp, rows, n) = (self.padded_dim, keys.len(), lanes.len());
        let (query, key) = (lanes.start * dp, keys.start * dp);
        let at = keys.start * BLOCK + lanes.start;
        let operands = [self.q, self.d_out, self.k, self.dk, self.dv, self.dq];
        assert!(operands.iter().all(|x| x.len() >= BLOCK * dp));
        assert!(self.weights.len().min(self.grads.len()) >= BLOCK * BLOCK);
        // SAFETY: keys and lanes are within one block, which all operands have by the assertions; rows are multiples
        // of 8 and `dp` of the vector width.
        unsafe {
            let (p, ds) = (self.weights.as_ptr().add(at), self.grads.as_ptr().add(at));
            let (q, d_out) = (self.q.as_ptr().add(query), self.d_out.as_ptr().add(query));
            let k = self.k.as_ptr().add(key);
            let (dk, dv) = (self.dk.as_mut_ptr().add(key), self.dv.as_mut_ptr().add(key));
            let dq = self.dq.as_mut_ptr().add(query);
            multiply::<S, true, true>(s, (rows, dp, n), p, BLOCK, d_out, dp, dv, dp);
            multiply::<S, true, true>(s, (rows, dp, n), ds, BLOCK, q, dp, dk, dp);
            multiply::<S, false, true>(s, (n, dp, rows), ds, BLOCK, k, dp, dq, dp);
        }
    }
}

/// A panel of a tile: some keys against `2 * LANES` queries.
struct Tile<'t> {
    rows: usize,
    /// Position of the first key.
    base: usize,
    /// Index and position of the first query.
    query: usize,
    first: usize,
    /// Weights and score gradients, row stride `BLOCK`.
    weights: &'t mut [f32],
    grads: &'t mut [f32],
    /// Sums of the score gradients per key, one for each lane.
    sums: &'t mut [f32],
}

impl Backward<'_> {
    /// `P = exp(S - lse)` and `dS = P * (dP - delta)` of a panel.
    #[inline(always)]
    fn scores<S: Simd>(&mut self, s: S, tile: Tile<'_>) {
        let (d, dp, width) = (self.head_dim, self.padded_dim, 2 * S::LANES);
        let Tile { rows, base, query, first, weights, grads, sums } = tile;
        let shape = (rows, width, d);
        let (len, end) = ((rows - 1) * BLOCK + width, base + rows);
        assert!(self.k.len().min(self.v.len()) >= end * dp && dp >= d);
        assert!(
            self.queries.q_panels.len().min(self.queries.d_out_panels.len()) >= (query + width) * d
        );
        assert!(weights.len().min(grads.len()) >= len && sums.len() >= rows * S::LANES);
        assert!(self.prefix.is_none_or(|c| c.high().len() >= end.max(first + width)));
        // SAFETY: all operands are as long as asserted; `rows` is a multiple of 8.
        unsafe {
            let (k, v) = (self.k.as_ptr().add(base * dp), self.v.as_ptr().add(base * dp));
            let q = self.queries.q_panels.as_ptr().add(query * d);
            let d_out = self.queries.d_out_panels.as_ptr().add(query * d);
            let (weights, grads) = (weights.as_mut_ptr(), grads.as_mut_ptr());
            multiply::<S, true, false>(s, shape, k, dp, q, width, weights, BLOCK);
            multiply::<S, true, false>(s, shape, v, dp, d_out, width, grads, BLOCK);
        }
        if !self.view.sees_all(base..base + rows, first, first + width - 1) {
            hide_strided(&self.view, &mut weights[..len], width, base, first);
        }
        let bidirectional = self.view.mask == Mask::Bidirectional;
        // Sign of a score's gradient in the gate gradient: negative for keys after the query. A tile on the diagonal
        // has both signs.
        let mixed = bidirectional && base < first + width && base + rows > first;
        let sign = if bidirectional && base > first { -1.0 } else { 1.0 };
        let sign = if mixed { 0.0 } else { sign };
        for lane in (0..width).step_by(S::LANES) {
            let (i, at) = (first + lane, query + lane);
            let statistics = [self.queries.lse, self.queries.delta].map(|x| &x[at..][..S::LANES]);
            // SAFETY: offsets stay within the lengths asserted above; the statistics are slices of a vector each.
            unsafe {
                let [lse, delta] = statistics.map(|x| s.load(x.as_ptr()));
                let mut row_sum = s.splat(0.0);
                // Without gates the decay is zero.
                let (mut high, mut low) = (s.splat(0.0), s.splat(0.0));
                let mut keys = None;
                if let Some(c) = self.prefix {
                    (high, low) = (s.load(c.high()[i..].as_ptr()), s.load(c.low()[i..].as_ptr()));
                    keys = Some((c.high().as_ptr().add(base), c.low().as_ptr().add(base)));
                }
                for r in 0..rows {
                    let (p, g) = (
                        weights.as_mut_ptr().add(r * BLOCK + lane),
                        grads.as_mut_ptr().add(r * BLOCK + lane),
                    );
                    let mut score = s.sub(s.load(p), lse);
                    if let Some((key_high, key_low)) = keys {
                        let near = s.sub(high, s.splat(*key_high.add(r)));
                        let mut decay = s.add(near, s.sub(low, s.splat(*key_low.add(r))));
                        if bidirectional {
                            decay = s.min(decay, s.sub(s.splat(0.0), decay));
                        }
                        score = s.add(score, decay);
                    }
                    let weight = exp(s, score);
                    let grad = s.mul(weight, s.sub(s.load(g), delta));
                    s.store(p, weight);
                    s.store(g, grad);
                    let sum = sums.as_mut_ptr().add(r * S::LANES);
                    s.store(sum, s.mul_add(grad, s.splat(sign), s.load(sum)));
                    row_sum = s.mul_add(grad, s.splat(sign), row_sum);
                }
                if let Some(out) = self.rows.as_deref_mut() {
                    let out = out[at..][..S::LANES].as_mut_ptr();
                    s.store(out, s.add(s.load(out), row_sum));
                }
            }
        }
        if mixed {
            self.mixed_sums::<S>(rows, base, query, first, grads, sums);
        }
    }

    /// Gate sums of a tile on the diagonal of the bidirectional mask, pair by pair.
    fn mixed_sums<S: Simd>(
        &mut self,
        rows: usize,
        base: usize,
        query: usize,
        first: usize,
        grads: &[f32],
        sums: &mut [f32],
    ) {
        for r in 0..rows {
            for lane in 0..2 * S::LANES {
                let grad = grads[r * BLOCK + lane];
                let signed = if base + r <= first + lane { grad } else { -grad };
                sums[r * S::LANES + lane % S::LANES] += signed;
                if let Some(rows) = self.rows.as_deref_mut() {
                    rows[query + lane] += signed;
                }
            }
        }
    }
}

/// [`hide`] for rows of stride `BLOCK`.
#[inline(always)]
pub fn hide_strided(view: &View, scores: &mut [f32], width: usize, base: usize, first: usize) {
    for (r, row) in scores.chunks_mut(BLOCK).enumerate() {
        hide(view, &mut row[..width], width, base + r, first);
    }
}
