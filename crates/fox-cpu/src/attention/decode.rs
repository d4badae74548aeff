//! Decoding: a few queries against a long KV cache, in one pass over keys and values in place.
//!
//! With one query per sequence the tiles of the forward pass would be almost empty, and gathering the keys would cost
//! more than the attention itself. Here lanes run along the head dim instead.

use std::ops::Range;

use fox_tensor::Mask;

use super::visits::{Prefix, View};
use crate::simd::{Kernel, Simd, dot, exp, scale_add, update};

/// Queries per sequence from which on the tiled forward pass is faster.
pub const MAX_QUERIES: usize = 8;

/// Keys per partial result. Fixed, so that the result does not depend on the number of threads.
pub const CHUNK: usize = 1024;

/// One query against a chunk of its keys.
pub struct Decode<'a> {
    /// The query of this head, `[head_dim]`.
    pub q: &'a [f32],
    pub scale: f32,
    /// Keys and values of the segment in place, row `j` at `[j * stride ..]`, and their column.
    pub k: &'a [f32],
    pub v: &'a [f32],
    pub stride: usize,
    pub column: usize,
    pub prefix: Option<&'a Prefix>,
    pub view: View,
    /// The query's position and the keys of this chunk.
    pub position: usize,
    pub keys: Range<usize>,
    /// Scratch for the chunk's scores.
    pub scores: &'a mut [f32],
    /// The chunk's unnormalised output `[head_dim]`.
    pub o: &'a mut [f32],
}

impl Kernel for Decode<'_> {
    /// The chunk's maximum and sum.
    type Out = (f32, f32);

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> (f32, f32) {
        let d = self.q.len();
        let scores = &mut self.scores[..self.keys.len()];
        let mut maximum = f32::NEG_INFINITY;
        for (score, j) in scores.iter_mut().zip(self.keys.clone()) {
            let key = &self.k[j * self.stride + self.column..][..d];
            *score = dot(s, self.q, key) * self.scale;
            if let Some(c) = self.prefix {
                let i = self.position;
                let decay = (c.high()[i] - c.high()[j]) + (c.low()[i] - c.low()[j]);
                *score += if self.view.mask == Mask::Bidirectional { -decay.abs() } else { decay };
            }
            maximum = maximum.max(*score);
        }
        let maximum_lanes = s.splat(maximum);
        update(s, [], scores, |[], x| exp(s, s.sub(x, maximum_lanes)));
        self.o.fill(0.0);
        let mut sum = 0.0;
        for (&weight, j) in scores.iter().zip(self.keys) {
            sum += weight;
            scale_add(s, weight, &self.v[j * self.stride + self.column..][..d], self.o);
        }
        (maximum, sum)
    }
}
