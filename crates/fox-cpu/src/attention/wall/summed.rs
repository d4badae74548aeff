//! Sums of old values, for queries to which only the content of old keys is forgotten.
//!
//! A key whose channels have decayed has logit 0 and keeps a weight in the softmax. If every logit of a set of keys is
//! within `eps` of 0, then their number and the sum of their values replace them: the output changes by at most
//! `(exp(2 eps) - 1) max|v|`. Neither a query nor a key grows along the way, so a bound that holds at one block holds
//! at all older ones.

use super::super::BLOCK;
use super::keys::Keys;

/// Of one head of one segment.
pub struct Summed {
    eps: f32,
    d: usize,
    /// Per block, the longest key of it and of all older ones.
    longest: Vec<f32>,
    /// Per block, the sum of the values of it and of all older ones, `[blocks, d]`.
    values: Vec<f32>,
}

impl Summed {
    /// For logits within `eps` of 0.
    pub fn new(keys: &Keys, d: usize, eps: f32) -> Self {
        let blocks = keys.k.len() / keys.padded / BLOCK;
        let mut summed = Summed { eps, d, longest: Vec::new(), values: Vec::new() };
        let (mut most, mut sums) = (0.0f64, vec![0.0f64; d]);
        for block in 0..blocks {
            for j in block * BLOCK..(block + 1) * BLOCK {
                let square: f64 = keys.row(&keys.k, j).iter().map(|&x| x as f64 * x as f64).sum();
                most = most.max(square);
                sums.iter_mut().zip(keys.row(&keys.v, j)).for_each(|(sum, &v)| *sum += v as f64);
            }
            // Rounded up, so that the bound holds in f32.
            summed.longest.push(most.sqrt() as f32 * (1.0 + 1e-6));
            summed.values.extend(sums.iter().map(|&x| x as f32));
        }
        summed
    }

    pub fn eps(&self) -> f32 {
        self.eps
    }

    /// The longest key of block `b` and all older ones.
    pub fn longest_key(&self, b: usize) -> f32 {
        self.longest[b]
    }

    /// The sum of the values of block `b` and all older ones `[d]`.
    pub fn values(&self, b: usize) -> &[f32] {
        &self.values[b * self.d..][..self.d]
    }
}

/// Gradients of the values of summed keys: what every key of a block and of all older ones gets.
pub struct SummedGrads {
    d: usize,
    blocks: Vec<f32>,
}

impl SummedGrads {
    pub fn new(blocks: usize, d: usize) -> Self {
        SummedGrads { d, blocks: vec![0.0; blocks * d] }
    }

    /// Adds `weight * d_out` to all keys up to the end of block `b`.
    pub fn add(&mut self, b: usize, weight: f32, d_out: &[f32]) {
        let sums = &mut self.blocks[b * self.d..][..self.d];
        sums.iter_mut().zip(d_out).for_each(|(sum, d)| *sum += weight * d);
    }

    /// Adds them to the gradients of the values `dv: [blocks * BLOCK, padded]`.
    pub fn scatter(&self, padded: usize, dv: &mut [f32]) {
        let mut total = vec![0.0f32; self.d];
        for (sums, dv) in
            self.blocks.chunks_exact(self.d).zip(dv.chunks_exact_mut(BLOCK * padded)).rev()
        {
            total.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
            for row in dv.chunks_exact_mut(padded) {
                row.iter_mut().zip(&total).for_each(|(dv, total)| *dv += total);
            }
        }
    }
}
