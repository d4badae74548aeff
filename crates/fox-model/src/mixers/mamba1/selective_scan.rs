//! The selective scan: `S_t = exp(dt_t A) S_{t-1} + (dt_t u_t) B_t`, `y_t = S_t . C_t + D u_t` for every channel.
//!
//! Channels are independent of each other, so they are divided among threads in blocks of a fixed size; the
//! gradients of `B` and `C`, to which all channels add, are summed block by block. The op computes in f64 on the
//! host, whatever the device: it is right everywhere and fast nowhere. Mamba-2 is the mixer to train with.

use std::ops::Range;

use fox_tensor::{CustomOp, Result, Segment, Segments, Tensor};

/// Channels that a thread takes at a time.
const BLOCK: usize = 32;

/// The op. Inputs: `u: [R, E]`, `dt: [R, E]` before the softplus, `a_log: [E, N]`, `b: [R, N]`, `c: [R, N]`,
/// `skip: [E]`. Outputs: `y: [R, E]`, and the state after each segment `[segments, E * N]`.
pub(super) struct SelectiveScan {
    /// Channels `E`.
    pub channels: usize,
    /// Elements of a channel's state `N`.
    pub states: usize,
    /// The sequences.
    pub segments: Segments,
    /// The state before each segment `[segments, E * N]`; zeros when absent. No gradient.
    pub before: Option<Tensor>,
}

/// The inputs on the host.
struct Inputs {
    u: Vec<f64>,
    dt: Vec<f64>,
    a_log: Vec<f64>,
    b: Vec<f64>,
    c: Vec<f64>,
    skip: Vec<f64>,
    before: Option<Vec<f64>>,
}

/// Output of the channels of a block.
struct Forward {
    y: Vec<f64>,
    after: Vec<f64>,
}

/// Gradients from the channels of a block; `db` and `dc` are its terms of a sum.
struct Backward {
    du: Vec<f64>,
    ddt: Vec<f64>,
    da_log: Vec<f64>,
    db: Vec<f64>,
    dc: Vec<f64>,
    dskip: Vec<f64>,
}

impl SelectiveScan {
    fn inputs(&self, inputs: &[&Tensor]) -> Result<Inputs> {
        let value = |i: usize| inputs[i].to_f64();
        Ok(Inputs {
            u: value(0)?,
            dt: value(1)?,
            a_log: value(2)?,
            b: value(3)?,
            c: value(4)?,
            skip: value(5)?,
            before: self.before.as_ref().map(Tensor::to_f64).transpose()?,
        })
    }

    /// `f` of every block of channels, in order, on all cores.
    fn blocks<T: Send>(&self, f: impl Fn(Range<usize>) -> T + Sync) -> Vec<(Range<usize>, T)> {
        let starts: Vec<usize> = (0..self.channels).step_by(BLOCK).collect();
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let block = |start: usize| start..(start + BLOCK).min(self.channels);
        let (f, block) = (&f, &block);
        let work = |own: Vec<usize>| own.into_iter().map(|s| (block(s), f(block(s)))).collect();
        let mut results: Vec<(Range<usize>, T)> = std::thread::scope(|scope| {
            let share = starts.len().div_ceil(threads).max(1);
            let run = |own: &[usize]| {
                let own = own.to_vec();
                scope.spawn(move || -> Vec<(Range<usize>, T)> { work(own) })
            };
            let running: Vec<_> = starts.chunks(share).map(run).collect();
            let joined = running.into_iter().map(|thread| thread.join());
            // A thread of plain arithmetic panics only where this one would.
            joined
                .flat_map(|found| found.unwrap_or_else(|e| std::panic::resume_unwind(e)))
                .collect()
        });
        results.sort_by_key(|(range, _)| range.start);
        results
    }

    /// The state of a channel before a segment `[N]`.
    fn begin(&self, x: &Inputs, segment: usize, e: usize) -> Vec<f64> {
        let at = (segment * self.channels + e) * self.states;
        x.before.as_ref().map_or(vec![0.0; self.states], |all| all[at..at + self.states].to_vec())
    }

    fn a(&self, x: &Inputs, e: usize) -> Vec<f64> {
        x.a_log[e * self.states..(e + 1) * self.states].iter().map(|a| -a.exp()).collect()
    }

    /// One token of one channel.
    fn advance(&self, x: &Inputs, a: &[f64], row: usize, e: usize, state: &mut [f64]) -> f64 {
        let at = row * self.channels + e;
        let (u, dt, n) = (x.u[at], softplus(x.dt[at]), row * self.states);
        let mut y = x.skip[e] * u;
        for (i, s) in state.iter_mut().enumerate() {
            *s = (dt * a[i]).exp() * *s + dt * u * x.b[n + i];
            y += *s * x.c[n + i];
        }
        y
    }

    fn forward_block(&self, x: &Inputs, rows: usize, channels: Range<usize>) -> Forward {
        let (width, first) = (channels.len(), channels.start);
        let mut y = vec![0.0; rows * width];
        let mut after = Vec::with_capacity(self.segments.len() * width * self.states);
        for (n, segment) in self.segments.as_slice().iter().enumerate() {
            for e in channels.clone() {
                let (a, mut state) = (self.a(x, e), self.begin(x, n, e));
                for row in rows_of(segment) {
                    y[row * width + e - first] = self.advance(x, &a, row, e, &mut state);
                }
                after.extend(state);
            }
        }
        Forward { y, after }
    }

    fn backward_block(
        &self,
        x: &Inputs,
        dy: &[f64],
        rows: usize,
        channels: Range<usize>,
    ) -> Backward {
        let (width, first, n) = (channels.len(), channels.start, self.states);
        let mut out = Backward {
            du: vec![0.0; rows * width],
            ddt: vec![0.0; rows * width],
            da_log: vec![0.0; width * n],
            db: vec![0.0; rows * n],
            dc: vec![0.0; rows * n],
            dskip: vec![0.0; width],
        };
        for (number, segment) in self.segments.as_slice().iter().enumerate() {
            for e in channels.clone() {
                let (a, own) = (self.a(x, e), e - first);
                // The state before every token, and after the last.
                let mut states = vec![self.begin(x, number, e)];
                for row in rows_of(segment) {
                    let mut state = states[states.len() - 1].clone();
                    self.advance(x, &a, row, e, &mut state);
                    states.push(state);
                }
                let mut ds = vec![0.0; n];
                for (t, row) in rows_of(segment).enumerate().rev() {
                    let at = row * self.channels + e;
                    let (u, dt, dy) = (x.u[at], softplus(x.dt[at]), dy[at]);
                    let (mut du, mut ddt) = (dy * x.skip[e], 0.0);
                    out.dskip[own] += dy * u;
                    for i in 0..n {
                        let (b, c) = (x.b[row * n + i], x.c[row * n + i]);
                        ds[i] += c * dy;
                        out.dc[row * n + i] += states[t + 1][i] * dy;
                        out.db[row * n + i] += ds[i] * dt * u;
                        let decay = (dt * a[i]).exp();
                        let dlog = ds[i] * states[t][i] * decay;
                        du += ds[i] * dt * b;
                        ddt += dlog * a[i] + ds[i] * u * b;
                        // A = -exp(A_log) is its own derivative.
                        out.da_log[own * n + i] += dlog * dt * a[i];
                        ds[i] *= decay;
                    }
                    out.du[row * width + own] += du;
                    out.ddt[row * width + own] += ddt * sigmoid(x.dt[at]);
                }
            }
        }
        out
    }
}

impl CustomOp for SelectiveScan {
    fn name(&self) -> &'static str {
        "selective_scan"
    }

    fn forward(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let (x, rows, device) = (self.inputs(inputs)?, inputs[0].rows(), inputs[0].device());
        let (e, n) = (self.channels, self.states);
        let mut y = vec![0.0; rows * e];
        let mut after = vec![0.0; self.segments.len() * e * n];
        for (range, block) in self.blocks(|range| self.forward_block(&x, rows, range)) {
            place(&mut y, &block.y, e, &range);
            for segment in 0..self.segments.len() {
                let (from, count) = (segment * range.len() * n, range.len() * n);
                let to = (segment * e + range.start) * n;
                after[to..to + count].copy_from_slice(&block.after[from..from + count]);
            }
        }
        Ok(vec![
            device.from_f64(&y, [rows, e])?,
            device.from_f64(&after, [self.segments.len(), e * n])?,
        ])
    }

    fn backward(
        &self,
        inputs: &[&Tensor],
        _: &[&Tensor],
        grads: &[&Tensor],
    ) -> Result<Vec<Option<Tensor>>> {
        let (x, rows, device) = (self.inputs(inputs)?, inputs[0].rows(), inputs[0].device());
        let (e, n, dy) = (self.channels, self.states, grads[0].to_f64()?);
        let (mut du, mut ddt) = (vec![0.0; rows * e], vec![0.0; rows * e]);
        let (mut da_log, mut dskip) = (Vec::with_capacity(e * n), Vec::with_capacity(e));
        let (mut db, mut dc) = (vec![0.0; rows * n], vec![0.0; rows * n]);
        for (range, block) in self.blocks(|range| self.backward_block(&x, &dy, rows, range)) {
            place(&mut du, &block.du, e, &range);
            place(&mut ddt, &block.ddt, e, &range);
            da_log.extend(block.da_log);
            dskip.extend(block.dskip);
            add(&mut db, &block.db);
            add(&mut dc, &block.dc);
        }
        Ok(vec![
            Some(device.from_f64(&du, [rows, e])?),
            Some(device.from_f64(&ddt, [rows, e])?),
            Some(device.from_f64(&da_log, [e, n])?),
            Some(device.from_f64(&db, [rows, n])?),
            Some(device.from_f64(&dc, [rows, n])?),
            Some(device.from_f64(&dskip, [e])?),
        ])
    }
}

fn rows_of(segment: &Segment) -> Range<usize> {
    segment.q_start..segment.q_start + segment.q_len
}

/// Puts the columns of a block into a matrix of `cols` columns.
fn place(all: &mut [f64], block: &[f64], cols: usize, range: &Range<usize>) {
    for (row, part) in all.chunks_mut(cols).zip(block.chunks(range.len())) {
        row[range.clone()].copy_from_slice(part);
    }
}

fn add(sum: &mut [f64], part: &[f64]) {
    for (sum, part) in sum.iter_mut().zip(part) {
        *sum += part;
    }
}

fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
