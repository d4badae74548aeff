//! Backward pass of one block of queries over its keys, newest first: all five products while a tile is in cache.
//!
//! With `w` the weights, `b` the fractions and `g_j = w_j <d_out, v_j>` the gradient of `ln w_j`, the gradient of a
//! score is `g_j - b_j sum_{l <= j} g_l`. The sum over a row is `<d_out, o>`; its remainder after the newer tiles is
//! carried along, like the stick, and inside a tile the sums run from the oldest key on. So a fraction near 1 is
//! multiplied by the rounding error of a sum only while the stick is not used up.

use std::ops::Range;

use super::super::BLOCK;
use super::super::backward::{Products, Queries, hide_strided};
use super::super::forward::clip;
use super::super::tile::multiply;
use super::super::visits::{Prefix, View};
use super::forward::Decay;
use super::used_up;
use crate::simd::{Kernel, Simd, exp, log_sigmoids};

/// The backward pass of up to [`BLOCK`] queries of one head.
pub struct StickBackward<'a> {
    pub head_dim: usize,
    pub padded_dim: usize,
    /// Keys and values of the segment, gathered.
    pub k: &'a [f32],
    pub v: &'a [f32],
    pub prefix: Option<&'a Prefix>,
    pub view: View,
    pub tolerance: f32,
    /// All queries of the head.
    pub queries: Queries<'a>,
    /// Number of this block, its queries, and the position of the first.
    pub m: usize,
    pub count: usize,
    pub position: usize,
    /// Key blocks it may visit.
    pub keys: Range<usize>,
    /// Gradients of all keys and values, which this block adds to.
    pub dk: &'a mut [f32],
    pub dv: &'a mut [f32],
    /// `sum_i g_ij` per key, which this block adds to.
    pub columns: &'a mut [f32],
    /// Gradient of this block's queries, unscaled, `[BLOCK, padded_dim]`, zeroed.
    pub dq: &'a mut [f32],
    /// `sum_j g_ij` per query of this block.
    pub rows: &'a mut [f32],
    /// At least [`StickBackward::scratch_len`] values.
    pub scratch: &'a mut [f32],
}

impl StickBackward<'_> {
    /// Scratch: weights, gradients of scores, fractions, sums of `g` lane by lane, and the two carries.
    pub fn scratch_len() -> usize {
        3 * BLOCK * BLOCK + BLOCK * 16 + 2 * BLOCK
    }
}

/// Running values of a block's rows, from newer keys to older ones.
struct Carry<'a> {
    /// Logarithm of the remaining stick.
    log_rests: &'a mut [f32],
    /// Sum of `g` over the older keys.
    ahead: &'a mut [f32],
    /// Whether there are older blocks of keys.
    more: bool,
}

/// Logarithm of a remaining stick that is below the rounding error of the sums of `g`. The carried sums fade in from
/// this to this plus one.
const ROUNDING: f32 = -18.0;

/// A panel of a tile: some keys against `2 * LANES` queries.
struct Tile<'t> {
    keys: usize,
    /// Position of the first key.
    base: usize,
    /// First query of the panel, within the block.
    lane: usize,
    /// Weights and score gradients, row stride `BLOCK`.
    weights: &'t mut [f32],
    grads: &'t mut [f32],
    /// Scratch for the fractions, row stride `2 * LANES`.
    fractions: &'t mut [f32],
    /// Sums of `g` per key, one for each lane.
    sums: &'t mut [f32],
}

impl Kernel for StickBackward<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (dp, width) = (self.padded_dim, 2 * S::LANES);
        let panels = self.count.div_ceil(width);
        let (weights, rest) = std::mem::take(&mut self.scratch).split_at_mut(BLOCK * BLOCK);
        let (grads, rest) = rest.split_at_mut(BLOCK * BLOCK);
        let (fractions, rest) = rest.split_at_mut(BLOCK * BLOCK);
        let (sums, rest) = rest.split_at_mut(BLOCK * 16);
        let (log_rests, ahead) = rest.split_at_mut(BLOCK);
        log_rests.fill(0.0);
        ahead[..BLOCK].copy_from_slice(&self.queries.delta[self.m * BLOCK..][..BLOCK]);
        let mut carry = Carry { log_rests, ahead, more: true };
        for block in self.keys.clone().rev() {
            carry.more = block > self.keys.start;
            sums.fill(0.0);
            let mut spans = [None; BLOCK / 8];
            for panel in 0..panels {
                let lane = panel * width;
                let n = width.min(self.count - lane);
                let first = self.position + lane;
                spans[panel] = clip(self.view.keys(first, first + n - 1), block);
                let Some((from, to)) = spans[panel] else { continue };
                let tile = Tile {
                    keys: to - from,
                    base: block * BLOCK + from,
                    lane,
                    weights: &mut weights[from * BLOCK + lane..],
                    grads: &mut grads[from * BLOCK + lane..],
                    fractions,
                    sums: &mut sums[from * S::LANES..],
                };
                self.scores(s, tile, &mut carry);
            }
            let (at, query, len) = (block * BLOCK * dp, self.m * BLOCK * dp, BLOCK * dp);
            Products {
                padded_dim: dp,
                weights,
                grads,
                q: &self.queries.q[query..][..len],
                d_out: &self.queries.d_out[query..][..len],
                k: &self.k[at..][..len],
                dk: &mut self.dk[at..][..len],
                dv: &mut self.dv[at..][..len],
                dq: self.dq,
            }
            .add(s, &spans[..panels], self.count);
            let columns = &mut self.columns[block * BLOCK..][..BLOCK];
            for (column, sums) in columns.iter_mut().zip(sums.chunks_exact(S::LANES)) {
                // SAFETY: the chunk has `LANES` values.
                *column += s.sum(unsafe { s.load(sums.as_ptr()) });
            }
            let rests = &carry.log_rests[..self.count];
            if used_up(rests, self.prefix, self.position, block, self.tolerance) {
                break;
            }
        }
    }
}

impl StickBackward<'_> {
    /// Weights and gradients of scores of a panel.
    #[inline(always)]
    fn scores<S: Simd>(&mut self, s: S, tile: Tile<'_>, carry: &mut Carry<'_>) {
        let (d, dp, width) = (self.head_dim, self.padded_dim, 2 * S::LANES);
        let Tile { keys, base, lane, weights, grads, fractions, sums } = tile;
        let (shape, panel) = ((keys, width, d), (self.m * BLOCK + lane) * d);
        let first = self.position + lane;
        let end = (keys - 1) * BLOCK + width;
        assert!(self.k.len().min(self.v.len()) >= (base + keys) * dp && dp >= d);
        assert!(
            self.queries.q_panels.len().min(self.queries.d_out_panels.len()) >= panel + d * width
        );
        assert!(weights.len().min(grads.len()) >= end && sums.len() >= keys * S::LANES);
        // SAFETY: all operands are as long as asserted; `keys` is a multiple of 8.
        unsafe {
            let (k, v) = (self.k.as_ptr().add(base * dp), self.v.as_ptr().add(base * dp));
            let q = self.queries.q_panels.as_ptr().add(panel);
            let d_out = self.queries.d_out_panels.as_ptr().add(panel);
            let (weights, grads) = (weights.as_mut_ptr(), grads.as_mut_ptr());
            multiply::<S, true, false>(s, shape, k, dp, q, width, weights, BLOCK);
            multiply::<S, true, false>(s, shape, v, dp, d_out, width, grads, BLOCK);
        }
        if !self.view.sees_all(base..base + keys, first, first + width - 1) {
            hide_strided(&self.view, &mut weights[..end], width, base, first);
        }
        assert!(fractions.len() >= keys * width);
        assert!(carry.log_rests.len().min(carry.ahead.len()).min(self.rows.len()) >= lane + width);
        for at in (0..width).step_by(S::LANES) {
            let decay = Decay::new(s, self.prefix, first + at, base, keys);
            // SAFETY: offsets stay within the lengths asserted above.
            unsafe {
                let log_rest = carry.log_rests.as_mut_ptr().add(lane + at);
                let ahead = carry.ahead.as_mut_ptr().add(lane + at);
                let before = s.load(log_rest);
                // The sums of the tile are separate from the carry: small sums keep more digits.
                let (mut taken, mut passed) = (s.splat(0.0), s.splat(0.0));
                for r in (0..keys).rev() {
                    let p = weights.as_mut_ptr().add(r * BLOCK + at);
                    let g = grads.as_mut_ptr().add(r * BLOCK + at);
                    let (log_fraction, log_left) = log_sigmoids(s, s.load(p));
                    let log_weight = s.add(log_fraction, s.add(before, taken));
                    let weight = exp(s, decay.add(s, r, log_weight));
                    let grad = s.mul(weight, s.load(g));
                    s.store(p, weight);
                    s.store(g, grad);
                    s.store(fractions.as_mut_ptr().add(r * width + at), exp(s, log_fraction));
                    let sum = sums.as_mut_ptr().add(r * S::LANES);
                    s.store(sum, s.add(s.load(sum), grad));
                    taken = s.add(taken, log_left);
                    passed = s.add(passed, grad);
                }
                let after = s.add(before, taken);
                s.store(log_rest, after);
                let mut older = s.splat(0.0);
                if carry.more {
                    let counts = s.sub(after, s.splat(ROUNDING));
                    let counts = s.min(s.splat(1.0), s.max(s.splat(0.0), counts));
                    older = s.mul(counts, s.sub(s.load(ahead), passed));
                }
                s.store(ahead, older);
                for r in 0..keys {
                    let g = grads.as_mut_ptr().add(r * BLOCK + at);
                    let (grad, fraction) =
                        (s.load(g), s.load(fractions.as_ptr().add(r * width + at)));
                    older = s.add(older, grad);
                    s.store(g, s.sub(grad, s.mul(fraction, older)));
                }
                let row = self.rows.as_mut_ptr().add(lane + at);
                s.store(row, s.add(s.load(row), passed));
            }
        }
    }
}
