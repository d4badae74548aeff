//! Backward pass of one block of queries: the walk of the forward pass again, with the gradients of every block of keys.
//!
//! `x = q F` is a query in the frame of a block, with `F` the product of the factors between. Hence
//! `dfar += dS^T x` and `dq += F (dS far)`, without inverting a product, which may be 0.

use std::sync::Arc;

use fox_tensor::Result;

use super::super::BLOCK;
use super::super::forward::hide;
use super::super::tile::multiply;
use super::SUB;
use super::forward::Head;
use super::keys::Keys;
use super::summed::SummedGrads;
use super::tile::{Lanes, own_scores, product, products, scale_rows};
use crate::pool::{Buffer, Pool};
use crate::simd::{Kernel, Level, Simd, exp, simd_fn, update};

/// Gradients of the keys of one head, in the frames of [`Keys`], `[rows, padded]` each.
pub struct KeyGrads {
    /// From pairs inside a sub-block, inside a block, and of all other pairs.
    pub k: Buffer,
    pub near: Buffer,
    pub far: Buffer,
    /// Row sums minus column sums of dS by position: the gradient of the sums of the log gates.
    pub c: Buffer,
    pub summed: SummedGrads,
}

impl KeyGrads {
    pub fn new(pool: &Arc<Pool>, keys: &Keys, d: usize) -> Result<Self> {
        let (len, rows) = (keys.k.len(), keys.k.len() / keys.padded);
        Ok(KeyGrads {
            k: pool.zeros(len)?,
            near: pool.zeros(len)?,
            far: pool.zeros(len)?,
            c: pool.zeros(rows)?,
            summed: SummedGrads::new(rows / BLOCK, d),
        })
    }

    /// Adds up the frames: the gradient of the keys is in `k` afterwards.
    pub fn finish(&mut self, level: Level, keys: &Keys) {
        merge_frames(level, keys, self);
    }
}

simd_fn! {
    fn merge_frames<'k, S>(s, keys: &'k Keys, grads: &'k mut KeyGrads) {
        let n = keys.padded;
        let (mut near, mut later) = ([0.0f32; 256], [0.0f32; 256]);
        let (near, later) = (&mut near[..n], &mut later[..n]);
        for at in (0..keys.sub.len() / n).rev() {
            if (at + 1) % (BLOCK / SUB) == 0 {
                later.fill(1.0);
            }
            near.fill(1.0);
            for j in (at * SUB..(at + 1) * SUB).rev() {
                let row = j * n..(j + 1) * n;
                let (far, close) = (&grads.far[row.clone()], &grads.near[row.clone()]);
                update(s, [far, close, near, later], &mut grads.k[row.clone()], |[x, y, f, g], k| {
                    s.mul_add(f, s.mul_add(g, x, y), k)
                });
                update(s, [&keys.e[row]], near, |[e], f| s.mul(e, f));
            }
            update(s, [near], later, |[f], g| s.mul(f, g));
        }
    }
}

/// The backward pass of the queries of some lanes.
pub struct Backward<'a> {
    pub head: Head<'a>,
    pub lanes: Lanes,
    /// Queries, scaled, and gradients of the outputs, `[lanes, padded]`; padding lanes are 0.
    pub q: &'a [f32],
    pub d_out: &'a [f32],
    /// Log of the softmax denominator and `<d_out, o>` per lane; lanes without a query have a huge `lse`.
    pub lse: &'a [f32],
    pub delta: &'a [f32],
    /// Gradient of the scaled queries `[lanes, padded]`, zeroed.
    pub dq: &'a mut [f32],
    pub grads: &'a mut KeyGrads,
    pub dv: &'a mut [f32],
    pub scratch: &'a mut [f32],
}

impl Backward<'_> {
    /// Values of scratch memory: queries and output gradients by channel; queries, factors and products by lane;
    /// weights and their gradients; two rows.
    pub fn scratch_len(d: usize) -> usize {
        let padded = d.next_multiple_of(16);
        (5 * padded + 2 * BLOCK + 1) * BLOCK + 2 * padded
    }
}

impl Kernel for Backward<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Backward { head, lanes, q, d_out, lse, delta, dq, grads, dv, scratch } = self;
        let (d, n, width) = (head.d, head.keys.padded, lanes.count);
        let (xt, rest) = scratch.split_at_mut(n * width);
        let (d_out_t, rest) = rest.split_at_mut(n * width);
        let (x, rest) = rest.split_at_mut(n * width);
        let (factors, rest) = rest.split_at_mut(n * width);
        let (products_of, rest) = rest.split_at_mut(n * width);
        let (weights, rest) = rest.split_at_mut(BLOCK * width);
        let (ds, rest) = rest.split_at_mut(BLOCK * width);
        let (squares, row) = rest.split_at_mut(width);
        for (lane, source) in d_out.chunks_exact(n).enumerate() {
            source.iter().enumerate().for_each(|(p, v)| d_out_t[p * width + lane] = *v);
        }
        let own = lanes.block();
        let start = (own - head.past.len()) * BLOCK;
        own_scores(s, head.keys, start, &lanes, q, xt, weights, &mut row[..2 * n]);
        for b in (head.oldest(&lanes)..=own).rev() {
            let (base, block) = (b * BLOCK, head.block(b));
            let mut rows = BLOCK;
            if b == own {
                rows = lanes.own_rows();
                hide(&head.view, &mut weights[..rows * width], width, base, lanes.first);
            } else {
                if head.forgets(&lanes, b) {
                    break;
                }
                if head.is_summed(s, b, &lanes, xt, squares) {
                    for lane in lanes.skip..lanes.skip + lanes.queries {
                        grads.summed.add(b, (-lse[lane]).exp(), &d_out[lane * n..][..d]);
                    }
                    break;
                }
                products(s, block.k, (rows, width, d), xt, weights);
                if !head.view.sees_all(base..base + rows, lanes.first, lanes.first + width - 1) {
                    hide(&head.view, &mut weights[..rows * width], width, base, lanes.first);
                }
            }
            products(s, block.v, (rows, width, d), d_out_t, ds);
            score_grads(s, &head, (base, rows), &lanes, (lse, delta), (weights, ds), &mut grads.c);
            let key = base * n;
            add_product::<S, true>(s, (rows, width), weights, d_out, n, &mut dv[key..][..rows * n]);
            if b == own {
                own_grads(s, head.keys, start, &lanes, q, ds, (x, factors), products_of, grads, dq);
                continue;
            }
            add_product::<S, true>(s, (rows, width), ds, x, n, &mut grads.far[key..][..rows * n]);
            products_of.fill(0.0);
            let far = &head.keys.far[key..][..rows * n];
            add_product::<S, false>(s, (width, rows), ds, far, n, products_of);
            update(s, [products_of, factors], dq, |[g, f], dq| s.mul_add(g, f, dq));
            scale_rows(s, block.decay, width, xt);
            let decay = &block.decay[..n];
            for (x, f) in x.chunks_exact_mut(n).zip(factors.chunks_exact_mut(n)) {
                update(s, [decay], x, |[e], x| s.mul(e, x));
                update(s, [decay], f, |[e], f| s.mul(e, f));
            }
        }
    }
}

/// `c += A b` for `b: [inner, n]` and `c: [outer, n]`, with `A: [outer, inner]` as stored (`ROWS`), or the transpose of
/// what is stored. Rows of `A` in memory are as long as there are lanes.
#[inline(always)]
fn add_product<S: Simd, const ROWS: bool>(
    s: S,
    (outer, inner): (usize, usize),
    a: &[f32],
    b: &[f32],
    n: usize,
    c: &mut [f32],
) {
    let stride = if ROWS { inner } else { outer };
    assert!(a.len() >= outer * inner && b.len() >= inner * n && c.len() >= outer * n);
    assert!(outer.is_multiple_of(8) && n.is_multiple_of(16));
    // SAFETY: all operands are as long as asserted; `outer` is a multiple of 8, `n` of every vector width.
    unsafe {
        let (a, b, c) = (a.as_ptr(), b.as_ptr(), c.as_mut_ptr());
        multiply::<S, ROWS, true>(s, (outer, n, inner), a, stride, b, n, c, n);
    }
}

/// Scores to weights `exp(s - lse)`, and products `<d_out, v>` to gradients of the scores; their sums go to `c`.
#[inline(always)]
fn score_grads<S: Simd>(
    s: S,
    head: &Head<'_>,
    (base, rows): (usize, usize),
    lanes: &Lanes,
    (lse, delta): (&[f32], &[f32]),
    (weights, ds): (&mut [f32], &mut [f32]),
    c: &mut [f32],
) {
    let width = lanes.count;
    let mut sums = [0.0f32; BLOCK];
    let sums = &mut sums[..width];
    for r in 0..rows {
        let row = r * width..(r + 1) * width;
        let (weights, ds) = (&mut weights[row.clone()], &mut ds[row]);
        match head.prefix {
            None => update(s, [lse], weights, |[lse], x| exp(s, s.sub(x, lse))),
            Some(c) => {
                let (high, low) =
                    (&c.high()[lanes.first..][..width], &c.low()[lanes.first..][..width]);
                let (key_high, key_low) = (s.splat(c.high()[base + r]), s.splat(c.low()[base + r]));
                update(s, [lse, high, low], weights, |[lse, high, low], x| {
                    let decay = s.add(s.sub(high, key_high), s.sub(low, key_low));
                    exp(s, s.add(s.sub(x, lse), decay))
                });
            }
        }
        update(s, [weights, delta], ds, |[p, delta], dp| s.mul(p, s.sub(dp, delta)));
        if head.prefix.is_some() {
            c[base + r] -= ds.iter().sum::<f32>();
            update(s, [ds], sums, |[ds], sum| s.add(ds, sum));
        }
    }
    if head.prefix.is_some() {
        let queries = lanes.skip..lanes.skip + lanes.queries;
        for lane in queries {
            c[lanes.first + lane] += sums[lane];
        }
    }
}

/// Gradients of the pairs of the own block; leaves the queries and their factors at the start of the block in `x` and
/// `factors: [lanes, padded]`.
#[inline(always)]
fn own_grads<S: Simd>(
    s: S,
    keys: &Keys,
    start: usize,
    lanes: &Lanes,
    q: &[f32],
    ds: &[f32],
    (x, factors): (&mut [f32], &mut [f32]),
    scratch: &mut [f32],
    grads: &mut KeyGrads,
    dq: &mut [f32],
) {
    let (n, width) = (keys.padded, lanes.count);
    let tile = &mut scratch[..SUB * n];
    let mut acc = [0.0f32; 256];
    let acc = &mut acc[..n];
    for (u, sub) in lanes.subs() {
        let base = start + sub * SUB;
        for i in 0..SUB {
            let lane = (u * SUB + i) * n;
            let (before, after) = factors.split_at_mut(lane);
            let (e, factor) = (keys.row(&keys.e, base + i), &mut after[..n]);
            match i {
                0 => factor.copy_from_slice(e),
                _ => product(s, &before[lane - n..][..n], e, factor),
            }
            product(s, &q[lane..][..n], factor, &mut x[lane..][..n]);
        }
        let pair = |i: usize, j: usize| ds[(sub * SUB + j) * width + u * SUB + i];
        for i in 0..SUB {
            acc.fill(0.0);
            for j in 0..=i {
                let g = s.splat(pair(i, j));
                let (e, k) = (keys.row(&keys.e, base + j), keys.row(&keys.k, base + j));
                update(s, [e, k], acc, |[e, k], sum| s.mul_add(g, k, s.mul(e, sum)));
            }
            update(s, [acc], &mut dq[(u * SUB + i) * n..][..n], |[x], dq| s.add(x, dq));
        }
        for j in 0..SUB {
            acc.fill(0.0);
            for i in (j..SUB).rev() {
                let g = s.splat(pair(i, j));
                let query = &q[(u * SUB + i) * n..][..n];
                update(s, [query], acc, |[q], sum| s.mul_add(g, q, sum));
                if i > j {
                    update(s, [keys.row(&keys.e, base + i)], acc, |[e], sum| s.mul(e, sum));
                }
            }
            let out = &mut grads.k[(base + j) * n..][..n];
            update(s, [acc], out, |[x], k| s.add(x, k));
        }
        for older in (0..sub).rev() {
            let at = (start + older * SUB) * n;
            let pairs = &ds[older * SUB * width + u * SUB..];
            let own = u * SUB * n..(u + 1) * SUB * n;
            let near = &keys.near[at..][..SUB * n];
            let (queries, out) = (&x[own.clone()], &mut grads.near[at..][..SUB * n]);
            assert!(pairs.len() >= (SUB - 1) * width + SUB && tile.len() >= SUB * n);
            // SAFETY: `pairs` is as long as asserted, the others have `SUB` rows of `n` values; `SUB` is a multiple of 8
            // and `n` of every vector width.
            unsafe {
                let (a, b, c) = (pairs.as_ptr(), queries.as_ptr(), out.as_mut_ptr());
                multiply::<S, true, true>(s, (SUB, n, SUB), a, width, b, n, c, n);
                let (b, c) = (near.as_ptr(), tile.as_mut_ptr());
                multiply::<S, false, false>(s, (SUB, n, SUB), a, width, b, n, c, n);
            }
            let own_factors = &mut factors[own.clone()];
            update(s, [&tile[..SUB * n], own_factors], &mut dq[own.clone()], |[g, f], dq| {
                s.mul_add(g, f, dq)
            });
            let decay = keys.row(&keys.sub, start / SUB + older);
            for (x, f) in x[own].chunks_exact_mut(n).zip(own_factors.chunks_exact_mut(n)) {
                update(s, [decay], x, |[e], x| s.mul(e, x));
                update(s, [decay], f, |[e], f| s.mul(e, f));
            }
        }
    }
}

simd_fn! {
    /// `out[i] += sign * a[i] * b[i]`.
    pub fn add_products<'k, S>(s, a: &'k [f32], b: &'k [f32], sign: f32, out: &'k mut [f32]) {
        let sign = s.splat(sign);
        update(s, [a, b], out, |[a, b], sum| s.mul_add(s.mul(a, b), sign, sum));
    }
}
