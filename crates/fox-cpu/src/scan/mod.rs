//! Linear recurrences in chunks, on matrix products.
//!
//! Over a chunk of tokens the recurrence `S_t = a_t S_{t-1} + k_t w_t^T` unrolls to products of small
//! matrices. With `D_ij = a_{j+1} ... a_i` for `j <= i` and 0 above, `p_i = a_1 ... a_i` from the
//! chunk's start and `s_j = a_{j+1} ... a_n` to its end:
//!
//! ```text
//! O  = scale (diag(p) Q S + ((Q K^T) * D) W)            S' = p_n S + K^T diag(s) W
//! W  = diag(b) V                                        additive update
//! W  = diag(b) E,  E = V - diag(p) K S - ((K K^T) * D, strictly below the diagonal) W      delta rule
//! ```
//!
//! `E` comes from a triangular system. Decays are multiplied up, never divided and never taken as
//! differences of logarithms: every factor lies between 0 and 1, so nothing overflows and nothing
//! cancels however strong they are. A decay per channel does not factor out of `Q K^T`; see `channel`.
//!
//! The gradient of a log decay needs no separate matrix: each token's decay multiplies all terms from earlier to later
//! tokens, so it is a running sum over queries minus one over keys.
//!
//! Work is divided into units, one per segment and up to [`HEADS_PER_UNIT`] heads that share their keys; a unit's chunks
//! run in order, units in parallel.

mod backward;
mod channel;
mod chunk;
mod forward;
mod kernels;
mod solve;

use fox_tensor::{
    Result, ScanExtras, ScanGrads, ScanInputs, ScanOps, ScanOut, ScanSpec, Segment, StateUpdate,
    Tensor, check_scan_bwd, check_scan_fwd,
};
use rayon::prelude::*;

use crate::Cpu;
use crate::linear::Matrix;
use crate::pool::Buffer;
use crate::rows::{rows_per_task, sum_partials};
use crate::shared::Shared;
use backward::{Backward, Given, Outputs};
use forward::Forward;

impl ScanOps for Cpu {
    fn scan_fwd(
        &self,
        inputs: &ScanInputs<'_>,
        spec: &ScanSpec,
        keep: ScanExtras,
    ) -> Result<ScanOut> {
        check_scan_fwd(self, inputs, spec)?;
        self.run(|| forward(self, inputs, spec, keep))
    }

    fn scan_bwd(
        &self,
        d_out: &Tensor,
        d_state: Option<&Tensor>,
        inputs: &ScanInputs<'_>,
        saved: Option<&Tensor>,
        spec: &ScanSpec,
    ) -> Result<ScanGrads> {
        check_scan_bwd(self, d_out, d_state, inputs, saved, spec)?;
        self.run(|| backward(self, d_out, d_state, inputs, saved, spec))
    }
}

/// Tokens of a chunk. The work inside a chunk grows with its length and that on the state shrinks;
/// at the usual widths of 64 to 128 they balance around here.
pub const CHUNK: usize = 64;

/// Heads that share one product of queries and keys, when the keys are shared.
const HEADS_PER_UNIT: usize = 4;

/// Operands and options of one call.
struct Scan<'a> {
    cpu: &'a Cpu,
    spec: &'a ScanSpec,
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    log_decay: Option<&'a [f32]>,
    by_channel: bool,
    write: Option<&'a [f32]>,
    skip: Option<&'a [f32]>,
    state: Option<&'a [f32]>,
}

/// Some heads of one segment that share their keys.
#[derive(Clone, Copy)]
struct Unit {
    index: usize,
    segment: Segment,
    key_head: usize,
    first_head: usize,
    heads: usize,
    /// Index among the units that share a key head.
    split: usize,
    /// Number of chunks of the segments before.
    chunks_before: usize,
}

impl<'a> Scan<'a> {
    fn new(cpu: &'a Cpu, inputs: &ScanInputs<'a>, spec: &'a ScanSpec) -> Self {
        Scan {
            cpu,
            spec,
            q: cpu.real(inputs.q),
            k: cpu.real(inputs.k),
            v: cpu.real(inputs.v),
            log_decay: inputs.log_decay.map(|x| cpu.real(x)),
            by_channel: inputs.log_decay.is_some_and(|x| x.cols() != spec.heads),
            write: inputs.write.map(|x| cpu.real(x)),
            skip: inputs.skip.map(|x| cpu.real(x)),
            state: inputs.state.map(|x| cpu.real(x)),
        }
    }

    /// Heads per head of keys.
    fn group(&self) -> usize {
        self.spec.heads / self.spec.key_heads
    }

    /// Heads of a unit: one where decays are per channel, because these are part of the products of keys.
    fn heads_per_unit(&self) -> usize {
        if self.by_channel { 1 } else { HEADS_PER_UNIT }
    }

    /// Units that share a head of keys.
    fn splits(&self) -> usize {
        self.group().div_ceil(self.heads_per_unit())
    }

    fn is_delta(&self) -> bool {
        self.spec.update == StateUpdate::Delta
    }

    fn units(&self) -> Vec<Unit> {
        let (mut units, mut chunks_before) = (Vec::new(), 0);
        for (index, &segment) in self.spec.segments.as_slice().iter().enumerate() {
            for key_head in 0..self.spec.key_heads {
                for split in 0..self.splits() {
                    let first = split * self.heads_per_unit();
                    units.push(Unit {
                        index,
                        segment,
                        key_head,
                        first_head: key_head * self.group() + first,
                        heads: self.heads_per_unit().min(self.group() - first),
                        split,
                        chunks_before,
                    });
                }
            }
            chunks_before += segment.q_len.div_ceil(CHUNK);
        }
        units
    }

    fn chunks(&self) -> usize {
        self.spec.segments.as_slice().iter().map(|s| s.q_len.div_ceil(CHUNK)).sum()
    }

    /// Width of a unit's values.
    fn width(&self, unit: &Unit) -> usize {
        unit.heads * self.spec.value_dim
    }

    /// Rows of queries or keys of a unit.
    fn keys(&self, x: &'a [f32], unit: &Unit, row: usize, n: usize) -> Matrix<'a> {
        let (dk, stride) = (self.spec.key_dim, self.spec.key_heads * self.spec.key_dim);
        Matrix::strided(&x[row * stride + unit.key_head * dk..], n, dk, stride)
    }

    /// Offset of the values of a unit's row in a `[R, H * dv]` tensor, and the row stride.
    fn value_at(&self, unit: &Unit, row: usize) -> (usize, usize) {
        let stride = self.spec.heads * self.spec.value_dim;
        (row * stride + unit.first_head * self.spec.value_dim, stride)
    }

    /// A unit's part of `all`, states `[segments, H, dk, dv]` or zeros, with heads side by side `[dk, heads * dv]`.
    fn load_state(&self, unit: &Unit, all: Option<&[f32]>, state: &mut [f32]) {
        let (dk, dv) = (self.spec.key_dim, self.spec.value_dim);
        let Some(all) = all else { return state.fill(0.0) };
        let own = &all[(unit.index * self.spec.heads + unit.first_head) * dk * dv..];
        for (c, row) in state.chunks_exact_mut(unit.heads * dv).enumerate() {
            for (h, row) in row.chunks_exact_mut(dv).enumerate() {
                row.copy_from_slice(&own[(h * dk + c) * dv..][..dv]);
            }
        }
    }

    /// Offset of the saved state of a chunk.
    fn saved_at(&self, unit: &Unit, chunk: usize) -> usize {
        (unit.chunks_before + chunk) * self.spec.state_len()
            + unit.first_head * self.spec.key_dim * self.spec.value_dim
    }
}

/// The inverse of [`Scan::load_state`], to `[segments, H, dk, dv]`.
fn store_state(scan: &Scan<'_>, unit: &Unit, state: &[f32], out: Shared<'_>) {
    let (dk, dv) = (scan.spec.key_dim, scan.spec.value_dim);
    let first = (unit.index * scan.spec.heads + unit.first_head) * dk * dv;
    // SAFETY: the states of a unit's heads are adjacent and disjoint from those of other units.
    let own = unsafe { out.slice(first, unit.heads * dk * dv) };
    for (c, row) in state.chunks_exact(unit.heads * dv).enumerate() {
        for (h, row) in row.chunks_exact(dv).enumerate() {
            own[(h * dk + c) * dv..][..dv].copy_from_slice(row);
        }
    }
}

/// The forward pass. It saves the states at the start of every chunk.
pub fn forward(
    cpu: &Cpu,
    inputs: &ScanInputs<'_>,
    spec: &ScanSpec,
    keep: ScanExtras,
) -> Result<ScanOut> {
    let scan = Scan::new(cpu, inputs, spec);
    let segments = spec.segments.len();
    let mut o = cpu.pool().zeros(inputs.v.len())?;
    let optional = |on: bool, len: usize| cpu.pool().take(if on { len } else { 0 });
    let mut state = optional(keep.state, segments * spec.state_len())?;
    let mut saved = optional(keep.backward, scan.chunks() * spec.state_len())?;
    {
        let (o, state) = (Shared::new(&mut o), Shared::new(&mut state));
        let saved = keep.backward.then(|| Shared::new(&mut saved));
        scan.units().par_iter().try_for_each(|unit| {
            let mut pass = Forward::new(&scan, unit)?;
            pass.run(o, saved);
            if keep.state {
                store_state(&scan, unit, pass.state(), state);
            }
            Ok::<_, fox_tensor::Error>(())
        })?;
    }
    let device = inputs.v.device();
    let (chunks, len) = (scan.chunks(), spec.state_len());
    Ok(ScanOut {
        o: cpu.tensor(o, inputs.v.shape(), device),
        state: keep.state.then(|| cpu.tensor(state, [segments, len], device)),
        saved: keep.backward.then(|| cpu.tensor(saved, [chunks, len], device)),
    })
}

/// The backward pass. With a gradient of the last states the forward is computed again: the gradient of the decays needs
/// these states.
pub fn backward(
    cpu: &Cpu,
    d_out: &Tensor,
    d_state: Option<&Tensor>,
    inputs: &ScanInputs<'_>,
    saved: Option<&Tensor>,
    spec: &ScanSpec,
) -> Result<ScanGrads> {
    let recomputed;
    let mut last = None;
    let saved = match saved.filter(|_| d_state.is_none()) {
        Some(saved) => saved,
        None => {
            let keep = ScanExtras { state: d_state.is_some(), backward: true };
            let out = forward(cpu, inputs, spec, keep)?;
            (recomputed, last) = (out.saved, out.state);
            match &recomputed {
                Some(saved) => saved,
                None => return Err(fox_tensor::Error::argument("scan", "no states were saved")),
            }
        }
    };
    let scan = Scan::new(cpu, inputs, spec);
    if saved.len() != scan.chunks() * spec.state_len() {
        let detail = format!("saved states of shape {}, which are not of this call", saved.shape());
        return Err(fox_tensor::Error::argument("scan_bwd", detail));
    }
    let (splits, keys) = (scan.splits(), inputs.k.len());
    let mut dq = cpu.pool().zeros(splits * keys)?;
    let mut dk = cpu.pool().zeros(splits * keys)?;
    let mut dv = cpu.pool().zeros(inputs.v.len())?;
    let len = |x: Option<&Tensor>| x.map_or(0, Tensor::len);
    let mut dlog_decay = cpu.pool().zeros(len(inputs.log_decay))?;
    let mut dwrite = cpu.pool().zeros(len(inputs.write))?;
    let mut dstate = cpu.pool().take(len(inputs.state))?;
    let mut dskip_parts = cpu.pool().zeros(spec.segments.len() * spec.heads)?;
    {
        let out = Outputs {
            dq: Shared::new(&mut dq),
            dk: Shared::new(&mut dk),
            split_len: keys,
            dv: Shared::new(&mut dv),
            dlog_decay: Shared::new(&mut dlog_decay),
            dwrite: Shared::new(&mut dwrite),
            dskip: Shared::new(&mut dskip_parts),
            dstate: inputs.state.is_some().then(|| Shared::new(&mut dstate)),
        };
        let (d_state, last) = (d_state.map(|x| cpu.real(x)), last.as_ref().map(|x| cpu.real(x)));
        let given = Given { d_out: cpu.real(d_out), d_state, saved: cpu.real(saved), last };
        scan.units()
            .par_iter()
            .try_for_each(|unit| Backward::new(&scan, unit, given)?.run(&out))?;
    }
    let device = inputs.v.device();
    let mut dskip = cpu.pool().zeros(spec.heads)?;
    sum_partials(&dskip_parts, &mut dskip);
    let like = |data: Buffer, x: &Tensor| cpu.tensor(data, x.shape(), device);
    Ok(ScanGrads {
        dq: like(sum_units(cpu, dq, keys)?, inputs.q),
        dk: like(sum_units(cpu, dk, keys)?, inputs.k),
        dv: like(dv, inputs.v),
        dlog_decay: inputs.log_decay.map(|x| like(dlog_decay, x)),
        dwrite: inputs.write.map(|x| like(dwrite, x)),
        dskip: inputs.skip.map(|x| like(dskip, x)),
        dstate: inputs.state.map(|x| like(dstate, x)),
    })
}

/// Adds the splits of units that share keys, in order.
fn sum_units(cpu: &Cpu, parts: Buffer, len: usize) -> Result<Buffer> {
    if parts.len() == len {
        return Ok(parts);
    }
    let mut sum = cpu.pool().take(len)?;
    let step = rows_per_task(1);
    sum.par_chunks_mut(step).enumerate().for_each(|(at, sum)| {
        sum.copy_from_slice(&parts[at * step..][..sum.len()]);
        for part in parts[len..].chunks_exact(len) {
            kernels::add(cpu.level(), &part[at * step..][..sum.len()], sum);
        }
    });
    Ok(sum)
}
