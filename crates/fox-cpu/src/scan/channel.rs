//! Scores with a decay per channel.
//!
//! `A_ij = sum_c q_ic k_jc a_{j+1,c} ... a_{i,c}` is a product of two matrices only if the decay is split at some token
//! between `j` and `i`. So a chunk is divided into blocks of [`BLOCK`] tokens. For queries of a block and keys of earlier
//! blocks the split is at the block's start: earlier decays multiply the keys, later ones the queries, and both factors
//! are at most 1. Inside a block the terms are summed one by one with a running product.

use fox_tensor::Result;

use super::kernels;
use super::{Scan, Unit};
use crate::Cpu;
use crate::linear::{Matrix, multiply_here};
use crate::pool::Buffer;
use crate::simd::{Level, map, scale_add, simd_fn, sum, update};

/// Tokens of a block.
const BLOCK: usize = 16;

/// A chunk's queries, keys and decays of one head, all `[n, dk]`.
pub struct Channels {
    n: usize,
    dk: usize,
    q: Buffer,
    k: Buffer,
    decay: Buffer,
    /// Products of decays from the chunk's start up to each token.
    prefix: Buffer,
    /// Products of decays after each token, up to the chunk's end.
    suffix: Buffer,
    faded_q: Buffer,
    faded_k: Buffer,
    /// Keys decayed from the chunk's start; for the delta rule.
    early_k: Buffer,
    /// Decays from the block's start to its queries, and from earlier keys to the block's start.
    query_factors: Buffer,
    key_factors: Buffer,
    /// Queries and keys times these factors.
    decayed_q: Buffer,
    decayed_k: Buffer,
    running: Buffer,
}

/// Rows `first..` of a `[n, dk]` buffer.
fn rows(buffer: &[f32], first: usize, count: usize, dk: usize) -> &[f32] {
    &buffer[first * dk..][..count * dk]
}

impl Channels {
    pub fn new(cpu: &Cpu, n: usize, dk: usize, delta: bool) -> Result<Self> {
        let take = || cpu.pool().take(n * dk);
        Ok(Channels {
            n,
            dk,
            q: take()?,
            k: take()?,
            decay: take()?,
            prefix: take()?,
            suffix: take()?,
            faded_q: take()?,
            faded_k: take()?,
            early_k: cpu.pool().take(if delta { n * dk } else { 0 })?,
            query_factors: take()?,
            key_factors: take()?,
            decayed_q: take()?,
            decayed_k: take()?,
            running: cpu.pool().take(dk)?,
        })
    }

    /// Gathers a chunk.
    pub fn load(&mut self, scan: &Scan<'_>, unit: &Unit, row: usize, n: usize) {
        let (dk, level) = (self.dk, scan.cpu.level());
        let len = n * dk;
        self.n = n;
        let log_decay = scan.log_decay.unwrap_or_default();
        for r in 0..n {
            let key = ((row + r) * scan.spec.key_heads + unit.key_head) * dk;
            self.q[r * dk..][..dk].copy_from_slice(&scan.q[key..][..dk]);
            self.k[r * dk..][..dk].copy_from_slice(&scan.k[key..][..dk]);
            let log_decay =
                &log_decay[((row + r) * scan.spec.heads + unit.first_head) * dk..][..dk];
            kernels::exponential(level, log_decay, &mut self.decay[r * dk..][..dk]);
        }
        let decay = &self.decay[..len];
        kernels::prefix_products(level, dk, decay, &mut self.prefix[..len]);
        kernels::suffix_products(level, dk, decay, &mut self.suffix[..len]);
        let (q, k) = (&self.q[..len], &self.k[..len]);
        kernels::multiply(level, 1.0, q, &self.prefix[..len], &mut self.faded_q[..len]);
        kernels::multiply(level, 1.0, k, &self.suffix[..len], &mut self.faded_k[..len]);
        if scan.is_delta() {
            kernels::multiply(level, 1.0, k, &self.prefix[..len], &mut self.early_k[..len]);
        }
    }

    /// Queries decayed from the chunk's start.
    pub fn faded_queries(&self) -> Matrix<'_> {
        Matrix::strided(&self.faded_q, self.n, self.dk, self.dk)
    }

    /// Keys decayed to the chunk's end.
    pub fn faded_keys(&self) -> Matrix<'_> {
        Matrix::strided(&self.faded_k, self.n, self.dk, self.dk)
    }

    /// Keys decayed from the chunk's start; loaded for the delta rule only.
    pub fn early_keys(&self) -> Matrix<'_> {
        Matrix::strided(&self.early_k, self.n, self.dk, self.dk)
    }

    pub fn prefix(&self) -> &[f32] {
        &self.prefix[..self.n * self.dk]
    }

    pub fn suffix(&self) -> &[f32] {
        &self.suffix[..self.n * self.dk]
    }

    /// Decays over the whole chunk `[dk]`.
    pub fn last_prefix(&self) -> &[f32] {
        rows(&self.prefix, self.n - 1, 1, self.dk)
    }

    pub fn q(&self) -> &[f32] {
        &self.q[..self.n * self.dk]
    }

    pub fn k(&self) -> &[f32] {
        &self.k[..self.n * self.dk]
    }

    /// `A[n, n]` of queries or keys with keys, zero above the diagonal.
    pub fn scores(&mut self, level: Level, left: Left, out: &mut [f32]) {
        let (n, dk) = (self.n, self.dk);
        out.fill(0.0);
        for start in (0..n).step_by(BLOCK) {
            let count = BLOCK.min(n - start);
            if start > 0 {
                self.decay_to_block(level, left, start, count);
                let queries = Matrix::strided(&self.decayed_q, count, dk, dk);
                let keys = Matrix::strided(&self.decayed_k, start, dk, dk);
                multiply_here(1.0, queries, keys.t(), &mut out[start * n..], n, false);
            }
            let block = Block { start, count, n, dk };
            let operands = (left.of(&self.q, &self.k), &self.k[..], &self.decay[..]);
            block_scores(level, block, operands, &mut self.running, out);
        }
    }

    /// Adds the gradients of the left operand and of the keys that come from the scores below the diagonal.
    pub fn scores_backward(
        &mut self,
        level: Level,
        left: Left,
        d_scores: &[f32],
        d_left: &mut [f32],
        dk_out: &mut [f32],
        scratch: &mut [f32],
    ) {
        let (n, dk) = (self.n, self.dk);
        for start in (0..n).step_by(BLOCK) {
            let count = BLOCK.min(n - start);
            if start > 0 {
                self.decay_to_block(level, left, start, count);
                let d = Matrix::strided(&d_scores[start * n..], count, start, n);
                let keys = Matrix::strided(&self.decayed_k, start, dk, dk);
                multiply_here(1.0, d, keys, scratch, dk, false);
                let factors = &self.query_factors[..count * dk];
                let own = &mut d_left[start * dk..][..count * dk];
                kernels::add_products(level, factors, &scratch[..count * dk], own);
                let queries = Matrix::strided(&self.decayed_q, count, dk, dk);
                multiply_here(1.0, d.t(), queries, scratch, dk, false);
                let (factors, len) = (&self.key_factors[..start * dk], start * dk);
                kernels::add_products(level, factors, &scratch[..len], &mut dk_out[..len]);
            }
            let block = Block { start, count, n, dk };
            let operands = (left.of(&self.q, &self.k), &self.k[..], &self.decay[..]);
            block_gradients(level, block, operands, &mut self.running, d_scores, d_left, dk_out);
        }
    }

    /// Left operands of the block at `start` and keys before it, each decayed towards the block's start.
    fn decay_to_block(&mut self, level: Level, left: Left, start: usize, count: usize) {
        let (dk, decay) = (self.dk, &self.decay[..]);
        let len = count * dk;
        let factors = &mut self.query_factors[..len];
        kernels::prefix_products(level, dk, rows(decay, start, count, dk), factors);
        let q = rows(left.of(&self.q, &self.k), start, count, dk);
        kernels::multiply(level, 1.0, factors, q, &mut self.decayed_q[..len]);
        let len = start * dk;
        let factors = &mut self.key_factors[..len];
        kernels::suffix_products(level, dk, &decay[..len], factors);
        kernels::multiply(level, 1.0, factors, &self.k[..len], &mut self.decayed_k[..len]);
    }
}

/// The operand that is multiplied with the keys.
#[derive(Clone, Copy)]
pub enum Left {
    /// Queries: the scores that weigh the writes in the output.
    Queries,
    /// Keys: the overlaps of the delta rule.
    Keys,
}

impl Left {
    fn of<'x>(self, q: &'x [f32], k: &'x [f32]) -> &'x [f32] {
        match self {
            Left::Queries => q,
            Left::Keys => k,
        }
    }
}

/// A block of a chunk of `n` tokens.
#[derive(Clone, Copy)]
struct Block {
    start: usize,
    count: usize,
    n: usize,
    dk: usize,
}

simd_fn! {
    /// Scores inside a block.
    fn block_scores<'k, S>(
        s, block: Block, operands: (&'k [f32], &'k [f32], &'k [f32]),
        running: &'k mut [f32], out: &'k mut [f32],
    ) {
        let (Block { start, count, n, dk }, (q, k, decay)) = (block, operands);
        for i in start..start + count {
            let q = &q[i * dk..][..dk];
            running.fill(1.0);
            for j in (start..=i).rev() {
                let k = &k[j * dk..][..dk];
                out[i * n + j] = sum(s, [q, k, running], |[q, k, r], sum| s.mul_add(s.mul(q, k), r, sum));
                update(s, [&decay[j * dk..][..dk]], running, |[a], r| s.mul(a, r));
            }
        }
    }
}

simd_fn! {
    /// Gradients of queries and keys from the scores inside a block, below the diagonal.
    fn block_gradients<'k, S>(
        s, block: Block, operands: (&'k [f32], &'k [f32], &'k [f32]), running: &'k mut [f32],
        d_scores: &'k [f32], dq: &'k mut [f32], dk_out: &'k mut [f32],
    ) {
        let (Block { start, count, n, dk }, (q, k, decay)) = (block, operands);
        for i in start..start + count {
            let row = i * dk..(i + 1) * dk;
            running.copy_from_slice(&decay[row.clone()]);
            for j in (start..i).rev() {
                let other = j * dk..(j + 1) * dk;
                let d = s.splat(d_scores[i * n + j]);
                let term = |[x, r]: [S::V; 2], y: S::V| s.mul_add(s.mul(d, x), r, y);
                update(s, [&k[other.clone()], running], &mut dq[row.clone()], term);
                update(s, [&q[row.clone()], running], &mut dk_out[other.clone()], term);
                update(s, [&decay[other]], running, |[a], r| s.mul(a, r));
            }
        }
    }
}

simd_fn! {
    /// Gradients of the decays, then the diagonal's term of the gradients of queries and keys:
    /// `dc = q * dq - k * dk`, then `dq_i += d_ii k_i`, `dk_i += d_ii q_i`.
    pub fn finish_gradients<'k, S>(
        s, q: &'k [f32], k: &'k [f32], diagonal: &'k [f32], dk: usize,
        dq: &'k mut [f32], dk_out: &'k mut [f32], dc: &'k mut [f32],
    ) {
        map(s, [q, dq, k, dk_out], dc, |[q, dq, k, dk]| s.sub(s.mul(q, dq), s.mul(k, dk)));
        for (i, d) in diagonal.iter().enumerate() {
            let row = i * dk..(i + 1) * dk;
            scale_add(s, *d, &k[row.clone()], &mut dq[row.clone()]);
            scale_add(s, *d, &q[row.clone()], &mut dk_out[row]);
        }
    }
}
