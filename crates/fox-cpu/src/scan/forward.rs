//! Forward pass of a unit, chunk by chunk.

use fox_tensor::Result;

use super::chunk::Chunk;
use super::kernels::{self, Rows};
use super::{CHUNK, Scan, Unit};
use crate::linear::{Matrix, multiply_here};
use crate::pool::Buffer;
use crate::shared::Shared;

/// The forward pass of a unit.
pub struct Forward<'a> {
    chunk: Chunk<'a>,
    /// `[dk, heads * dv]`.
    state: Buffer,
    /// The chunk's output `[n, heads * dv]`.
    out: Buffer,
    /// Writes decayed to the end of the chunk `[n, heads * dv]`.
    faded: Buffer,
}

impl<'a> Forward<'a> {
    pub fn new(scan: &'a Scan<'a>, unit: &'a Unit) -> Result<Self> {
        let chunk = Chunk::new(scan, unit)?;
        let values = CHUNK.min(unit.segment.q_len) * chunk.width();
        let mut state = scan.cpu.pool().take(scan.spec.key_dim * chunk.width())?;
        scan.load_state(unit, scan.state, &mut state);
        let (out, faded) = (scan.cpu.pool().take(values)?, scan.cpu.pool().take(values)?);
        Ok(Forward { chunk, state, out, faded })
    }

    /// The state after the tokens seen so far.
    pub fn state(&self) -> &[f32] {
        &self.state
    }

    /// Runs all chunks; writes the unit's columns of `o` and its states in `saved`.
    pub fn run(&mut self, o: Shared<'_>, saved: Option<Shared<'_>>) {
        let (scan, unit) = (self.chunk.scan, self.chunk.unit);
        for (index, start) in (0..unit.segment.q_len).step_by(CHUNK).enumerate() {
            let n = CHUNK.min(unit.segment.q_len - start);
            let row = unit.segment.q_start + start;
            if let Some(saved) = saved {
                // SAFETY: the saved states of different units are disjoint.
                let own = unsafe { saved.slice(scan.saved_at(unit, index), self.state.len()) };
                own.copy_from_slice(&self.state);
            }
            self.chunk.load(row, n, &self.state);
            self.read();
            self.advance();
            let width = self.chunk.width();
            for (r, out) in self.out.chunks_exact(width).take(n).enumerate() {
                let (start, _) = scan.value_at(unit, row + r);
                // SAFETY: no other unit writes these columns of its segment's rows.
                unsafe { o.slice(start, width) }.copy_from_slice(out);
            }
        }
    }

    /// `O = scale (diag(p) Q S + (scores * D) W) + skip V`.
    fn read(&mut self) {
        let (scan, n, width) = (self.chunk.scan, self.chunk.n, self.chunk.width());
        let (dk, dv, scale) = (scan.spec.key_dim, scan.spec.value_dim, scan.spec.scale);
        let level = scan.cpu.level();
        let state = Matrix::strided(&self.state, dk, width, width);
        let by_channel = self.chunk.channels.is_some();
        let (q, factor) = match &self.chunk.channels {
            Some(channels) => (channels.faded_queries(), scale),
            None => (self.chunk.q(), 1.0),
        };
        multiply_here(factor, q, state, &mut self.out, width, false);
        for h in 0..self.chunk.unit.heads {
            if !by_channel {
                let out = &mut self.out[h * dv..];
                kernels::scale_own_rows(
                    level,
                    scale,
                    &self.chunk.prefix[h * n..][..n],
                    dv,
                    out,
                    width,
                );
                self.chunk.load_decay_matrix(h);
                let (scores, decays) =
                    (&self.chunk.scores[..n * n], &self.chunk.decay_matrix[..n * n]);
                kernels::multiply(level, 1.0, scores, decays, &mut self.chunk.square[..n * n]);
            }
            let weights = if by_channel { &self.chunk.scores } else { &self.chunk.square };
            let weights = Matrix::strided(weights, n, n, n);
            let written = Matrix::strided(&self.chunk.written[h * dv..], n, dv, width);
            let out = &mut self.out[h * dv..];
            multiply_here(scale, weights, written, out, width, true);
            if let Some(skip) = scan.skip {
                let (ones, skip) = ([1.0; CHUNK], skip[self.chunk.unit.first_head + h]);
                let v = self.chunk.head_rows(scan.v, h);
                kernels::add_scaled_rows(level, skip, &ones[..n], v, dv, out, width);
            }
        }
    }

    /// `S' = p_n S + K^T diag(s) W`.
    fn advance(&mut self) {
        let (scan, n, width) = (self.chunk.scan, self.chunk.n, self.chunk.width());
        let (dv, level) = (scan.spec.value_dim, scan.cpu.level());
        if let Some(channels) = &self.chunk.channels {
            kernels::scale_own_rows(
                level,
                1.0,
                channels.last_prefix(),
                width,
                &mut self.state,
                width,
            );
            let written = Matrix::strided(&self.chunk.written, n, width, width);
            multiply_here(1.0, channels.faded_keys().t(), written, &mut self.state, width, true);
            return;
        }
        for h in 0..self.chunk.unit.heads {
            let last = self.chunk.prefix[h * n + n - 1];
            kernels::scale_columns(level, last, dv, &mut self.state[h * dv..], width);
            let written = Rows::new(&self.chunk.written[h * dv..], width);
            let suffix = &self.chunk.suffix[h * n..][..n];
            kernels::scale_rows(level, 1.0, suffix, written, dv, &mut self.faded[h * dv..], width);
        }
        let faded = Matrix::strided(&self.faded, n, width, width);
        multiply_here(1.0, self.chunk.k().t(), faded, &mut self.state, width, true);
    }
}
