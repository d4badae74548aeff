//! Forward pass of one block of queries over its keys, newest first.

use super::super::BLOCK;
use super::super::forward::Forward;
use super::super::visits::Prefix;
use super::used_up;
use crate::simd::{Kernel, Simd, exp, log_sigmoids};

/// The forward pass of up to [`BLOCK`] queries of one head.
pub struct StickForward<'a> {
    pub queries: Forward<'a>,
    /// The logarithm of the mass that may be dropped.
    pub tolerance: f32,
}

impl Kernel for StickForward<'_> {
    /// Key blocks visited.
    type Out = usize;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> usize {
        let StickForward { mut queries, tolerance } = self;
        let (d, width) = (queries.head_dim, 2 * S::LANES);
        let (qt, rest) = std::mem::take(&mut queries.scratch).split_at_mut(d * BLOCK);
        let (ot, rest) = rest.split_at_mut(d * BLOCK);
        let (scores, rest) = rest.split_at_mut(BLOCK * BLOCK);
        let log_rests = &mut rest[..BLOCK];
        log_rests.fill(0.0);
        let panels = queries.begin::<S>(qt, ot);
        let (mut visited, count, position) = (0, queries.queries, queries.position);
        for block in queries.keys.clone().rev() {
            for panel in 0..panels {
                let Some((base, rows)) = queries.scores(s, qt, panel, block, scores) else {
                    continue;
                };
                let lane = panel * width;
                let tile = &mut scores[..rows * width];
                take(s, tile, base, position + lane, queries.prefix, &mut log_rests[lane..]);
                queries.add_values(s, base, rows, tile, &mut ot[lane * d..][..d * width]);
            }
            visited += 1;
            if used_up(&log_rests[..count], queries.prefix, position, block, tolerance) {
                break;
            }
        }
        for i in 0..count {
            queries.write::<S>(i, ot, 1.0, log_rests[i]);
        }
        visited
    }
}

/// Converts the scores of a tile (keys from `base` on, two vectors of queries from `first` on) to weights, and updates
/// the remaining sticks.
#[inline(always)]
fn take<S: Simd>(
    s: S,
    scores: &mut [f32],
    base: usize,
    first: usize,
    prefix: Option<&Prefix>,
    log_rests: &mut [f32],
) {
    let width = 2 * S::LANES;
    let rows = scores.len() / width;
    assert!(log_rests.len() >= width);
    for lane in (0..width).step_by(S::LANES) {
        let decay = Decay::new(s, prefix, first + lane, base, rows);
        // SAFETY: offsets stay below `rows * width` and `width`.
        unsafe {
            let scores = scores.as_mut_ptr().add(lane);
            let carry = log_rests.as_mut_ptr().add(lane);
            let before = s.load(carry);
            // The sum of the tile is separate from the carry: small sums keep more digits.
            let mut taken = s.splat(0.0);
            for r in (0..rows).rev() {
                let at = scores.add(r * width);
                let (log_share, log_left) = log_sigmoids(s, s.load(at));
                let log_rest = s.add(before, taken);
                let log_weight = decay.add(s, r, s.add(log_share, log_rest));
                s.store(at, exp(s, log_weight));
                taken = s.add(taken, log_left);
            }
            s.store(carry, s.add(before, taken));
        }
    }
}

/// The decay `c_i - c_j` of a vector of queries and the keys of a tile.
pub struct Decay<'a, S: Simd> {
    keys: Option<(&'a [f32], &'a [f32])>,
    high: S::V,
    low: S::V,
}

impl<'a, S: Simd> Decay<'a, S> {
    /// Queries from position `i` on, `rows` keys from position `base` on.
    #[inline(always)]
    pub fn new(s: S, prefix: Option<&'a Prefix>, i: usize, base: usize, rows: usize) -> Self {
        let zero = s.splat(0.0);
        let Some(c) = prefix else { return Decay { keys: None, high: zero, low: zero } };
        let (high, low) = (&c.high()[i..][..S::LANES], &c.low()[i..][..S::LANES]);
        // SAFETY: both slices hold a vector.
        let (high, low) = unsafe { (s.load(high.as_ptr()), s.load(low.as_ptr())) };
        Decay { keys: Some((&c.high()[base..][..rows], &c.low()[base..][..rows])), high, low }
    }

    /// `x` plus the decay towards key `r` of the tile.
    #[inline(always)]
    pub fn add(&self, s: S, r: usize, x: S::V) -> S::V {
        let Some((high, low)) = self.keys else { return x };
        let near = s.sub(self.high, s.splat(high[r]));
        s.add(x, s.add(near, s.sub(self.low, s.splat(low[r]))))
    }
}
