//! Few queries: the walk token by token, which needs no preparation of blocks.

use fox_tensor::{PATH_BLOCK, Result};

use super::softmax::{Statistics, Tile, soften};
use super::{Head, Path};
use crate::attention::call::Unit;
use crate::shared::Shared;
use crate::simd::{dot, scale_add, simd_fn, update};

/// Keys, values and reflections of one head: rows `stride` apart.
#[derive(Clone, Copy)]
struct Keys<'a> {
    k: &'a [f32],
    v: &'a [f32],
    u: &'a [f32],
    stride: usize,
}

/// Writes output and statistics of query `t` of the segment.
pub fn query(
    path: &Path<'_>,
    unit: &Unit,
    head: &Head,
    t: usize,
    o: Shared<'_>,
    lse: Shared<'_>,
) -> Result<()> {
    let (d, level, spec) = (path.head_dim(), path.call.level, path.call.spec);
    let (segment, stride) = (&unit.segment, spec.kv_heads * d);
    let (position, at) = (segment.offset() + t, (segment.q_start + t) * spec.heads + head.head);
    let own = position / PATH_BLOCK;
    let first = head.first[own - path.first_query_block(unit)];
    let mut x = path.call.pool.take(d)?;
    x.copy_from_slice(&path.call.q[at * d..][..d]);
    // SAFETY: this task alone writes this row's columns of this head.
    let (out, lse) = unsafe { (o.slice(at * d, d), lse.slice(at, 1)) };
    out.fill(0.0);
    let (mut rows, mut factors) = (Statistics::new(), [0.0; 1]);
    for block in (first..=own).rev() {
        let key = block * PATH_BLOCK;
        let n = PATH_BLOCK.min(position + 1 - key);
        let start = (segment.k_start + key) * stride + unit.kv_head * d;
        let (call, mut scores) = (&path.call, [0.0; PATH_BLOCK]);
        let keys = Keys { k: &call.k[start..], v: &call.v[start..], u: &path.u[start..], stride };
        walk(level, keys, n, &mut x, &mut scores);
        let prefix = head.prefix.as_ref();
        let tile = Tile { count: 1, n, position, key, scale: spec.scale, prefix };
        soften(level, tile, &mut scores[..n], &mut rows, &mut factors);
        add_values(level, keys, factors[0], &scores[..n], out);
    }
    let inverse = 1.0 / rows.sums[0];
    out.iter_mut().for_each(|o| *o *= inverse);
    lse[0] = rows.maxima[0] + rows.sums[0].ln();
    Ok(())
}

simd_fn! {
    /// Products of `x` with the keys, from the last of `n` to the first; `x` is reflected after each.
    fn walk<'k, S>(s, keys: Keys<'k>, n: usize, x: &'k mut [f32], scores: &'k mut [f32]) {
        let d = x.len();
        for j in (0..n).rev() {
            scores[j] = dot(s, x, &keys.k[j * keys.stride..][..d]);
            let u = &keys.u[j * keys.stride..][..d];
            let along = dot(s, x, u);
            scale_add(s, -along, u, x);
        }
    }
}

simd_fn! {
    /// `out = factor out + sum_j weights_j v_j`.
    fn add_values<'k, S>(
        s, keys: Keys<'k>, factor: f32, weights: &'k [f32], out: &'k mut [f32],
    ) {
        let factor = s.splat(factor);
        update(s, [], out, |[], o| s.mul(factor, o));
        for (j, weight) in weights.iter().enumerate() {
            scale_add(s, *weight, &keys.v[j * keys.stride..][..out.len()], out);
        }
    }
}
