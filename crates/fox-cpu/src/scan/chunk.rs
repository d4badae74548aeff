//! Computations of one chunk that forward and backward pass share: decays, products of keys, and writes.

use fox_tensor::Result;

use super::channel::{Channels, Left};
use super::kernels::{self, Rows};
use super::solve::{Sides, System};
use super::{CHUNK, Scan, Unit};
use crate::linear::{Matrix, multiply_here};
use crate::pool::Buffer;

/// A chunk: `n` tokens from row `row` on. Matrices of values are `[n, heads * dv]`, heads side by side.
pub struct Chunk<'a> {
    pub scan: &'a Scan<'a>,
    pub unit: &'a Unit,
    pub row: usize,
    pub n: usize,
    /// Decays of each head, their running products from the chunk's start and to its end,
    /// `[heads][n]` each; ones without decay.
    pub decay: Buffer,
    pub prefix: Buffer,
    pub suffix: Buffer,
    /// Strengths of the writes `[heads][n]`.
    pub strength: Buffer,
    /// `Q K^T` and, for the delta rule, `K K^T`; with a decay per channel, both decayed.
    pub scores: Buffer,
    pub overlaps: Buffer,
    /// The decay matrix of one head, and scratch `[n, n]`.
    pub decay_matrix: Buffer,
    pub square: Buffer,
    /// For the delta rule: `K S` (with a decay per channel, of keys decayed from the chunk's start) and `E`.
    pub read_keys: Buffer,
    pub errors: Buffer,
    /// Writes to the state, `W`.
    pub written: Buffer,
    /// Present when decays are per channel.
    pub channels: Option<Channels>,
}

impl<'a> Chunk<'a> {
    /// Allocates buffers for the chunks of a unit.
    pub fn new(scan: &'a Scan<'a>, unit: &'a Unit) -> Result<Self> {
        let n = CHUNK.min(unit.segment.q_len);
        let (square, values) = (n * n, n * scan.width(unit));
        let take = |len: usize| scan.cpu.pool().take(len);
        let delta = |len: usize| take(if scan.is_delta() { len } else { 0 });
        Ok(Chunk {
            scan,
            unit,
            row: 0,
            n: 0,
            decay: take(unit.heads * n)?,
            prefix: take(unit.heads * n)?,
            suffix: take(unit.heads * n)?,
            strength: take(unit.heads * n)?,
            scores: take(square)?,
            overlaps: delta(square)?,
            decay_matrix: take(square)?,
            square: take(square)?,
            read_keys: delta(values)?,
            errors: delta(values)?,
            written: take(values)?,
            channels: scan
                .by_channel
                .then(|| Channels::new(scan.cpu, n, scan.spec.key_dim, scan.is_delta()))
                .transpose()?,
        })
    }

    pub fn width(&self) -> usize {
        self.scan.width(self.unit)
    }

    /// Queries `[n, dk]`.
    pub fn q(&self) -> Matrix<'a> {
        self.scan.keys(self.scan.q, self.unit, self.row, self.n)
    }

    /// Keys `[n, dk]`.
    pub fn k(&self) -> Matrix<'a> {
        self.scan.keys(self.scan.k, self.unit, self.row, self.n)
    }

    /// Columns of head `h` in a `[R, H * dv]` tensor, from this chunk's first row on.
    pub fn head_rows<'x>(&self, x: &'x [f32], h: usize) -> Rows<'x> {
        let (start, stride) = self.scan.value_at(self.unit, self.row);
        Rows::new(&x[start + h * self.scan.spec.value_dim..], stride)
    }

    /// The decay matrix of head `h`, in `decay_matrix`.
    pub fn load_decay_matrix(&mut self, h: usize) {
        let n = self.n;
        kernels::decay_matrix(
            self.scan.cpu.level(),
            &self.decay[h * n..][..n],
            &mut self.decay_matrix[..n * n],
        );
    }

    /// Loads the chunk at `row`: decays, scores and writes, given the state before it.
    pub fn load(&mut self, row: usize, n: usize, state: &[f32]) {
        (self.row, self.n) = (row, n);
        self.load_strength();
        if let Some(channels) = &mut self.channels {
            let (scan, unit) = (self.scan, self.unit);
            channels.load(scan, unit, row, n);
            channels.scores(scan.cpu.level(), Left::Queries, &mut self.scores[..n * n]);
            if scan.is_delta() {
                channels.scores(scan.cpu.level(), Left::Keys, &mut self.overlaps[..n * n]);
            }
        } else {
            self.load_decay();
            multiply_here(1.0, self.q(), self.k().t(), &mut self.scores, n, false);
        }
        if self.scan.is_delta() {
            self.solve(state);
            return;
        }
        let dv = self.scan.spec.value_dim;
        for h in 0..self.unit.heads {
            let v = self.head_rows(self.scan.v, h);
            let (strength, width) = (&self.strength[h * n..][..n], self.unit.heads * dv);
            let out = &mut self.written[h * dv..];
            kernels::scale_rows(self.scan.cpu.level(), 1.0, strength, v, dv, out, width);
        }
    }

    fn load_strength(&mut self) {
        let (n, heads) = (self.n, self.scan.spec.heads);
        for h in 0..self.unit.heads {
            let out = &mut self.strength[h * n..][..n];
            match self.scan.write {
                None => out.fill(1.0),
                Some(write) => {
                    let first = self.row * heads + self.unit.first_head + h;
                    out.iter_mut()
                        .zip(write[first..].iter().step_by(heads))
                        .for_each(|(o, w)| *o = *w);
                }
            }
        }
    }

    fn load_decay(&mut self) {
        let (n, heads, level) = (self.n, self.scan.spec.heads, self.scan.cpu.level());
        for h in 0..self.unit.heads {
            let range = h * n..(h + 1) * n;
            let Some(log) = self.scan.log_decay else {
                for factors in [&mut self.decay, &mut self.prefix, &mut self.suffix] {
                    factors[range.clone()].fill(1.0);
                }
                continue;
            };
            let first = self.row * heads + self.unit.first_head + h;
            let prefix = &mut self.prefix[range.clone()];
            prefix
                .iter_mut()
                .zip(log[first..].iter().step_by(heads))
                .for_each(|(p, log)| *p = *log);
            kernels::exponential(level, prefix, &mut self.decay[range.clone()]);
            let decay = &self.decay[range.clone()];
            kernels::prefix_products(level, 1, decay, prefix);
            kernels::suffix_products(level, 1, decay, &mut self.suffix[range]);
        }
    }

    /// `E` and `W` of the delta rule.
    fn solve(&mut self, state: &[f32]) {
        let (n, dk, dv) = (self.n, self.scan.spec.key_dim, self.scan.spec.value_dim);
        let (width, level) = (self.width(), self.scan.cpu.level());
        let state = Matrix::strided(state, dk, width, width);
        let ones = [1.0; CHUNK];
        match &self.channels {
            Some(channels) => {
                multiply_here(1.0, channels.early_keys(), state, &mut self.read_keys, width, false);
            }
            None => {
                multiply_here(1.0, self.k(), self.k().t(), &mut self.overlaps, n, false);
                multiply_here(1.0, self.k(), state, &mut self.read_keys, width, false);
            }
        }
        for h in 0..self.unit.heads {
            let v = self.head_rows(self.scan.v, h);
            let errors = &mut self.errors[h * dv..];
            kernels::scale_rows(level, 1.0, &ones[..n], v, dv, errors, width);
            let read = Rows::new(&self.read_keys[h * dv..], width);
            let prefix = match self.channels {
                Some(_) => &ones[..n],
                None => &self.prefix[h * n..][..n],
            };
            kernels::add_scaled_rows(level, -1.0, prefix, read, dv, errors, width);
            self.load_system(h);
            let (lower, write) = (&self.square[..n * n], &self.strength[h * n..][..n]);
            System { level, n, lower, write }.forward(&mut Sides {
                x: &mut self.errors[h * dv..],
                scaled: &mut self.written[h * dv..],
                width: dv,
                stride: width,
            });
        }
    }

    /// The triangle of the delta rule's system for head `h`, in `square`; its decay matrix too, where decays are per
    /// head.
    pub fn load_system(&mut self, h: usize) {
        let n = self.n;
        if self.scan.by_channel {
            self.square[..n * n].copy_from_slice(&self.overlaps[..n * n]);
        } else {
            self.load_decay_matrix(h);
            let (overlaps, decays) = (&self.overlaps[..n * n], &self.decay_matrix[..n * n]);
            let square = &mut self.square[..n * n];
            kernels::multiply(self.scan.cpu.level(), 1.0, overlaps, decays, square);
        }
        self.square[..n * n].iter_mut().step_by(n + 1).for_each(|x| *x = 0.0);
    }
}
