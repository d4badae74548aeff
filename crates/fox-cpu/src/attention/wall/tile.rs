//! Scores of one block of queries: its own block of keys by sub-blocks, older blocks by one product each.

use std::ops::Range;

use super::super::BLOCK;
use super::super::tile::multiply;
use super::SUB;
use super::keys::Keys;
use crate::simd::{Simd, dot, map, update};

/// Queries whose positions lie in one block of keys. Lanes are positions: lane 0 is a multiple of [`SUB`], and lanes
/// without a query have queries of 0.
#[derive(Clone, Copy)]
pub struct Lanes {
    /// Position of lane 0.
    pub first: usize,
    /// Number of lanes, a multiple of [`SUB`].
    pub count: usize,
    /// Lanes before the first query, and number of queries.
    pub skip: usize,
    pub queries: usize,
}

impl Lanes {
    /// The lanes of the positions `range`, which lie in one block.
    pub fn new(range: &Range<usize>) -> Self {
        let first = range.start / SUB * SUB;
        let count = range.end.next_multiple_of(SUB) - first;
        Lanes { first, count, skip: range.start - first, queries: range.len() }
    }

    /// Splits positions at the borders of blocks.
    pub fn blocks(positions: Range<usize>) -> Vec<Lanes> {
        let blocks = positions.start / BLOCK..positions.end.div_ceil(BLOCK);
        let clip = |block: usize| {
            (block * BLOCK).max(positions.start)..((block + 1) * BLOCK).min(positions.end)
        };
        blocks.map(|block| Lanes::new(&clip(block))).collect()
    }

    /// The block of keys that the positions are in.
    pub fn block(&self) -> usize {
        self.first / BLOCK
    }

    /// Rows of the own block that any lane sees.
    pub fn own_rows(&self) -> usize {
        self.first % BLOCK + self.count
    }

    /// Position of the first and of the last query.
    pub fn ends(&self) -> (usize, usize) {
        (self.first + self.skip, self.first + self.skip + self.queries - 1)
    }

    /// The sub-blocks of lanes, with their numbers inside the block.
    pub fn subs(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let before = self.first % BLOCK / SUB;
        (0..self.count / SUB).map(move |u| (u, before + u))
    }
}

/// Scores `[own_rows, lanes]` of the own block of keys, which starts at row `start` of `keys`, and the queries at the
/// start of that block: `q: [lanes, padded]`, scaled, to `xt: [padded, lanes]`. Scores of keys after a query are `-inf`.
/// `row: [2 * padded]` is scratch.
#[inline(always)]
pub fn own_scores<S: Simd>(
    s: S,
    keys: &Keys,
    start: usize,
    lanes: &Lanes,
    q: &[f32],
    xt: &mut [f32],
    scores: &mut [f32],
    row: &mut [f32],
) {
    let (n, width) = (keys.padded, lanes.count);
    let (factor, decayed) = row.split_at_mut(n);
    scores[..lanes.own_rows() * width].fill(f32::NEG_INFINITY);
    for (u, sub) in lanes.subs() {
        let base = start + sub * SUB;
        factor.fill(1.0);
        for i in 0..SUB {
            let lane = u * SUB + i;
            update(s, [keys.row(&keys.e, base + i)], factor, |[e], f| s.mul(e, f));
            let query = &q[lane * n..][..n];
            for p in 0..n {
                xt[p * width + lane] = query[p] * factor[p];
            }
        }
        // Pairs inside the sub-block: the key decays step by step.
        for j in 0..SUB {
            decayed.copy_from_slice(keys.row(&keys.k, base + j));
            for i in j..SUB {
                if i > j {
                    update(s, [keys.row(&keys.e, base + i)], decayed, |[e], k| s.mul(e, k));
                }
                let lane = u * SUB + i;
                scores[(sub * SUB + j) * width + lane] = dot(s, &q[lane * n..][..n], decayed);
            }
        }
        // Older sub-blocks: both factors are at most 1.
        for older in (0..sub).rev() {
            let near = &keys.near[(start + older * SUB) * n..][..SUB * n];
            let out = &mut scores[older * SUB * width + u * SUB..];
            assert!(out.len() >= (SUB - 1) * width + SUB && xt.len() >= n * width);
            // SAFETY: `near` has `SUB` rows of `n` values, `xt` `n` rows of `width` lanes of which these are `SUB`, and
            // `out` is as long as asserted; `SUB` is a multiple of 8 and of every vector width.
            unsafe {
                let x = xt.as_ptr().add(u * SUB);
                let out = out.as_mut_ptr();
                multiply::<S, true, false>(
                    s,
                    (SUB, SUB, n),
                    near.as_ptr(),
                    n,
                    x,
                    width,
                    out,
                    width,
                );
            }
            let product = keys.row(&keys.sub, start / SUB + older);
            for p in 0..n {
                let lanes = &mut xt[p * width + u * SUB..][..SUB];
                lanes.iter_mut().for_each(|x| *x *= product[p]);
            }
        }
    }
}

/// Rows of a block, `stride` values apart.
#[derive(Clone, Copy)]
pub struct BlockRows<'a> {
    pub data: &'a [f32],
    pub stride: usize,
}

impl BlockRows<'_> {
    fn check(&self, rows: usize, d: usize) {
        assert!(self.data.len() >= (rows - 1) * self.stride + d && rows.is_multiple_of(8));
    }
}

/// Products `[rows, lanes]` of `d` channels of rows with `xt: [d, lanes]`.
#[inline(always)]
pub fn products<S: Simd>(
    s: S,
    x: BlockRows<'_>,
    (rows, lanes, d): (usize, usize, usize),
    xt: &[f32],
    out: &mut [f32],
) {
    x.check(rows, d);
    assert!(xt.len() >= d * lanes && out.len() >= rows * lanes && lanes.is_multiple_of(SUB));
    // SAFETY: all operands are as long as asserted; `lanes` is a multiple of every vector width.
    unsafe {
        let (a, b, c) = (x.data.as_ptr(), xt.as_ptr(), out.as_mut_ptr());
        multiply::<S, true, false>(s, (rows, lanes, d), a, x.stride, b, lanes, c, lanes);
    }
}

/// `ot[d, lanes] += V^T W` for weights `[rows, lanes]`.
#[inline(always)]
pub fn add_values<S: Simd>(
    s: S,
    v: BlockRows<'_>,
    (rows, lanes, d): (usize, usize, usize),
    weights: &[f32],
    ot: &mut [f32],
) {
    v.check(rows, d);
    assert!(weights.len() >= rows * lanes && ot.len() >= d * lanes);
    assert!(lanes.is_multiple_of(SUB) && d.is_multiple_of(8));
    // SAFETY: all operands are as long as asserted; `lanes` is a multiple of every vector width, `d` of 8.
    unsafe {
        let (a, b, c) = (v.data.as_ptr(), weights.as_ptr(), ot.as_mut_ptr());
        multiply::<S, false, true>(s, (d, lanes, rows), a, v.stride, b, lanes, c, lanes);
    }
}

/// Multiplies row `p` of `xt: [.., lanes]` by `factors[p]`.
#[inline(always)]
pub fn scale_rows<S: Simd>(s: S, factors: &[f32], lanes: usize, xt: &mut [f32]) {
    for (row, &factor) in xt.chunks_exact_mut(lanes).zip(factors) {
        update(s, [], row, |[], x| s.mul(x, s.splat(factor)));
    }
}

/// Length of the longest column of `xt: [d, lanes]`.
#[inline(always)]
pub fn longest<S: Simd>(s: S, lanes: usize, xt: &[f32], squares: &mut [f32]) -> f32 {
    let squares = &mut squares[..lanes];
    squares.fill(0.0);
    for row in xt.chunks_exact(lanes) {
        update(s, [row], squares, |[x], sum| s.mul_add(x, x, sum));
    }
    squares.iter().fold(0.0f32, |most, x| most.max(*x)).sqrt()
}

/// `out = a * b`, value by value.
#[inline(always)]
pub fn product<S: Simd>(s: S, a: &[f32], b: &[f32], out: &mut [f32]) {
    map(s, [a, b], out, |[a, b]| s.mul(a, b));
}
