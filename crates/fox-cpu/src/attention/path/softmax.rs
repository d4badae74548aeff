//! Rows of scores of one query block against one key block.

use fox_tensor::PATH_BLOCK;

use crate::attention::visits::Prefix;
use crate::simd::{Simd, exp, simd_fn, sum, update};

/// Initial maximum: finite, so that differences of maxima are never NaN.
const NO_MAXIMUM: f32 = -1e30;

/// Scores `[count, n]` of queries from position `position` on against the keys from position `key` on.
#[derive(Clone, Copy)]
pub struct Tile<'a> {
    pub count: usize,
    pub n: usize,
    pub position: usize,
    pub key: usize,
    pub scale: f32,
    pub prefix: Option<&'a Prefix>,
}

impl Tile<'_> {
    /// Visible keys of query `r`.
    fn visible(&self, r: usize) -> usize {
        (self.position + r + 1 - self.key).min(self.n)
    }
}

/// Maxima and sums of the rows of a query block.
pub struct Statistics {
    pub maxima: [f32; PATH_BLOCK],
    pub sums: [f32; PATH_BLOCK],
}

impl Statistics {
    pub fn new() -> Self {
        Statistics { maxima: [NO_MAXIMUM; PATH_BLOCK], sums: [0.0; PATH_BLOCK] }
    }
}

/// `scale s + c_i - c_j` of the visible keys.
#[inline(always)]
fn add_bias<S: Simd>(s: S, tile: &Tile<'_>, r: usize, scores: &mut [f32]) {
    let scale = s.splat(tile.scale);
    match tile.prefix {
        None => update(s, [], scores, |[], x| s.mul(scale, x)),
        Some(c) => {
            let (i, keys) = (tile.position + r, tile.key..tile.key + scores.len());
            let (high, low) = (s.splat(c.high()[i]), s.splat(c.low()[i]));
            update(s, [&c.high()[keys.clone()], &c.low()[keys]], scores, |[h, l], x| {
                s.mul_add(scale, x, s.add(s.sub(high, h), s.sub(low, l)))
            });
        }
    }
}

simd_fn! {
    /// Turns scores `[count, n]` into weights relative to the new maxima, 0 for hidden keys, and writes into `factors` what
    /// earlier results of each row are to be multiplied by.
    pub fn soften<'k, S>(
        s, tile: Tile<'k>, scores: &'k mut [f32], rows: &'k mut Statistics, factors: &'k mut [f32],
    ) {
        for (r, row) in scores.chunks_exact_mut(tile.n).take(tile.count).enumerate() {
            let (row, hidden) = row.split_at_mut(tile.visible(r));
            hidden.fill(0.0);
            add_bias(s, &tile, r, row);
            let maximum = row.iter().fold(rows.maxima[r], |max, x| max.max(*x));
            let top = s.splat(maximum);
            update(s, [], row, |[], x| exp(s, s.sub(x, top)));
            factors[r] = (rows.maxima[r] - maximum).exp();
            rows.maxima[r] = maximum;
            rows.sums[r] = rows.sums[r] * factors[r] + sum(s, [row], |[x], sum| s.add(x, sum));
        }
    }
}

/// Operands of the gradient of scores.
#[derive(Clone, Copy)]
pub struct RowGrads<'a> {
    /// Statistics of the forward pass, and `<do, o>`, `[count]` each.
    pub lse: &'a [f32],
    pub delta: &'a [f32],
}

simd_fn! {
    /// Turns scores into weights `p`, and gradients `dp` of the weights into `p (dp - delta)`, 0 for hidden keys; adds row
    /// and column sums of the latter, and then multiplies it by the scale.
    pub fn gradients<'k, S>(
        s, tile: Tile<'k>, given: RowGrads<'k>, p: &'k mut [f32], dp: &'k mut [f32],
        row_sums: &'k mut [f32], column_sums: &'k mut [f32],
    ) {
        let scale = s.splat(tile.scale);
        for r in 0..tile.count {
            let visible = tile.visible(r);
            let (p, hidden) = p[r * tile.n..][..tile.n].split_at_mut(visible);
            hidden.fill(0.0);
            let (dp, hidden) = dp[r * tile.n..][..tile.n].split_at_mut(visible);
            hidden.fill(0.0);
            add_bias(s, &tile, r, p);
            let (lse, delta) = (s.splat(given.lse[r]), s.splat(given.delta[r]));
            update(s, [], p, |[], x| exp(s, s.sub(x, lse)));
            update(s, [p], dp, |[p], x| s.mul(p, s.sub(x, delta)));
            row_sums[r] += sum(s, [dp], |[x], sum| s.add(x, sum));
            update(s, [dp], &mut column_sums[..visible], |[x], sum| s.add(sum, x));
            update(s, [], dp, |[], x| s.mul(scale, x));
        }
    }
}

simd_fn! {
    /// `out[r] = <x_r, y_r>` of rows `stride` apart. Added up in order, as products of matrices are: where one key has all
    /// of the weight, its gradient `dp - delta` is then exactly 0.
    pub fn row_dots<'k, S>(
        s, x: &'k [f32], y: &'k [f32], stride: usize, width: usize, out: &'k mut [f32],
    ) {
        // One row per lane.
        let (mut left, mut right, mut sums) = ([0.0; 16], [0.0; 16], [0.0; 16]);
        for (n, out) in out.chunks_mut(S::LANES).enumerate() {
            sums.fill(0.0);
            for c in 0..width {
                for r in 0..out.len() {
                    let at = (n * S::LANES + r) * stride + c;
                    (left[r], right[r]) = (x[at], y[at]);
                }
                update(s, [&left[..out.len()], &right[..out.len()]], &mut sums[..out.len()], |[x, y], sum| {
                    s.mul_add(x, y, sum)
                });
            }
            out.copy_from_slice(&sums[..out.len()]);
        }
    }
}
