//! The short convolution, with bias, nonlinearity and norm in one pass over each row.

use fox_tensor::{
    Activation, ConvGrads, ConvInputs, ConvOps, ConvSpec, L2Norm, Result, Segment, Segments,
    Tensor, check_short_conv_bwd, check_short_conv_fwd, check_short_conv_split_bwd,
    check_short_conv_split_fwd, short_conv_split_bwd_by_copies, short_conv_split_fwd_by_copies,
};
use rayon::prelude::*;

use crate::Cpu;
use crate::gated_norm::activate;
use crate::pool::Buffer;
use crate::rows::{RowChunk, row_chunks, sum_partials};
use crate::shared::Shared;
use crate::simd::{Level, Simd, dot, map, simd_fn, update};

impl ConvOps for Cpu {
    fn short_conv_fwd(&self, inputs: &ConvInputs<'_>, spec: &ConvSpec) -> Result<Tensor> {
        check_short_conv_fwd(self, inputs, spec)?;
        self.run(|| forward(self, inputs, spec))
    }

    fn short_conv_bwd(
        &self,
        dy: &Tensor,
        inputs: &ConvInputs<'_>,
        spec: &ConvSpec,
    ) -> Result<ConvGrads> {
        check_short_conv_bwd(self, dy, inputs, spec)?;
        self.run(|| backward(self, dy, inputs, spec))
    }

    fn short_conv_split_fwd(
        &self,
        inputs: &ConvInputs<'_>,
        widths: &[usize],
        spec: &ConvSpec,
    ) -> Result<Vec<Tensor>> {
        check_short_conv_split_fwd(self, inputs, widths, spec)?;
        short_conv_split_fwd_by_copies(self, inputs, widths, spec)
    }

    fn short_conv_split_bwd(
        &self,
        dys: &[Tensor],
        inputs: &ConvInputs<'_>,
        widths: &[usize],
        spec: &ConvSpec,
    ) -> Result<ConvGrads> {
        check_short_conv_split_bwd(self, dys, inputs, widths, spec)?;
        short_conv_split_bwd_by_copies(self, dys, inputs, widths, spec)
    }
}

/// Values of `PASS` of [`Operands::filtered`].
const FORWARD: usize = 0;
const BACKWARD: usize = 1;

/// Operands of one call as slices.
struct Operands<'a> {
    level: Level,
    width: usize,
    taps: usize,
    x: &'a [f32],
    /// Filters tap by tap, the current row's first: `[K, C]`.
    filters: Buffer,
    bias: Option<&'a [f32]>,
    before: Option<&'a [f32]>,
    activation: Option<Activation>,
    l2_norm: Option<L2Norm>,
    segments: &'a [Segment],
}

impl<'a> Operands<'a> {
    fn new(cpu: &'a Cpu, inputs: &ConvInputs<'a>, spec: &'a ConvSpec) -> Result<Self> {
        let (width, taps) = (inputs.x.cols(), inputs.taps());
        let mut filters = cpu.pool().take(width * taps)?;
        for (c, filter) in cpu.real(inputs.weight).chunks_exact(taps).enumerate() {
            for (back, w) in filter.iter().rev().enumerate() {
                filters[back * width + c] = *w;
            }
        }
        Ok(Operands {
            level: cpu.level(),
            width,
            taps,
            x: cpu.real(inputs.x),
            filters,
            bias: inputs.bias.map(|bias| cpu.real(bias)),
            before: inputs.before.map(|before| cpu.real(before)),
            activation: spec.activation,
            l2_norm: spec.l2_norm,
            segments: spec.segments.as_slice(),
        })
    }

    fn filter(&self, back: usize) -> &[f32] {
        &self.filters[back * self.width..][..self.width]
    }

    /// The row `back` rows before row `t` of a chunk; `None` means zeros.
    fn input(&self, chunk: &RowChunk, t: usize, back: usize) -> Option<&'a [f32]> {
        let in_segment = chunk.row + t - self.segments[chunk.segment].q_start;
        if back <= in_segment {
            return Some(&self.x[(chunk.row + t - back) * self.width..][..self.width]);
        }
        let rows = self.taps - 1;
        let row = chunk.segment * rows + rows - (back - in_segment);
        self.before.map(|before| &before[row * self.width..][..self.width])
    }

    /// The convolution of row `t` of a chunk, with its bias. `PASS` is the forward or
    /// the backward pass: each gets its own instance of the closures, which are then inlined.
    #[inline(always)]
    fn filtered<S: Simd, const PASS: usize>(
        &self,
        s: S,
        chunk: &RowChunk,
        t: usize,
        y: &mut [f32],
    ) {
        match self.bias {
            Some(bias) => y.copy_from_slice(bias),
            None => y.fill(0.0),
        }
        for back in 0..self.taps {
            if let Some(x) = self.input(chunk, t, back) {
                update(s, [x, self.filter(back)], y, |[x, w], y| s.mul_add(x, w, y));
            }
        }
    }

    #[inline(always)]
    fn activate<S: Simd, const PASS: usize>(&self, s: S, y: &mut [f32]) {
        if let Some(act) = self.activation {
            update(s, [], y, |[], y| activate(s, act, y).0);
        }
    }
}

/// Chunks longer than usual: at the end of each, the backward pass computes some rows twice.
fn long_chunks(segments: &Segments, width: usize) -> Vec<RowChunk> {
    row_chunks(segments, width.div_ceil(4))
}

simd_fn! {
    /// One chunk of the forward pass; `y` holds the chunk's rows.
    fn forward_chunk<'k, S>(s, ops: &'k Operands<'k>, chunk: &'k RowChunk, y: &'k mut [f32]) {
        for (t, y) in y.chunks_exact_mut(ops.width).enumerate() {
            ops.filtered::<S, FORWARD>(s, chunk, t, y);
            ops.activate::<S, FORWARD>(s, y);
            if let Some(norm) = ops.l2_norm {
                for y in y.chunks_exact_mut(norm.width) {
                    let scale = s.splat(1.0 / (dot(s, y, y) + norm.eps).sqrt());
                    update(s, [], y, |[], y| s.mul(y, scale));
                }
            }
        }
    }
}

/// The forward pass, `[R, C]`.
pub fn forward(cpu: &Cpu, inputs: &ConvInputs<'_>, spec: &ConvSpec) -> Result<Tensor> {
    let ops = Operands::new(cpu, inputs, spec)?;
    let width = ops.width;
    let mut y = cpu.pool().zeros(inputs.x.len())?;
    {
        let y = Shared::new(&mut y);
        long_chunks(&spec.segments, width).par_iter().for_each(|chunk| {
            // SAFETY: chunks have disjoint rows, because segments are disjoint.
            let y = unsafe { y.slice(chunk.row * width, chunk.len * width) };
            forward_chunk(ops.level, &ops, chunk, y);
        });
    }
    Ok(cpu.tensor(y, inputs.x.shape(), inputs.x.device()))
}

impl Operands<'_> {
    /// Gradient of the convolution's output at row `t` of a chunk, from that of the op's.
    #[inline(always)]
    fn inner_gradient<S: Simd>(
        &self,
        s: S,
        chunk: &RowChunk,
        t: usize,
        dy: &[f32],
        d: &mut [f32],
        (raw, y): (&mut [f32], &mut [f32]),
    ) {
        d.copy_from_slice(dy);
        if self.activation.is_none() && self.l2_norm.is_none() {
            return;
        }
        self.filtered::<S, BACKWARD>(s, chunk, t, raw);
        if let Some(norm) = self.l2_norm {
            y.copy_from_slice(raw);
            self.activate::<S, BACKWARD>(s, y);
            for (y, d) in y.chunks_exact(norm.width).zip(d.chunks_exact_mut(norm.width)) {
                let r = 1.0 / (dot(s, y, y) + norm.eps).sqrt();
                let (scale, slope) = (s.splat(r), s.splat(-dot(s, y, d) * r * r * r));
                update(s, [y], d, |[y], d| s.mul_add(slope, y, s.mul(scale, d)));
            }
        }
        if let Some(act) = self.activation {
            update(s, [raw], d, |[x], d| s.mul(d, activate(s, act, x).1));
        }
    }
}

simd_fn! {
    /// One chunk of the backward pass. `dx` holds the chunk's rows; `part` its partial gradients of
    /// filters (tap by tap) and bias, `[K + 1, C]`, zeroed; `scratch` has `K + 2` rows.
    fn backward_chunk<'k, S>(
        s, ops: &'k Operands<'k>, chunk: &'k RowChunk, dy: &'k [f32],
        dx: &'k mut [f32], part: &'k mut [f32], scratch: &'k mut [f32],
    ) {
        let (width, taps, segment) = (ops.width, ops.taps, &ops.segments[chunk.segment]);
        let (raw, rest) = scratch.split_at_mut(width);
        let (y, ring) = rest.split_at_mut(width);
        let left = segment.q_start + segment.q_len - (chunk.row + chunk.len);
        let ahead = left.min(taps - 1);
        for t in (0..chunk.len + ahead).rev() {
            // Row t + back of the inner gradient lies in slot (t + back) % taps.
            let d = &mut ring[t % taps * width..][..width];
            let dy = &dy[(chunk.row + t) * width..][..width];
            ops.inner_gradient(s, chunk, t, dy, d, (&mut *raw, &mut *y));
            if t >= chunk.len {
                continue;
            }
            let d = &ring[t % taps * width..][..width];
            for back in 0..taps {
                if let Some(x) = ops.input(chunk, t, back) {
                    let dw = &mut part[back * width..][..width];
                    update(s, [d, x], dw, |[d, x], dw| s.mul_add(d, x, dw));
                }
            }
            update(s, [d], &mut part[taps * width..][..width], |[d], db| s.add(d, db));
            let dx = &mut dx[t * width..][..width];
            map(s, [d, ops.filter(0)], dx, |[d, w]| s.mul(d, w));
            for back in 1..taps {
                if t + back < chunk.len + ahead {
                    let d = &ring[(t + back) % taps * width..][..width];
                    update(s, [d, ops.filter(back)], dx, |[d, w], dx| s.mul_add(d, w, dx));
                }
            }
        }
    }
}

/// The backward pass.
pub fn backward(
    cpu: &Cpu,
    dy: &Tensor,
    inputs: &ConvInputs<'_>,
    spec: &ConvSpec,
) -> Result<ConvGrads> {
    let ops = Operands::new(cpu, inputs, spec)?;
    let (width, taps, dy) = (ops.width, ops.taps, cpu.real(dy));
    let chunks = long_chunks(&spec.segments, width);
    let part_len = (taps + 1) * width;
    let mut dx = cpu.pool().zeros(inputs.x.len())?;
    let mut parts = cpu.pool().zeros(chunks.len() * part_len)?;
    {
        let dx = Shared::new(&mut dx);
        chunks.par_iter().zip(parts.par_chunks_mut(part_len)).try_for_each(|(chunk, part)| {
            let mut scratch = cpu.pool().take((taps + 2) * width)?;
            // SAFETY: chunks have disjoint rows, because segments are disjoint.
            let dx = unsafe { dx.slice(chunk.row * width, chunk.len * width) };
            backward_chunk(ops.level, &ops, chunk, dy, dx, part, &mut scratch);
            Ok::<_, fox_tensor::Error>(())
        })?;
    }
    let mut sums = cpu.pool().zeros(part_len)?;
    sum_partials(&parts, &mut sums);
    let mut dweight = cpu.pool().take(width * taps)?;
    for (c, filter) in dweight.chunks_exact_mut(taps).enumerate() {
        filter.iter_mut().rev().enumerate().for_each(|(back, w)| *w = sums[back * width + c]);
    }
    let device = inputs.x.device();
    let dbias = match inputs.bias {
        None => None,
        Some(bias) => {
            let mut dbias = cpu.pool().take(width)?;
            dbias.copy_from_slice(&sums[taps * width..]);
            Some(cpu.tensor(dbias, bias.shape(), device))
        }
    };
    Ok(ConvGrads {
        dx: cpu.tensor(dx, inputs.x.shape(), device),
        dweight: cpu.tensor(dweight, inputs.weight.shape(), device),
        dbias,
    })
}
