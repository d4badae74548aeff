//! Decoding: a few queries against a long KV cache, keys and values in place, newest first.

use std::ops::Range;

use super::super::BLOCK;
use super::super::decode::MAX_QUERIES;
use super::super::visits::{Prefix, View};
use super::used_up;
use crate::shared::Shared;
use crate::simd::{Kernel, Simd, dot, exp, log_sigmoids, map_two, scale_add, update};

/// Fewer than [`MAX_QUERIES`] queries of one head.
pub struct StickDecode<'a> {
    pub head_dim: usize,
    pub scale: f32,
    /// The segment's queries, `[q_len, heads * head_dim]`.
    pub q: &'a [f32],
    /// Keys and values of the segment in place, row `j` at `[j * stride ..]`, and their column.
    pub k: &'a [f32],
    pub v: &'a [f32],
    pub stride: usize,
    pub column: usize,
    pub prefix: Option<&'a Prefix>,
    pub view: View,
    /// Position of the first query.
    pub position: usize,
    /// Key blocks it may visit.
    pub keys: Range<usize>,
    pub tolerance: f32,
    pub heads: usize,
    pub head: usize,
    /// The first query's row of the output `[R, heads * head_dim]`, which is zero so far, and of the
    /// statistics `[R, heads]`.
    pub row: usize,
    pub o: Shared<'a>,
    pub lse: Shared<'a>,
}

impl Kernel for StickDecode<'_> {
    /// Key blocks visited.
    type Out = usize;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> usize {
        let (d, width) = (self.head_dim, self.heads * self.head_dim);
        let count = self.q.len() / width;
        let mut log_rests = [0.0; MAX_QUERIES];
        let mut visited = 0;
        for block in self.keys.clone().rev() {
            for (t, log_rest) in log_rests[..count].iter_mut().enumerate() {
                let seen = self.view.keys(self.position + t, self.position + t);
                let keys = seen.start.max(block * BLOCK)..seen.end.min((block + 1) * BLOCK);
                // SAFETY: no other task writes this row's columns of this head.
                let o = unsafe { self.o.slice((self.row + t) * width + self.head * d, d) };
                self.take(s, t, keys, log_rest, o);
            }
            visited += 1;
            if used_up(&log_rests[..count], self.prefix, self.position, block, self.tolerance) {
                break;
            }
        }
        for (t, log_rest) in log_rests[..count].iter().enumerate() {
            // SAFETY: as above.
            unsafe { self.lse.slice((self.row + t) * self.heads + self.head, 1)[0] = *log_rest };
        }
        visited
    }
}

impl StickDecode<'_> {
    /// Adds the values of one block of keys for query `t` and updates its remaining stick.
    #[inline(always)]
    fn take<S: Simd>(&self, s: S, t: usize, keys: Range<usize>, log_rest: &mut f32, o: &mut [f32]) {
        let (d, i) = (self.head_dim, self.position + t);
        let q = &self.q[(t * self.heads + self.head) * d..][..d];
        let (mut scores, mut shares, mut lefts) = ([0.0; BLOCK], [0.0; BLOCK], [0.0; BLOCK]);
        let scores = &mut scores[..keys.len()];
        for (score, j) in scores.iter_mut().zip(keys.clone()) {
            *score = dot(s, q, &self.k[j * self.stride + self.column..][..d]) * self.scale;
        }
        let (shares, lefts) = (&mut shares[..keys.len()], &mut lefts[..keys.len()]);
        map_two(s, [scores], shares, lefts, |[score]| log_sigmoids(s, score));
        let mut taken = 0.0;
        for ((share, left), j) in shares.iter_mut().zip(lefts).zip(keys.clone()).rev() {
            *share += *log_rest + taken;
            if let Some(c) = self.prefix {
                *share += (c.high()[i] - c.high()[j]) + (c.low()[i] - c.low()[j]);
            }
            taken += *left;
        }
        *log_rest += taken;
        update(s, [], shares, |[], log_weight| exp(s, log_weight));
        for (&weight, j) in shares.iter().zip(keys) {
            scale_add(s, weight, &self.v[j * self.stride + self.column..][..d], o);
        }
    }
}
