//! Forward pass of one block of queries.

use super::super::BLOCK;
use super::super::forward::{NO_MAXIMUM, Tile, hide, softmax};
use super::super::visits::{Prefix, View};
use super::keys::Keys;
use super::summed::Summed;
use super::tile::{BlockRows, Lanes, add_values, longest, own_scores, products, scale_rows};
use crate::shared::Shared;
use crate::simd::{Kernel, Simd, exp, update};

/// A block of keys in its own frame: decayed to its end.
#[derive(Clone, Copy)]
pub struct KeyBlock<'a> {
    pub k: BlockRows<'a>,
    pub v: BlockRows<'a>,
    /// Product of the factors, `[d]` or longer.
    pub decay: &'a [f32],
}

/// One head of one segment.
#[derive(Clone, Copy)]
pub struct Head<'a> {
    pub d: usize,
    pub keys: &'a Keys,
    /// Closed blocks before the keys.
    pub past: &'a [KeyBlock<'a>],
    pub prefix: Option<&'a Prefix>,
    pub view: View,
    /// Decay below which older blocks are dropped.
    pub threshold: Option<f64>,
    /// Sums of the values, where old blocks may be summed.
    pub summed: Option<&'a Summed>,
}

impl<'a> Head<'a> {
    /// Block `b`, counted from the first past block.
    #[inline(always)]
    pub fn block(&self, b: usize) -> KeyBlock<'a> {
        if let Some(block) = self.past.get(b) {
            return *block;
        }
        let (n, at) = (self.keys.padded, b - self.past.len());
        let rows = |x: &'a [f32]| BlockRows { data: &x[at * BLOCK * n..][..BLOCK * n], stride: n };
        KeyBlock {
            k: rows(&self.keys.far),
            v: rows(&self.keys.v),
            decay: self.keys.row(&self.keys.block, at),
        }
    }

    /// The oldest block that any of the lanes sees.
    pub fn oldest(&self, lanes: &Lanes) -> usize {
        let (first, last) = lanes.ends();
        self.view.keys(first, last).start / BLOCK
    }

    /// Whether the gates have forgotten block `b` and all older ones.
    pub fn forgets(&self, lanes: &Lanes, b: usize) -> bool {
        let Some((c, threshold)) = self.prefix.zip(self.threshold) else { return false };
        c.at(lanes.ends().0) - c.at((b + 1) * BLOCK - 1) < threshold
    }

    /// Whether all logits of block `b` and of all older ones are near 0; `xt: [d, lanes]` are the queries at its end.
    #[inline(always)]
    pub fn is_summed<S: Simd>(
        &self,
        s: S,
        b: usize,
        lanes: &Lanes,
        xt: &[f32],
        squares: &mut [f32],
    ) -> bool {
        self.summed.is_some_and(|summed| {
            let reach = longest(s, lanes.count, &xt[..self.d * lanes.count], squares);
            reach * summed.longest_key(b) <= summed.eps()
        })
    }
}

/// The forward pass of the queries of some lanes.
pub struct Forward<'a> {
    pub head: Head<'a>,
    pub lanes: Lanes,
    /// Queries `[lanes, padded]`, scaled.
    pub q: &'a [f32],
    /// Output of the head: row of the first query, values per row, first column; statistics the same way.
    pub o: (Shared<'a>, usize, usize),
    pub lse: (Shared<'a>, usize, usize),
    pub row: usize,
    pub scratch: &'a mut [f32],
}

impl Forward<'_> {
    /// Values of scratch memory: queries, output, scores, statistics, two rows.
    pub fn scratch_len(d: usize) -> usize {
        let padded = d.next_multiple_of(16);
        (padded + d + BLOCK + 3) * BLOCK + 2 * padded
    }
}

impl Kernel for Forward<'_> {
    /// Number of blocks visited.
    type Out = usize;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> usize {
        let Forward { head, lanes, q, scratch, .. } = self;
        let (d, padded, width) = (head.d, head.keys.padded, lanes.count);
        let (xt, rest) = scratch.split_at_mut(padded * width);
        let (ot, rest) = rest.split_at_mut(d * width);
        let (scores, rest) = rest.split_at_mut(BLOCK * width);
        let (maxima, rest) = rest.split_at_mut(width);
        let (sums, rest) = rest.split_at_mut(width);
        let (squares, row) = rest.split_at_mut(width);
        maxima.fill(NO_MAXIMUM);
        sums.fill(0.0);
        ot.fill(0.0);
        let own = lanes.block();
        let start = (own - head.past.len()) * BLOCK;
        own_scores(s, head.keys, start, &lanes, q, xt, scores, &mut row[..2 * padded]);
        let (mask, mut visited) = (head.view.mask, 0);
        for b in (head.oldest(&lanes)..=own).rev() {
            let (base, block) = (b * BLOCK, head.block(b));
            let mut rows = BLOCK;
            if b == own {
                rows = lanes.own_rows();
                hide(&head.view, &mut scores[..rows * width], width, base, lanes.first);
            } else {
                if head.forgets(&lanes, b) {
                    break;
                }
                if head.is_summed(s, b, &lanes, xt, squares) {
                    if let Some(summed) = head.summed {
                        add_sums(s, summed, b, width, maxima, sums, ot);
                    }
                    break;
                }
                products(s, block.k, (rows, width, d), xt, scores);
                if !head.view.sees_all(base..base + rows, lanes.first, lanes.first + width - 1) {
                    hide(&head.view, &mut scores[..rows * width], width, base, lanes.first);
                }
            }
            visited += 1;
            let tile = Tile { scores: &mut *scores, rows, width, base, first: lanes.first };
            softmax(s, tile, head.prefix, mask, maxima, sums, ot);
            add_values(s, block.v, (rows, width, d), scores, ot);
            if b < own {
                scale_rows(s, block.decay, width, xt);
            }
        }
        for i in 0..lanes.queries {
            let (lane, row) = (lanes.skip + i, self.row + i);
            let inverse = if sums[lane] > 0.0 { 1.0 / sums[lane] } else { 0.0 };
            let ((o, stride, column), (lse, heads, head)) = (self.o, self.lse);
            // SAFETY: no other task writes this row's columns of this head.
            unsafe {
                let o = o.slice(row * stride + column, d);
                o.iter_mut().enumerate().for_each(|(p, o)| *o = ot[p * width + lane] * inverse);
                lse.slice(row * heads + head, 1)[0] = maxima[lane] + sums[lane].ln();
            }
        }
        visited
    }
}

/// Adds block `b` and all older ones with logit 0: their number and the sum of their values.
#[inline(always)]
fn add_sums<S: Simd>(
    s: S,
    summed: &Summed,
    b: usize,
    width: usize,
    maxima: &mut [f32],
    sums: &mut [f32],
    ot: &mut [f32],
) {
    let count = ((b + 1) * BLOCK) as f32;
    for lane in (0..width).step_by(S::LANES) {
        let lanes = lane..lane + S::LANES;
        let (maxima, sums) = (&mut maxima[lanes.clone()], &mut sums[lanes]);
        // SAFETY: the slices have `LANES` values.
        let (fade, weight) = unsafe {
            let old = s.load(maxima.as_ptr());
            let maximum = s.max(old, s.splat(0.0));
            s.store(maxima.as_mut_ptr(), maximum);
            (exp(s, s.sub(old, maximum)), exp(s, s.sub(s.splat(0.0), maximum)))
        };
        update(s, [], sums, |[], sum| s.mul_add(sum, fade, s.mul(weight, s.splat(count))));
        for (row, &v) in ot.chunks_exact_mut(width).zip(summed.values(b)) {
            update(s, [], &mut row[lane..lane + S::LANES], |[], o| {
                s.mul_add(o, fade, s.mul(weight, s.splat(v)))
            });
        }
    }
}
