//! Wall attention in blocks: keys decayed to the end of their block, queries that decay from block to block.
//!
//! Inside a block, sub-blocks of [`SUB`] keys are handled the same way, and the pairs inside a sub-block step by step.
//! Every factor is a product of `exp(log_decay) <= 1`, so no decay overflows, and products that underflow are 0.
//!
//! The work is divided into units of one segment and one head; in the forward pass the blocks of queries of a unit are
//! independent, too. Sums have a fixed order, so results are bit-exact for any number of threads.

mod backward;
mod forward;
mod keys;
mod summed;
mod tile;

use std::ops::Range;

use fox_tensor::{
    Acp, AttentionOut, AttentionSpec, Result, Tensor, WALL_BLOCK, WallBlock, WallGrads, WallInputs,
    WallOps, check_wall_attention_bwd, check_wall_attention_fwd, check_wall_close_block,
};
use rayon::prelude::*;

use super::backward::NO_QUERY;
use super::call::{Attention, Unit};
use super::gather::gather_rows;
use super::visits::Prefix;
use super::{BLOCK, start_output};
use crate::Cpu;
use crate::pool::Buffer;
use crate::shared::Shared;
use backward::{Backward, KeyGrads, add_products};
use forward::{Forward, Head, KeyBlock};
use keys::{Keys, Rows};
use summed::Summed;
use tile::{BlockRows, Lanes};

/// Keys of a sub-block.
const SUB: usize = 16;

const _: () = assert!(BLOCK == WALL_BLOCK && BLOCK.is_multiple_of(SUB));

impl WallOps for Cpu {
    fn wall_attention_fwd(
        &self,
        inputs: &WallInputs<'_>,
        past: &[Vec<WallBlock<'_>>],
        spec: &AttentionSpec,
    ) -> Result<AttentionOut> {
        check_wall_attention_fwd(self, inputs, past, spec)?;
        self.run(|| forward(self, inputs, past, spec))
    }

    fn wall_attention_bwd(
        &self,
        d_out: &Tensor,
        inputs: &WallInputs<'_>,
        out: &AttentionOut,
        spec: &AttentionSpec,
    ) -> Result<WallGrads> {
        check_wall_attention_bwd(self, d_out, inputs, out, spec)?;
        self.run(|| backward(self, d_out, inputs, out, spec))
    }

    fn wall_close_block(
        &self,
        k: &Tensor,
        log_decays: &Tensor,
        head_dim: usize,
    ) -> Result<(Tensor, Tensor)> {
        check_wall_close_block(self, k, log_decays, head_dim)?;
        self.run(|| close_block(self, k, log_decays, head_dim))
    }
}

/// A call, and the log decays `[R_k, H * d]`.
struct Call<'a> {
    attention: Attention<'a>,
    log_decays: &'a [f32],
}

/// The data of one head of one segment that all its queries share.
struct HeadData {
    keys: Keys,
    prefix: Option<Prefix>,
    threshold: Option<f64>,
    summed: Option<Summed>,
}

impl<'a> Call<'a> {
    fn new(cpu: &'a Cpu, inputs: &WallInputs<'a>, spec: &'a AttentionSpec) -> Self {
        Call {
            attention: Attention::new(cpu, &inputs.attention(), spec),
            log_decays: cpu.real(inputs.log_decays),
        }
    }

    fn spec(&self) -> &'a AttentionSpec {
        self.attention.spec
    }

    /// Without past blocks.
    fn head(&self, unit: &Unit, head: usize) -> Result<HeadData> {
        let (call, d, segment) = (&self.attention, self.spec().head_dim, &unit.segment);
        let (width, kv_width) = (self.spec().heads * d, self.spec().kv_heads * d);
        let of_key = |data| Rows { data, stride: kv_width, column: unit.kv_head * d };
        let decays = Rows { data: self.log_decays, stride: width, column: head * d };
        let rows = [of_key(call.k), of_key(call.v), decays];
        let keys = Keys::new(call.level, call.pool, rows, (segment.k_start, segment.k_len), d)?;
        let eps = match self.spec().acp {
            Acp::On { log_tolerance, .. } => Some(log_tolerance.exp() / 2.0),
            Acp::Off => None,
        };
        let all_count = call.log_gates.is_none() && self.spec().window.is_none();
        let summed = eps.filter(|_| all_count).map(|eps| Summed::new(&keys, d, eps));
        let (prefix, threshold) = (call.prefix(unit, head)?, call.threshold(unit, head));
        Ok(HeadData { keys, prefix, threshold, summed })
    }

    /// The head with `past` blocks before its keys.
    fn view<'k>(&self, unit: &Unit, data: &'k HeadData, past: &'k [KeyBlock<'k>]) -> Head<'k> {
        let mut view = self.attention.view(&unit.segment);
        view.k_len += past.len() * BLOCK;
        Head {
            d: self.spec().head_dim,
            keys: &data.keys,
            past,
            prefix: data.prefix.as_ref(),
            view,
            threshold: data.threshold,
            summed: data.summed.as_ref(),
        }
    }

    /// Rows of one head `[lanes, padded]`, padding lanes are 0; `row` is that of the first query.
    fn gather(
        &self,
        x: &[f32],
        row: usize,
        head: usize,
        lanes: &Lanes,
        scale: f32,
    ) -> Result<Buffer> {
        let (d, padded) = (self.spec().head_dim, self.spec().head_dim.next_multiple_of(16));
        let (stride, mut out) =
            (self.spec().heads * d, self.attention.pool.zeros(lanes.count * padded)?);
        let rows = &mut out[lanes.skip * padded..][..lanes.queries * padded];
        let source = &x[row * stride + head * d..];
        gather_rows(source, stride, lanes.queries, d, padded, scale, rows);
        Ok(out)
    }
}

/// The forward pass.
fn forward(
    cpu: &Cpu,
    inputs: &WallInputs<'_>,
    past: &[Vec<WallBlock<'_>>],
    spec: &AttentionSpec,
) -> Result<AttentionOut> {
    let call = Call::new(cpu, inputs, spec);
    start_output(cpu, &inputs.attention(), spec, |o, lse| {
        let units = call.attention.units();
        let heads: Vec<(Unit, usize)> = units
            .iter()
            .flat_map(|unit| call.attention.query_heads(unit).map(|head| (*unit, head)))
            .collect();
        let run = |(unit, head): &(Unit, usize)| {
            let blocks = past.get(unit.index).map_or(&[][..], |blocks| blocks);
            forward_head(cpu, &call, unit, *head, blocks, o, lse)
        };
        let counts: Vec<[u64; 2]> = heads.par_iter().map(run).collect::<Result<_>>()?;
        let mut tiles = vec![[0; 2]; spec.heads];
        for ((_, head), count) in heads.iter().zip(counts) {
            tiles[*head].iter_mut().zip(count).for_each(|(sum, n)| *sum += n);
        }
        Ok(tiles)
    })
}

/// Visited and total tiles.
fn forward_head(
    cpu: &Cpu,
    call: &Call<'_>,
    unit: &Unit,
    head: usize,
    past: &[WallBlock<'_>],
    o: Shared<'_>,
    lse: Shared<'_>,
) -> Result<[u64; 2]> {
    let (spec, d, segment) = (call.spec(), call.spec().head_dim, &unit.segment);
    let mut data = call.head(unit, head)?;
    let closed: Vec<KeyBlock<'_>> = past
        .iter()
        .map(|block| KeyBlock {
            k: BlockRows { data: &cpu.real(block.k)[head * d..], stride: spec.heads * d },
            v: BlockRows {
                data: &cpu.real(block.v)[unit.kv_head * d..],
                stride: spec.kv_heads * d,
            },
            decay: &cpu.real(block.decay)[head * d..][..d],
        })
        .collect();
    if !past.is_empty() {
        // Bounds on the logits are those of the open keys alone.
        (data.threshold, data.summed) = (None, None);
        data.prefix = joined_prefix(cpu, call, unit, head, past)?;
    }
    let (view, offset) = (call.view(unit, &data, &closed), past.len() * BLOCK + segment.offset());
    let block = |lanes: &Lanes| -> Result<[u64; 2]> {
        let row = segment.q_start + lanes.ends().0 - offset;
        let q = call.gather(call.attention.q, row, head, lanes, spec.scale)?;
        let mut scratch = cpu.pool().take(Forward::scratch_len(d))?;
        let visited = cpu.level().run(Forward {
            head: view,
            lanes: *lanes,
            q: &q,
            o: (o, spec.heads * d, head * d),
            lse: (lse, spec.heads, head),
            row,
            scratch: &mut scratch,
        });
        Ok([visited as u64, (lanes.block() + 1 - view.oldest(lanes)) as u64])
    };
    let blocks = Lanes::blocks(offset..offset + segment.q_len);
    let counts: Vec<[u64; 2]> = blocks.par_iter().map(block).collect::<Result<_>>()?;
    Ok(counts.iter().fold([0; 2], |[a, b], [x, y]| [a + x, b + y]))
}

/// Sums of the log gates over past blocks and keys.
fn joined_prefix(
    cpu: &Cpu,
    call: &Call<'_>,
    unit: &Unit,
    head: usize,
    past: &[WallBlock<'_>],
) -> Result<Option<Prefix>> {
    let Some(own) = call.attention.log_gates else { return Ok(None) };
    let (heads, segment) = (call.spec().heads, &unit.segment);
    let column = |gates: &'_ [f32], rows: Range<usize>| -> Vec<f32> {
        rows.map(|row| gates[row * heads + head]).collect()
    };
    let mut gates = Vec::with_capacity(past.len() * BLOCK + segment.k_len);
    for block in past.iter().filter_map(|block| block.log_gates) {
        gates.extend(column(cpu.real(block), 0..BLOCK));
    }
    gates.extend(column(own, segment.k_start..segment.k_start + segment.k_len));
    let mut sum = 0.0f64;
    let count = gates.len();
    let sums = gates.into_iter().map(|gate| {
        sum += fox_tensor::clamp_log_gate(gate as f64);
        sum
    });
    Prefix::from_sums(cpu.pool(), sums, count).map(Some)
}

/// Gradients of all operands.
fn backward(
    cpu: &Cpu,
    d_out: &Tensor,
    inputs: &WallInputs<'_>,
    out: &AttentionOut,
    spec: &AttentionSpec,
) -> Result<WallGrads> {
    let call = Call::new(cpu, inputs, spec);
    let pool = cpu.pool();
    let (mut dq, mut dk) = (pool.zeros(inputs.q.len())?, pool.zeros(inputs.k.len())?);
    let (mut dv, mut decays) = (pool.zeros(inputs.v.len())?, pool.zeros(inputs.log_decays.len())?);
    let mut gates = pool.zeros(inputs.log_gates.map_or(0, Tensor::len))?;
    let outputs = Outputs {
        dq: Shared::new(&mut dq),
        dk: Shared::new(&mut dk),
        dv: Shared::new(&mut dv),
        decays: Shared::new(&mut decays),
        gates: Shared::new(&mut gates),
    };
    let given = Given { d_out: cpu.real(d_out), o: cpu.real(&out.o), lse: cpu.real(&out.lse) };
    let run = |unit: &Unit| backward_unit(cpu, &call, unit, &given, &outputs);
    call.attention.units().par_iter().try_for_each(run)?;
    let like = |data: Buffer, x: &Tensor| cpu.tensor(data, x.shape(), x.device());
    Ok(WallGrads {
        dq: like(dq, inputs.q),
        dk: like(dk, inputs.k),
        dv: like(dv, inputs.v),
        dlog_decays: like(decays, inputs.log_decays),
        dlog_gates: inputs.log_gates.map(|x| like(gates, x)),
    })
}

/// Results of the forward pass, and the gradient of the output.
struct Given<'a> {
    d_out: &'a [f32],
    o: &'a [f32],
    lse: &'a [f32],
}

/// Results of the backward pass.
struct Outputs<'a> {
    dq: Shared<'a>,
    dk: Shared<'a>,
    dv: Shared<'a>,
    decays: Shared<'a>,
    gates: Shared<'a>,
}

/// All query heads of one key head, one after the other.
fn backward_unit(
    cpu: &Cpu,
    call: &Call<'_>,
    unit: &Unit,
    given: &Given<'_>,
    outputs: &Outputs<'_>,
) -> Result<()> {
    let (spec, d, segment) = (call.spec(), call.spec().head_dim, &unit.segment);
    let padded = d.next_multiple_of(16);
    let rows = segment.k_len.next_multiple_of(BLOCK);
    let (mut dv, mut dk) = (cpu.pool().zeros(rows * padded)?, cpu.pool().zeros(rows * padded)?);
    for head in call.attention.query_heads(unit) {
        let data = call.head(unit, head)?;
        let mut grads = KeyGrads::new(cpu.pool(), &data.keys, d)?;
        // The gradient of the sums of the log decays, by position.
        let mut sums = cpu.pool().zeros(rows * padded)?;
        for lanes in Lanes::blocks(segment.offset()..segment.k_len) {
            let work = (&mut grads, &mut dv[..], &mut sums[..]);
            backward_block(cpu, call, unit, head, &data, &lanes, given, work, outputs.dq)?;
        }
        grads.finish(cpu.level(), &data.keys);
        grads.summed.scatter(padded, &mut dv);
        add_products(cpu.level(), &data.keys.k, &grads.k, -1.0, &mut sums);
        dk.iter_mut().zip(&grads.k[..]).for_each(|(dk, x)| *dk += x);
        scatter_sums(&sums, padded, d, segment.k_len, |j, channel| {
            // SAFETY: no other task writes this row's columns of this head.
            unsafe {
                outputs.decays.slice(((segment.k_start + j) * spec.heads + head) * d + channel, 1)
            }
        });
        if data.prefix.is_some() {
            scatter_sums(&grads.c, 1, 1, segment.k_len, |j, _| {
                // SAFETY: no other task writes this row's column of this head.
                unsafe { outputs.gates.slice((segment.k_start + j) * spec.heads + head, 1) }
            });
        }
    }
    for j in 0..segment.k_len {
        let at = ((segment.k_start + j) * spec.kv_heads + unit.kv_head) * d;
        // SAFETY: no other task writes this row's columns of this key head.
        unsafe {
            outputs.dk.slice(at, d).copy_from_slice(&dk[j * padded..][..d]);
            outputs.dv.slice(at, d).copy_from_slice(&dv[j * padded..][..d]);
        }
    }
    Ok(())
}

/// One block of queries: adds to the gradients of keys, values and sums of log decays, and writes `dq`.
fn backward_block(
    cpu: &Cpu,
    call: &Call<'_>,
    unit: &Unit,
    head: usize,
    data: &HeadData,
    lanes: &Lanes,
    given: &Given<'_>,
    (grads, dv, sums): (&mut KeyGrads, &mut [f32], &mut [f32]),
    out: Shared<'_>,
) -> Result<()> {
    let (spec, d, segment) = (call.spec(), call.spec().head_dim, &unit.segment);
    let (padded, heads) = (data.keys.padded, spec.heads);
    let row = segment.q_start + lanes.ends().0 - segment.offset();
    let q = call.gather(call.attention.q, row, head, lanes, spec.scale)?;
    let d_out = call.gather(given.d_out, row, head, lanes, 1.0)?;
    let (mut lse, mut delta) = ([NO_QUERY; BLOCK], [0.0; BLOCK]);
    for i in 0..lanes.queries {
        let at = ((row + i) * heads + head) * d;
        let products = given.d_out[at..][..d].iter().zip(&given.o[at..][..d]).map(|(a, b)| a * b);
        delta[lanes.skip + i] = products.sum();
        lse[lanes.skip + i] = given.lse[(row + i) * heads + head];
    }
    let mut dq = cpu.pool().zeros(lanes.count * padded)?;
    let mut scratch = cpu.pool().take(Backward::scratch_len(d))?;
    cpu.level().run(Backward {
        head: call.view(unit, data, &[]),
        lanes: *lanes,
        q: &q,
        d_out: &d_out,
        lse: &lse[..lanes.count],
        delta: &delta[..lanes.count],
        dq: &mut dq,
        grads,
        dv,
        scratch: &mut scratch,
    });
    let sums = &mut sums[lanes.first * padded..][..lanes.count * padded];
    add_products(cpu.level(), &q, &dq, 1.0, sums);
    for i in 0..lanes.queries {
        // SAFETY: no other task writes this row's columns of this head.
        let out = unsafe { out.slice(((row + i) * heads + head) * d, d) };
        let dq = &dq[(lanes.skip + i) * padded..][..d];
        out.iter_mut().zip(dq).for_each(|(out, dq)| *out = dq * spec.scale);
    }
    Ok(())
}

/// Sums from the last row of `x: [rows, padded]` to each row, in f64: a log decay is part of all later sums. The first row
/// has no effect on any score, so its gradient is exactly 0.
fn scatter_sums<'a>(
    x: &[f32],
    padded: usize,
    d: usize,
    rows: usize,
    out: impl Fn(usize, usize) -> &'a mut [f32],
) {
    for channel in 0..d {
        let mut sum = 0.0f64;
        for j in (1..rows).rev() {
            sum += x[j * padded + channel] as f64;
            out(j, channel)[0] = sum as f32;
        }
    }
}

/// `(k, decay)` of a closed block.
fn close_block(
    cpu: &Cpu,
    k: &Tensor,
    log_decays: &Tensor,
    head_dim: usize,
) -> Result<(Tensor, Tensor)> {
    let (kv_width, width) = (k.cols(), log_decays.cols());
    let group = width / kv_width;
    let mut closed = cpu.pool().take(BLOCK * width)?;
    let mut decay = cpu.pool().take(width)?;
    for head in 0..width / head_dim {
        let of_key = Rows { data: cpu.real(k), stride: kv_width, column: head / group * head_dim };
        let decays = Rows { data: cpu.real(log_decays), stride: width, column: head * head_dim };
        let rows = [of_key, of_key, decays];
        let keys = Keys::new(cpu.level(), cpu.pool(), rows, (0, BLOCK), head_dim)?;
        let columns = head * head_dim..(head + 1) * head_dim;
        for j in 0..BLOCK {
            let row = &mut closed[j * width..][..width];
            row[columns.clone()].copy_from_slice(&keys.row(&keys.far, j)[..head_dim]);
        }
        decay[columns].copy_from_slice(&keys.block[..head_dim]);
    }
    let device = k.device();
    Ok((cpu.tensor(closed, [BLOCK, width], device), cpu.tensor(decay, [1, width], device)))
}
