//! Backward pass of a unit, from the last chunk to the first.

use fox_tensor::Result;

use super::channel::{Left, finish_gradients};
use super::chunk::Chunk;
use super::kernels::{self, Rows};
use super::solve::{Sides, System};
use super::{CHUNK, Scan, Unit, store_state};
use crate::linear::{Matrix, multiply_here};
use crate::pool::Buffer;
use crate::shared::Shared;

/// Output gradients.
pub struct Outputs<'a> {
    /// `[splits, R, G * dk]`: units that share keys write separate splits of `split_len` elements.
    pub dq: Shared<'a>,
    pub dk: Shared<'a>,
    pub split_len: usize,
    pub dv: Shared<'a>,
    pub dlog_decay: Shared<'a>,
    pub dwrite: Shared<'a>,
    /// `[segments, H]`.
    pub dskip: Shared<'a>,
    /// `[segments, H, dk, dv]`, if there are initial states.
    pub dstate: Option<Shared<'a>>,
}

/// What the backward pass reads besides the operands.
#[derive(Clone, Copy)]
pub struct Given<'a> {
    /// Gradient of the output.
    pub d_out: &'a [f32],
    /// Gradient of the last states `[segments, H, dk, dv]`; zeros when absent.
    pub d_state: Option<&'a [f32]>,
    /// States before each chunk.
    pub saved: &'a [f32],
    /// The last states, if they have a gradient.
    pub last: Option<&'a [f32]>,
}

/// The backward pass of a unit.
pub struct Backward<'a> {
    chunk: Chunk<'a>,
    d_out: &'a [f32],
    saved: &'a [f32],
    /// Gradient of the state after the chunk `[dk, heads * dv]`.
    d_state: Buffer,
    /// The last state `[dk, heads * dv]`, if it has a gradient.
    last: Option<Buffer>,
    /// `[n, heads * dv]`: gradient of the writes; of the errors (or values); the writes decayed to the chunk's end;
    /// output gradients decayed from its start; `-diag(p) dE`; `Q S`.
    d_written: Buffer,
    d_errors: Buffer,
    faded: Buffer,
    faded_d_out: Buffer,
    faded_d_errors: Buffer,
    read: Buffer,
    /// `[n, dk]`.
    dq: Buffer,
    dk: Buffer,
    /// `[n, n]`: gradients of scores and of overlaps, summed over heads, and of one head.
    d_scores: Buffer,
    d_overlaps: Buffer,
    d_square: Buffer,
    /// `[n]` per head, or `[n, dk]` with a decay per channel: the gradient of each token's log decay, before suffix sums.
    flow: Buffer,
    /// `[n]`, with a decay per head: what each token's write, decayed to the end of the chunk, adds to the loss there.
    ends: Buffer,
    /// `[n, dk]`, with a decay per channel; for the delta rule also the gradient of the keys that read the state.
    scratch: Buffer,
    d_reading_keys: Buffer,
    line: Buffer,
    dwrite: Buffer,
    dskip: Vec<f32>,
}

impl<'a> Backward<'a> {
    pub fn new(scan: &'a Scan<'a>, unit: &'a Unit, given: Given<'a>) -> Result<Self> {
        let chunk = Chunk::new(scan, unit)?;
        let (n, dk, width) = (CHUNK.min(unit.segment.q_len), scan.spec.key_dim, chunk.width());
        let take = |len: usize| scan.cpu.pool().take(len);
        let when = |on: bool, len: usize| take(if on { len } else { 0 });
        let decays = scan.log_decay.is_some();
        let mut d_state = take(dk * width)?;
        scan.load_state(unit, given.d_state, &mut d_state);
        let mut last = given.last.map(|_| take(dk * width)).transpose()?;
        if let Some(last) = &mut last {
            scan.load_state(unit, given.last, last);
        }
        Ok(Backward {
            chunk,
            d_out: given.d_out,
            saved: given.saved,
            d_state,
            last,
            d_written: take(n * width)?,
            d_errors: take(n * width)?,
            faded: take(n * width)?,
            faded_d_out: take(n * width)?,
            faded_d_errors: when(scan.is_delta() && !scan.by_channel, n * width)?,
            read: when(decays && !scan.by_channel, n * width)?,
            dq: take(n * dk)?,
            dk: take(n * dk)?,
            d_scores: take(n * n)?,
            d_overlaps: when(scan.is_delta(), n * n)?,
            d_square: take(n * n)?,
            flow: take(if scan.by_channel { n * dk } else { n })?,
            ends: when(decays && !scan.by_channel, n)?,
            scratch: when(scan.by_channel, n * dk)?,
            d_reading_keys: when(scan.by_channel && scan.is_delta(), n * dk)?,
            line: take(n)?,
            dwrite: take(n)?,
            dskip: vec![0.0; unit.heads],
        })
    }

    /// All chunks.
    pub fn run(&mut self, out: &Outputs<'_>) -> Result<()> {
        let (scan, unit) = (self.chunk.scan, self.chunk.unit);
        let (len, chunks) = (self.d_state.len(), unit.segment.q_len.div_ceil(CHUNK));
        let last = self.last.take();
        for index in (0..chunks).rev() {
            let start = index * CHUNK;
            let n = CHUNK.min(unit.segment.q_len - start);
            let state = &self.saved[scan.saved_at(unit, index)..][..len];
            // The state after the last chunk is absent where its gradient is 0.
            let next = match index + 1 < chunks {
                true => Some(&self.saved[scan.saved_at(unit, index + 1)..][..len]),
                false => last.as_deref(),
            };
            self.chunk.load(unit.segment.q_start + start, n, state);
            if scan.by_channel {
                self.chunk_by_channel(state, next, out);
            } else {
                self.chunk_by_head(state, out);
            }
            self.store_keys(out);
        }
        if let Some(dstate) = out.dstate {
            store_state(scan, unit, &self.d_state, dstate);
        }
        for (h, sum) in self.dskip.iter().enumerate() {
            // SAFETY: no other unit has these heads of this segment.
            let out =
                unsafe { out.dskip.slice(unit.index * scan.spec.heads + unit.first_head + h, 1) };
            out[0] = *sum;
        }
        Ok(())
    }

    /// A chunk whose decays are per head, or which has none.
    fn chunk_by_head(&mut self, state: &[f32], out: &Outputs<'_>) {
        let (scan, unit, n) = (self.chunk.scan, self.chunk.unit, self.chunk.n);
        let (dk, width) = (scan.spec.key_dim, self.chunk.width());
        let (states, state) = (state, Matrix::strided(state, dk, width, width));
        let (q, k) = (self.chunk.q(), self.chunk.k());
        let d_state = Matrix::strided(&self.d_state, dk, width, width);
        multiply_here(1.0, k, d_state, &mut self.d_written, width, false);
        let decays = scan.log_decay.is_some();
        if decays {
            multiply_here(1.0, q, state, &mut self.read, width, false);
        }
        self.d_scores[..n * n].fill(0.0);
        if scan.is_delta() {
            self.d_overlaps[..n * n].fill(0.0);
        }
        for h in 0..unit.heads {
            self.flow.fill(0.0);
            self.fade(h);
            self.chunk.load_decay_matrix(h);
            self.write_gradients(h);
            self.score_gradients(h);
            self.value_gradients(h, out);
            if decays {
                self.decay_gradients(h, states, out);
            }
        }
        self.key_gradients(state);
    }

    /// Gradients of queries and keys, over all heads at once, and of the state before the chunk.
    fn key_gradients(&mut self, state: Matrix<'_>) {
        let (scan, unit, n) = (self.chunk.scan, self.chunk.unit, self.chunk.n);
        let (dk, dv, width) = (scan.spec.key_dim, scan.spec.value_dim, self.chunk.width());
        let (q, k, level) = (self.chunk.q(), self.chunk.k(), scan.cpu.level());
        let d_state = Matrix::strided(&self.d_state, dk, width, width);
        let d_scores = Matrix::strided(&self.d_scores, n, n, n);
        let faded_d_out = Matrix::strided(&self.faded_d_out, n, width, width);
        let faded = Matrix::strided(&self.faded, n, width, width);
        multiply_here(1.0, d_scores, k, &mut self.dq, dk, false);
        multiply_here(1.0, faded_d_out, state.t(), &mut self.dq, dk, true);
        multiply_here(1.0, d_scores.t(), q, &mut self.dk, dk, false);
        multiply_here(1.0, faded, d_state.t(), &mut self.dk, dk, true);
        if scan.is_delta() {
            let d_overlaps = Matrix::strided(&self.d_overlaps, n, n, n);
            let faded_d_errors = Matrix::strided(&self.faded_d_errors, n, width, width);
            multiply_here(1.0, d_overlaps, k, &mut self.dk, dk, true);
            multiply_here(1.0, d_overlaps.t(), k, &mut self.dk, dk, true);
            multiply_here(1.0, faded_d_errors, state.t(), &mut self.dk, dk, true);
        }
        for h in 0..unit.heads {
            let last = self.chunk.prefix[h * n + n - 1];
            kernels::scale_columns(level, last, dv, &mut self.d_state[h * dv..], width);
        }
        multiply_here(1.0, q.t(), faded_d_out, &mut self.d_state, width, true);
        if scan.is_delta() {
            let faded_d_errors = Matrix::strided(&self.faded_d_errors, n, width, width);
            multiply_here(1.0, k.t(), faded_d_errors, &mut self.d_state, width, true);
        }
    }

    /// Gradients of the log decays of head `h`; `flow` has the terms inside the chunk. A decay also multiplies what the
    /// state before the chunk and the writes before it add to the state after the chunk: these terms are summed from the
    /// start, because `<dS', S'>` less those of later writes would be a small difference of large numbers.
    fn decay_gradients(&mut self, h: usize, state: &[f32], out: &Outputs<'_>) {
        let (scan, unit, n) = (self.chunk.scan, self.chunk.unit, self.chunk.n);
        let (dv, width, level) = (scan.spec.value_dim, self.chunk.width(), scan.cpu.level());
        let mut before = self.chunk.prefix[h * n + n - 1] * self.state_flow(h, state);
        let (ones, flow) = ([1.0; CHUNK], &mut self.flow[..n]);
        let rows = |x| Rows::new(x, width);
        let faded = rows(&self.faded_d_out[h * dv..]);
        let read = rows(&self.read[h * dv..]);
        kernels::add_row_dots(level, &ones[..n], faded, read, dv, flow);
        if scan.is_delta() {
            let faded = rows(&self.faded_d_errors[h * dv..]);
            let read = rows(&self.chunk.read_keys[h * dv..]);
            kernels::add_row_dots(level, &ones[..n], faded, read, dv, flow);
        }
        kernels::suffix_sums(1, flow);
        for (r, (flow, end)) in flow.iter().zip(&self.ends[..n]).enumerate() {
            let at = (self.chunk.row + r) * scan.spec.heads + unit.first_head + h;
            // SAFETY: no other unit has these heads of this segment.
            unsafe { out.dlog_decay.slice(at, 1)[0] = *flow + before };
            before += end;
        }
    }

    /// Terms across the chunk's borders: output gradients decayed from its start, writes decayed to its end, and the
    /// gradient of the writes from the state at its end.
    fn fade(&mut self, h: usize) {
        let (scan, n, width) = (self.chunk.scan, self.chunk.n, self.chunk.width());
        let (dv, level) = (scan.spec.value_dim, scan.cpu.level());
        let (prefix, suffix) = (&self.chunk.prefix[h * n..][..n], &self.chunk.suffix[h * n..][..n]);
        let d_out = self.chunk.head_rows(self.d_out, h);
        let out = &mut self.faded_d_out[h * dv..];
        kernels::scale_rows(level, scan.spec.scale, prefix, d_out, dv, out, width);
        let written = Rows::new(&self.chunk.written[h * dv..], width);
        kernels::scale_rows(level, 1.0, suffix, written, dv, &mut self.faded[h * dv..], width);
        if scan.log_decay.is_some() {
            let (faded, read) = (
                Rows::new(&self.faded[h * dv..], width),
                Rows::new(&self.d_written[h * dv..], width),
            );
            let (ones, ends) = ([1.0; CHUNK], &mut self.ends[..n]);
            ends.fill(0.0);
            kernels::add_row_dots(level, &ones[..n], faded, read, dv, ends);
        }
        kernels::scale_own_rows(level, 1.0, suffix, dv, &mut self.d_written[h * dv..], width);
    }

    /// The gradient of the writes of head `h` in full; for the delta rule also that of the errors.
    fn write_gradients(&mut self, h: usize) {
        let (scan, n, width) = (self.chunk.scan, self.chunk.n, self.chunk.width());
        let (dv, level) = (scan.spec.value_dim, scan.cpu.level());
        let decays = &self.chunk.decay_matrix[..n * n];
        let weights = &mut self.d_square[..n * n];
        kernels::multiply(level, scan.spec.scale, &self.chunk.scores[..n * n], decays, weights);
        let weights = Matrix::strided(weights, n, n, n);
        let d_out = self.chunk.head_rows(self.d_out, h);
        let d_out = Matrix::strided(d_out.data, n, dv, d_out.stride);
        multiply_here(1.0, weights.t(), d_out, &mut self.d_written[h * dv..], width, true);
        let strength = &self.chunk.strength[h * n..][..n];
        if !scan.is_delta() {
            let d_written = Rows::new(&self.d_written[h * dv..], width);
            let out = &mut self.d_errors[h * dv..];
            kernels::scale_rows(level, 1.0, strength, d_written, dv, out, width);
            return;
        }
        self.chunk.load_system(h);
        let (lower, write) = (&self.chunk.square[..n * n], &self.chunk.strength[h * n..][..n]);
        System { level, n, lower, write }.backward(&mut Sides {
            x: &mut self.d_written[h * dv..],
            scaled: &mut self.d_errors[h * dv..],
            width: dv,
            stride: width,
        });
        let (prefix, d_errors) =
            (&self.chunk.prefix[h * n..][..n], Rows::new(&self.d_errors[h * dv..], width));
        let out = &mut self.faded_d_errors[h * dv..];
        kernels::scale_rows(level, -1.0, prefix, d_errors, dv, out, width);
    }

    /// Gradients of scores (and overlaps), and of the decays inside the chunk.
    fn score_gradients(&mut self, h: usize) {
        let (scan, n, width) = (self.chunk.scan, self.chunk.n, self.chunk.width());
        let (dv, level) = (scan.spec.value_dim, scan.cpu.level());
        let decays = &self.chunk.decay_matrix[..n * n];
        let written = Matrix::strided(&self.chunk.written[h * dv..], n, dv, width);
        let d_out = self.chunk.head_rows(self.d_out, h);
        let d_out = Matrix::strided(d_out.data, n, dv, d_out.stride);
        let square = &mut self.d_square[..n * n];
        let line = &mut self.line[..n];
        multiply_here(scan.spec.scale, d_out, written.t(), square, n, false);
        kernels::multiply_into(level, decays, square);
        kernels::add(level, square, &mut self.d_scores[..n * n]);
        if scan.log_decay.is_some() {
            // The diagonal does not decay.
            square.iter_mut().step_by(n + 1).for_each(|x| *x = 0.0);
            let scores = &self.chunk.scores[..n * n];
            kernels::flow_sums(level, n, square, scores, &mut self.flow[..n], line);
        }
        if scan.is_delta() {
            let d_errors = Matrix::strided(&self.d_errors[h * dv..], n, dv, width);
            multiply_here(-1.0, d_errors, written.t(), square, n, false);
            kernels::multiply_into(level, decays, square);
            square.iter_mut().step_by(n + 1).for_each(|x| *x = 0.0);
            kernels::add(level, square, &mut self.d_overlaps[..n * n]);
            if scan.log_decay.is_some() {
                let overlaps = &self.chunk.overlaps[..n * n];
                kernels::flow_sums(level, n, square, overlaps, &mut self.flow[..n], line);
            }
        }
    }

    /// Gradients of values, strengths and skip of head `h`.
    fn value_gradients(&mut self, h: usize, out: &Outputs<'_>) {
        let (scan, unit, n, width) =
            (self.chunk.scan, self.chunk.unit, self.chunk.n, self.chunk.width());
        let (dv, level, heads) = (scan.spec.value_dim, scan.cpu.level(), scan.spec.heads);
        let (v, d_out) = (self.chunk.head_rows(scan.v, h), self.chunk.head_rows(self.d_out, h));
        let ones = [1.0; CHUNK];
        if scan.write.is_some() {
            let errors = match scan.is_delta() {
                true => Rows::new(&self.chunk.errors[h * dv..], width),
                false => v,
            };
            let d_written = Rows::new(&self.d_written[h * dv..], width);
            self.dwrite.fill(0.0);
            kernels::add_row_dots(level, &ones[..n], d_written, errors, dv, &mut self.dwrite[..n]);
            for (r, d) in self.dwrite[..n].iter().enumerate() {
                let at = (self.chunk.row + r) * heads + unit.first_head + h;
                // SAFETY: no other unit has these heads of this segment.
                unsafe { out.dwrite.slice(at, 1)[0] = *d };
            }
        }
        let d_errors = &mut self.d_errors[h * dv..];
        if let Some(skip) = scan.skip {
            self.line.fill(0.0);
            kernels::add_row_dots(level, &ones[..n], d_out, v, dv, &mut self.line[..n]);
            self.dskip[h] += self.line[..n].iter().sum::<f32>();
            let skip = skip[unit.first_head + h];
            kernels::add_scaled_rows(level, skip, &ones[..n], d_out, dv, d_errors, width);
        }
        for r in 0..n {
            let (start, _) = scan.value_at(unit, self.chunk.row + r);
            // SAFETY: no other unit writes these columns of its segment's rows.
            let own = unsafe { out.dv.slice(start + h * dv, dv) };
            own.copy_from_slice(&d_errors[r * width..][..dv]);
        }
    }

    /// `<dS', S>` of head `h`, of the state before the chunk.
    fn state_flow(&self, h: usize, state: &[f32]) -> f32 {
        let (dv, width) = (self.chunk.scan.spec.value_dim, self.chunk.width());
        let rows = self.chunk.scan.spec.key_dim;
        let (d_state, state) =
            (Rows::new(&self.d_state[h * dv..], width), Rows::new(&state[h * dv..], width));
        kernels::block_dot(self.chunk.scan.cpu.level(), rows, d_state, state, dv)
    }

    /// A chunk of one head whose decays are per channel.
    fn chunk_by_channel(&mut self, state: &[f32], next: Option<&[f32]>, out: &Outputs<'_>) {
        let (scan, unit, n) = (self.chunk.scan, self.chunk.unit, self.chunk.n);
        let (dk, dv, scale) = (scan.spec.key_dim, scan.spec.value_dim, scan.spec.scale);
        let level = scan.cpu.level();
        let state = Matrix::strided(state, dk, dv, dv);
        let d_out = self.chunk.head_rows(self.d_out, 0);
        let d_out = Matrix::strided(d_out.data, n, dv, d_out.stride);
        let Some(mut channels) = self.chunk.channels.take() else { return };
        let d_state = Matrix::strided(&self.d_state, dk, dv, dv);
        let scores = Matrix::strided(&self.chunk.scores, n, n, n);
        multiply_here(1.0, channels.faded_keys(), d_state, &mut self.d_written, dv, false);
        multiply_here(scale, scores.t(), d_out, &mut self.d_written, dv, true);
        if scan.is_delta() {
            self.chunk.load_system(0);
            let (lower, write) = (&self.chunk.square[..n * n], &self.chunk.strength[..n]);
            System { level, n, lower, write }.backward(&mut Sides {
                x: &mut self.d_written,
                scaled: &mut self.d_errors,
                width: dv,
                stride: dv,
            });
        } else {
            let strength = &self.chunk.strength[..n];
            let d_written = Rows::new(&self.d_written, dv);
            kernels::scale_rows(level, 1.0, strength, d_written, dv, &mut self.d_errors, dv);
        }
        let len = n * dk;
        if scan.is_delta() {
            // Keys that read the state, `E = V - (K * p) S - A W`: before the chunk, then inside.
            let d_errors = Matrix::strided(&self.d_errors, n, dv, dv);
            let written = Matrix::strided(&self.chunk.written, n, dv, dv);
            let d_reading = &mut self.d_reading_keys[..len];
            multiply_here(-1.0, d_errors, state.t(), &mut self.scratch, dk, false);
            kernels::multiply(level, 1.0, &self.scratch[..len], channels.prefix(), d_reading);
            multiply_here(-1.0, d_errors, written.t(), &mut self.d_overlaps, n, false);
        }
        // Queries and keys: across the chunk's borders, then inside.
        let d_state = Matrix::strided(&self.d_state, dk, dv, dv);
        let written = Matrix::strided(&self.chunk.written, n, dv, dv);
        multiply_here(scale, d_out, state.t(), &mut self.scratch, dk, false);
        kernels::multiply(level, 1.0, &self.scratch[..len], channels.prefix(), &mut self.dq[..len]);
        multiply_here(1.0, written, d_state.t(), &mut self.scratch, dk, false);
        kernels::multiply(level, 1.0, &self.scratch[..len], channels.suffix(), &mut self.dk[..len]);
        let d_scores = &mut self.d_scores[..n * n];
        multiply_here(scale, d_out, written.t(), d_scores, n, false);
        channels.scores_backward(
            level,
            Left::Queries,
            d_scores,
            &mut self.dq[..len],
            &mut self.dk[..len],
            &mut self.scratch,
        );
        if scan.is_delta() {
            channels.scores_backward(
                level,
                Left::Keys,
                &self.d_overlaps[..n * n],
                &mut self.d_reading_keys[..len],
                &mut self.dk[..len],
                &mut self.scratch,
            );
        }
        self.line[..n].iter_mut().zip(d_scores.iter().step_by(n + 1)).for_each(|(x, d)| *x = *d);
        finish_gradients(
            level,
            channels.q(),
            channels.k(),
            &self.line[..n],
            dk,
            &mut self.dq[..len],
            &mut self.dk[..len],
            &mut self.flow[..len],
        );
        if scan.is_delta() {
            let d_reading = &self.d_reading_keys[..len];
            kernels::add_products(level, channels.k(), d_reading, &mut self.flow[..len]);
            kernels::add(level, d_reading, &mut self.dk[..len]);
        }
        if let Some(next) = next {
            let ones = vec![1.0; dk];
            let (d_state, next) = (Rows::new(&self.d_state, dv), Rows::new(next, dv));
            let last = &mut self.flow[len - dk..len];
            kernels::add_row_dots(level, &ones, d_state, next, dv, last);
        }
        kernels::suffix_sums(dk, &mut self.flow[..len]);
        for (r, flow) in self.flow[..len].chunks_exact(dk).enumerate() {
            let at = ((self.chunk.row + r) * scan.spec.heads + unit.first_head) * dk;
            // SAFETY: no other unit has these channels of this segment.
            unsafe { out.dlog_decay.slice(at, dk) }.copy_from_slice(flow);
        }
        kernels::scale_own_rows(level, 1.0, channels.last_prefix(), dv, &mut self.d_state, dv);
        multiply_here(scale, channels.faded_queries().t(), d_out, &mut self.d_state, dv, true);
        if scan.is_delta() {
            let d_errors = Matrix::strided(&self.d_errors, n, dv, dv);
            multiply_here(-1.0, channels.early_keys().t(), d_errors, &mut self.d_state, dv, true);
        }
        self.value_gradients(0, out);
        self.chunk.channels = Some(channels);
    }

    fn store_keys(&self, out: &Outputs<'_>) {
        let (scan, unit, dk) = (self.chunk.scan, self.chunk.unit, self.chunk.scan.spec.key_dim);
        for r in 0..self.chunk.n {
            let row = (self.chunk.row + r) * scan.spec.key_heads + unit.key_head;
            let at = unit.split * out.split_len + row * dk;
            // SAFETY: no other unit has these rows and columns of this split.
            unsafe {
                out.dq.slice(at, dk).copy_from_slice(&self.dq[r * dk..][..dk]);
                out.dk.slice(at, dk).copy_from_slice(&self.dk[r * dk..][..dk]);
            }
        }
    }
}
