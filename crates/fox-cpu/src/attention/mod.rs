//! Forgetting attention, FlashAttention-style: never a `T x T` matrix.
//!
//! The work is divided into *units*, one per segment and key head; a unit's keys and values are gathered
//! into contiguous, padded rows once. Many units run in parallel; few units run one after the other,
//! each on all cores (over query blocks in the forward pass, over ranges of key blocks in the backward pass).
//! The division depends on shapes alone and every sum has a fixed order, so results are bit-exact for any
//! number of threads.

mod backward;
mod call;
mod decode;
mod forward;
mod gather;
mod paged;
mod path;
mod stick;
mod tile;
mod visits;
mod wall;

use std::ops::Range;

use fox_tensor::{
    AttentionGrads, AttentionInputs, AttentionOps, AttentionOut, AttentionSpec, Result, Tensor,
    check_attention_bwd, check_attention_fwd, tile_words,
};
use rayon::prelude::*;

use crate::Cpu;
use crate::pool::Buffer;
use crate::shared::Shared;
use backward::Backward;
use call::{Attention, QueryBlock, Unit};
use decode::Decode;
use forward::Forward;
use gather::{GatheredKeys, GatheredQueries};
use visits::{Prefix, Visits};

impl AttentionOps for Cpu {
    fn attention_fwd(
        &self,
        inputs: &AttentionInputs<'_>,
        spec: &AttentionSpec,
    ) -> Result<AttentionOut> {
        check_attention_fwd(self, inputs, spec)?;
        self.run(|| forward(self, inputs, spec))
    }

    fn attention_bwd(
        &self,
        d_out: &Tensor,
        inputs: &AttentionInputs<'_>,
        out: &AttentionOut,
        spec: &AttentionSpec,
    ) -> Result<AttentionGrads> {
        check_attention_bwd(self, d_out, inputs, out, spec)?;
        self.run(|| backward(self, d_out, inputs, out, spec))
    }
}

/// Rows of a query block and of a key block, also the granularity of pruning. 64 x 64 scores and
/// the operands of a tile fit the second-level cache at any head dim, and the scores alone the first.
pub const BLOCK: usize = 64;

/// From this many units on, units run in parallel rather than one after the other.
const MANY_UNITS: usize = 16;

/// Number of key ranges of a unit that runs on all cores.
const KEY_RANGES: usize = 16;

/// Runs `f` over the items, in parallel or one after the other.
fn run_all<T: Sync>(
    items: &[T],
    parallel: bool,
    f: impl Fn(&T) -> Result<()> + Send + Sync,
) -> Result<()> {
    if parallel { items.par_iter().try_for_each(f) } else { items.iter().try_for_each(f) }
}

/// The forward pass.
pub fn forward(
    cpu: &Cpu,
    inputs: &AttentionInputs<'_>,
    spec: &AttentionSpec,
) -> Result<AttentionOut> {
    let call = Attention::new(cpu, inputs, spec);
    start_output(cpu, inputs, spec, |o, lse| {
        let units = call.units();
        let parallel = units.len() >= MANY_UNITS;
        let run = |unit: &Unit| forward_unit(&call, unit, o, lse, !parallel);
        count_tiles(&units, parallel, spec.heads, run)
    })
}

/// Allocates output and row statistics and lets `fill` write them; `fill` returns the tile counts.
fn start_output(
    cpu: &Cpu,
    inputs: &AttentionInputs<'_>,
    spec: &AttentionSpec,
    fill: impl FnOnce(Shared<'_>, Shared<'_>) -> Result<Vec<[u64; 2]>>,
) -> Result<AttentionOut> {
    let (rows, heads) = (inputs.q.rows(), spec.heads);
    let mut o = cpu.pool().zeros(rows * heads * spec.head_dim)?;
    let mut lse = cpu.pool().take(rows * heads)?;
    lse.fill(f32::NEG_INFINITY);
    let tiles = fill(Shared::new(&mut o), Shared::new(&mut lse))?;
    let device = inputs.q.device();
    Ok(AttentionOut {
        o: cpu.tensor(o, inputs.q.shape(), device),
        lse: cpu.tensor(lse, [rows, heads], device),
        tiles: device.from_i32(&tile_words(&tiles), [heads, 4])?,
    })
}

/// Visited and total blocks of a query head: `(head, visited, total)`.
type Counts = (usize, usize, usize);

/// Runs the units, in parallel or one after the other, and sums visited and total blocks per head.
fn count_tiles(
    units: &[Unit],
    parallel: bool,
    heads: usize,
    run: impl Fn(&Unit) -> Result<Vec<Counts>> + Send + Sync,
) -> Result<Vec<[u64; 2]>> {
    let counts: Result<Vec<_>> = if parallel {
        units.par_iter().map(run).collect()
    } else {
        units.iter().map(run).collect()
    };
    let mut tiles = vec![[0; 2]; heads];
    for (head, visited, total) in counts?.into_iter().flatten() {
        tiles[head][0] += visited as u64;
        tiles[head][1] += total as u64;
    }
    Ok(tiles)
}

/// Runs one unit; returns the tile counts of its query heads.
fn forward_unit(
    call: &Attention<'_>,
    unit: &Unit,
    o: Shared<'_>,
    lse: Shared<'_>,
    parallel: bool,
) -> Result<Vec<Counts>> {
    let heads: Vec<usize> = call.query_heads(unit).collect();
    let plans: Vec<(Option<Prefix>, Visits)> =
        heads.iter().map(|&head| call.prefix_and_visits(unit, head)).collect::<Result<_>>()?;
    if call.is_decode(&unit.segment) {
        for (&head, (prefix, visits)) in heads.iter().zip(&plans) {
            decode_head(call, unit, head, prefix.as_ref(), visits, o, lse)?;
        }
    } else {
        let gathered = GatheredKeys::new(call, unit)?;
        let blocks = unit.segment.q_len.div_ceil(BLOCK);
        let items: Vec<(usize, usize)> =
            (0..heads.len()).flat_map(|h| (0..blocks).rev().map(move |m| (h, m))).collect();
        run_all(&items, parallel, |&(h, m)| {
            let (prefix, visits) = &plans[h];
            let mut scratch = call.pool.take(Forward::scratch_len(call.spec.head_dim))?;
            let block = QueryBlock { head: heads[h], m, keys: visits.ranges[m].clone() };
            let prefix = prefix.as_ref();
            call.level.run(call.forward(unit, block, &gathered, prefix, o, lse, &mut scratch));
            Ok(())
        })?;
    }
    Ok(heads.iter().zip(&plans).map(|(&h, (_, v))| (h, v.visited, v.total)).collect())
}

/// Decoding of one head: fixed chunks of keys (split-K), whose results are combined in order.
fn decode_head(
    call: &Attention<'_>,
    unit: &Unit,
    head: usize,
    prefix: Option<&Prefix>,
    visits: &Visits,
    o: Shared<'_>,
    lse: Shared<'_>,
) -> Result<()> {
    let (d, segment, view) = (call.spec.head_dim, &unit.segment, call.view(&unit.segment));
    let stride = call.spec.kv_heads * d;
    let rows = segment.k_start * stride..(segment.k_start + segment.k_len) * stride;
    for t in 0..segment.q_len {
        let (row, position) = (segment.q_start + t, segment.offset() + t);
        let seen = view.keys(position, position);
        let first = visits.ranges[0].start * BLOCK;
        let last = (visits.ranges[0].end * BLOCK).min(seen.end);
        let first = first.max(seen.start);
        let chunks: Vec<usize> = (first..last).step_by(decode::CHUNK).collect();
        let mut partial = call.pool.take(chunks.len() * (d + decode::CHUNK))?;
        let results: Vec<(f32, f32)> = partial
            .par_chunks_mut(d + decode::CHUNK)
            .zip(&chunks)
            .map(|(memory, &from)| {
                let (o, scores) = memory.split_at_mut(d);
                call.level.run(Decode {
                    q: &call.q[(row * call.spec.heads + head) * d..][..d],
                    scale: call.spec.scale,
                    k: &call.k[rows.clone()],
                    v: &call.v[rows.clone()],
                    stride,
                    column: unit.kv_head * d,
                    prefix,
                    view,
                    position,
                    keys: from..last.min(from + decode::CHUNK),
                    scores,
                    o,
                })
            })
            .collect();
        let maximum = results.iter().fold(f32::NEG_INFINITY, |max, r| max.max(r.0));
        let mut sum = 0.0;
        // SAFETY: this task alone writes this row's columns of this head.
        let out = unsafe { o.slice((row * call.spec.heads + head) * d, d) };
        for (part, (m, l)) in partial.chunks(d + decode::CHUNK).zip(&results) {
            let weight = (m - maximum).exp();
            sum += weight * l;
            out.iter_mut().zip(part).for_each(|(o, x)| *o += weight * x);
        }
        out.iter_mut().for_each(|o| *o /= sum);
        // SAFETY: as above.
        unsafe { lse.slice(row * call.spec.heads + head, 1)[0] = maximum + sum.ln() };
    }
    Ok(())
}

/// The backward pass.
pub fn backward(
    cpu: &Cpu,
    d_out: &Tensor,
    inputs: &AttentionInputs<'_>,
    out: &AttentionOut,
    spec: &AttentionSpec,
) -> Result<AttentionGrads> {
    let call = Attention::new(cpu, inputs, spec);
    let (d_out, o, lse) = (cpu.real(d_out), cpu.real(&out.o), cpu.real(&out.lse));
    start_gradients(cpu, inputs, |out| {
        let units = call.units();
        let parallel = units.len() >= MANY_UNITS;
        run_all(&units, parallel, |unit| backward_unit(&call, unit, d_out, o, lse, out, !parallel))
    })
}

/// Allocates the gradients and lets `fill` write them.
fn start_gradients(
    cpu: &Cpu,
    inputs: &AttentionInputs<'_>,
    fill: impl FnOnce(&Outputs<'_>) -> Result<()>,
) -> Result<AttentionGrads> {
    let mut dq = cpu.pool().zeros(inputs.q.len())?;
    let mut dk = cpu.pool().zeros(inputs.k.len())?;
    let mut dv = cpu.pool().zeros(inputs.v.len())?;
    let mut dgates: Option<Buffer> =
        inputs.log_gates.map(|gates| cpu.pool().zeros(gates.len())).transpose()?;
    fill(&Outputs {
        dq: Shared::new(&mut dq),
        dk: Shared::new(&mut dk),
        dv: Shared::new(&mut dv),
        dgates: dgates.as_mut().map(|g| Shared::new(g)),
    })?;
    let device = inputs.q.device();
    Ok(AttentionGrads {
        dq: cpu.tensor(dq, inputs.q.shape(), device),
        dk: cpu.tensor(dk, inputs.k.shape(), device),
        dv: cpu.tensor(dv, inputs.v.shape(), device),
        dlog_gates: dgates.zip(inputs.log_gates).map(|(g, x)| cpu.tensor(g, x.shape(), device)),
    })
}

/// Output gradients.
struct Outputs<'a> {
    dq: Shared<'a>,
    dk: Shared<'a>,
    dv: Shared<'a>,
    dgates: Option<Shared<'a>>,
}

fn backward_unit(
    call: &Attention<'_>,
    unit: &Unit,
    d_out: &[f32],
    o: &[f32],
    lse: &[f32],
    out: &Outputs<'_>,
    parallel: bool,
) -> Result<()> {
    let (segment, dp) = (&unit.segment, call.padded_dim);
    let key_blocks = segment.k_len.div_ceil(BLOCK);
    let q_padded = segment.q_len.next_multiple_of(BLOCK);
    let keys = GatheredKeys::new(call, unit)?;
    let mut dk = call.pool.zeros(key_blocks * BLOCK * dp)?;
    let mut dv = call.pool.zeros(key_blocks * BLOCK * dp)?;
    for head in call.query_heads(unit) {
        let (prefix, visits) = call.prefix_and_visits(unit, head)?;
        let queries = GatheredQueries::new(call, segment, head, d_out, o, Some(lse))?;
        let ranges = visits.split_keys(key_blocks, if parallel { KEY_RANGES } else { 1 });
        let mut columns = call.pool.take(key_blocks * BLOCK)?;
        let partials: Vec<(Buffer, Buffer)> = {
            let (dk, dv) = (Shared::new(&mut dk), Shared::new(&mut dv));
            let columns = Shared::new(&mut columns);
            let run = |key_range: &Range<usize>| {
                let mut dq = call.pool.zeros(q_padded * dp)?;
                let mut rows = call.pool.zeros(q_padded)?;
                let mut scratch = call.pool.take(Backward::scratch_len())?;
                let (start, len) = (key_range.start * BLOCK, key_range.len() * BLOCK);
                // SAFETY: key ranges are disjoint, so each of these rows belongs to one task.
                let (dk, dv, columns) = unsafe {
                    (
                        dk.slice(start * dp, len * dp),
                        dv.slice(start * dp, len * dp),
                        columns.slice(start, len),
                    )
                };
                call.level.run(Backward {
                    head_dim: call.spec.head_dim,
                    padded_dim: dp,
                    k: &keys.k,
                    v: &keys.v,
                    prefix: prefix.as_ref(),
                    view: call.view(segment),
                    queries: queries.view(),
                    q_len: segment.q_len,
                    offset: segment.offset(),
                    visits: &visits.ranges,
                    keys: key_range.clone(),
                    dk,
                    dv,
                    columns,
                    dq: &mut dq,
                    rows: prefix.is_some().then_some(&mut rows),
                    scratch: &mut scratch,
                });
                Ok((dq, rows))
            };
            if parallel {
                ranges.par_iter().map(run).collect::<Result<_>>()?
            } else {
                ranges.iter().map(run).collect::<Result<_>>()?
            }
        };
        gather::scatter_queries(call, segment, head, &partials, out.dq);
        if let Some(dgates) = out.dgates {
            gather::scatter_gates(call, segment, head, &columns, &partials, dgates);
        }
    }
    gather::scatter_keys(call, unit, &dk, out.dk);
    gather::scatter_keys(call, unit, &dv, out.dv);
    Ok(())
}
