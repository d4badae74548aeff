//! The keys of one head of one segment with their decays, in the frames that the passes need.

use std::sync::Arc;

use fox_tensor::Result;

use super::super::BLOCK;
use super::super::gather::gather_rows;
use super::SUB;
use crate::pool::{Buffer, Pool};
use crate::simd::{Level, exp, map, simd_fn, update};

/// Gathered rows of `padded` values, whole blocks of them. Rows past the last key are keys of 0 without decay.
pub struct Keys {
    pub padded: usize,
    /// Keys, values and factors `exp(log_decay)`, `[rows, padded]`.
    pub k: Buffer,
    pub v: Buffer,
    pub e: Buffer,
    /// Keys decayed to the end of their sub-block, and of their block.
    pub near: Buffer,
    pub far: Buffer,
    /// Products of the factors of each sub-block `[rows / SUB, padded]`, and of each block `[rows / BLOCK, padded]`.
    pub sub: Buffer,
    pub block: Buffer,
}

/// Where the rows of one head are: tensor, values per row, first column.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    pub data: &'a [f32],
    pub stride: usize,
    pub column: usize,
}

impl Rows<'_> {
    fn gather(
        &self,
        pool: &Arc<Pool>,
        (start, len): (usize, usize),
        (d, padded): (usize, usize),
    ) -> Result<Buffer> {
        let mut out = pool.take(len.next_multiple_of(BLOCK) * padded)?;
        let source = &self.data[(start * self.stride + self.column).min(self.data.len())..];
        gather_rows(source, self.stride, len, d, padded, 1.0, &mut out);
        Ok(out)
    }
}

impl Keys {
    /// Keys, values and log decays of the rows `start .. start + len`, heads of `d` columns.
    pub fn new(
        level: Level,
        pool: &Arc<Pool>,
        [k, v, log_decays]: [Rows<'_>; 3],
        range: (usize, usize),
        d: usize,
    ) -> Result<Self> {
        let padded = d.next_multiple_of(16);
        let gather = |rows: Rows<'_>| rows.gather(pool, range, (d, padded));
        let (k, v, e) = (gather(k)?, gather(v)?, gather(log_decays)?);
        let (len, rows) = (k.len(), k.len() / padded);
        let (near, far) = (pool.take(len)?, pool.take(len)?);
        let (sub, block) = (pool.take(rows / SUB * padded)?, pool.take(rows / BLOCK * padded)?);
        let mut keys = Keys { padded, k, v, e, near, far, sub, block };
        prepare(level, &mut keys);
        Ok(keys)
    }

    /// Row `j` of `x: [rows, padded]`.
    #[inline(always)]
    pub fn row<'a>(&self, x: &'a [f32], j: usize) -> &'a [f32] {
        &x[j * self.padded..][..self.padded]
    }
}

simd_fn! {
    fn prepare<'k, S>(s, keys: &'k mut Keys) {
        let n = keys.padded;
        let Keys { k, e, near, far, sub, block, .. } = keys;
        for row in e.chunks_exact_mut(n) {
            update(s, [], row, |[], x| exp(s, x));
        }
        block.fill(1.0);
        for at in (0..sub.len() / n).rev() {
            let (product, later) = (&mut sub[at * n..][..n], &mut block[at * SUB / BLOCK * n..][..n]);
            product.fill(1.0);
            for j in (at * SUB..(at + 1) * SUB).rev() {
                let row = j * n..(j + 1) * n;
                map(s, [&k[row.clone()], product], &mut near[row.clone()], |[k, f]| s.mul(k, f));
                map(s, [&near[row.clone()], later], &mut far[row.clone()], |[k, f]| s.mul(k, f));
                update(s, [&e[row]], product, |[e], f| s.mul(e, f));
            }
            update(s, [product], later, |[f], all| s.mul(f, all));
        }
    }
}
