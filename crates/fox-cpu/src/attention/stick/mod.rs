//! Stick-breaking attention in tiles: never a `T x T` matrix.
//!
//! A row's keys take fractions of the stick from the newest to the oldest, so every block of queries visits its key
//! blocks in reverse and carries, per row, the logarithm of the remaining stick. It stops when that is negligible. The
//! backward pass visits the same blocks and carries the gradients of the weights as well.
//!
//! Blocks of queries are independent. In the backward pass they are distributed over a fixed number of accumulators for
//! key and value gradients, which are added in order at the end, so results are bit-exact for any number of threads.

mod backward;
mod decode;
mod forward;

use std::ops::Range;

use fox_tensor::{
    AttentionGrads, AttentionInputs, AttentionOut, AttentionSpec, Result, StickOps, Tensor,
    check_stick_breaking_bwd, check_stick_breaking_fwd,
};
use rayon::prelude::*;

use super::call::{Attention, QueryBlock, Unit};
use super::forward::Forward;
use super::gather::{self, GatheredKeys, GatheredQueries};
use super::visits::{Prefix, Visits};
use super::{
    BLOCK, Counts, MANY_UNITS, Outputs, count_tiles, run_all, start_gradients, start_output,
};
use crate::Cpu;
use crate::pool::Buffer;
use crate::shared::Shared;
use backward::StickBackward;
use decode::StickDecode;
use forward::StickForward;

impl StickOps for Cpu {
    fn stick_breaking_fwd(
        &self,
        inputs: &AttentionInputs<'_>,
        spec: &AttentionSpec,
    ) -> Result<AttentionOut> {
        check_stick_breaking_fwd(self, inputs, spec)?;
        self.run(|| forward(self, inputs, spec))
    }

    fn stick_breaking_bwd(
        &self,
        d_out: &Tensor,
        inputs: &AttentionInputs<'_>,
        out: &AttentionOut,
        spec: &AttentionSpec,
    ) -> Result<AttentionGrads> {
        check_stick_breaking_bwd(self, d_out, inputs, out, spec)?;
        self.run(|| backward(self, d_out, inputs, &out.o, spec))
    }
}

/// Number of accumulators of a unit that accumulators on all cores.
const ACCUMULATORS: usize = 8;

/// Whether a block of queries, the first at `position`, may skip all keys before `block`: every row's remaining stick,
/// decayed to the newest of them, is below the tolerance.
fn used_up(
    log_rests: &[f32],
    prefix: Option<&Prefix>,
    position: usize,
    block: usize,
    tolerance: f32,
) -> bool {
    let newest = (block * BLOCK).saturating_sub(1);
    log_rests.iter().zip(position..).all(|(&rest, i)| {
        let decay = prefix.map_or(0.0, |c| c.at(i) - c.at(newest));
        rest as f64 + decay < tolerance as f64
    })
}

fn call<'a>(cpu: &'a Cpu, inputs: &AttentionInputs<'a>, spec: &'a AttentionSpec) -> Attention<'a> {
    Attention { own: false, ..Attention::new(cpu, inputs, spec) }
}

/// The key blocks that each query block may visit.
fn visible(call: &Attention<'_>, unit: &Unit) -> Vec<Range<usize>> {
    Visits::new(&unit.segment, &call.view(&unit.segment), None, None).ranges
}

/// The forward pass.
pub fn forward(
    cpu: &Cpu,
    inputs: &AttentionInputs<'_>,
    spec: &AttentionSpec,
) -> Result<AttentionOut> {
    let call = call(cpu, inputs, spec);
    start_output(cpu, inputs, spec, |o, lse| {
        let units = call.units();
        let parallel = units.len() >= MANY_UNITS;
        let run = |unit: &Unit| forward_unit(&call, unit, o, lse, !parallel);
        count_tiles(&units, parallel, spec.heads, run)
    })
}

fn forward_unit(
    call: &Attention<'_>,
    unit: &Unit,
    o: Shared<'_>,
    lse: Shared<'_>,
    parallel: bool,
) -> Result<Vec<Counts>> {
    let visible = visible(call, unit);
    let heads: Vec<usize> = call.query_heads(unit).collect();
    let prefixes: Vec<Option<Prefix>> =
        heads.iter().map(|&head| call.prefix(unit, head)).collect::<Result<_>>()?;
    let tolerance = call.spec.stick_tolerance();
    let visited: Vec<Counts> = if call.is_decode(&unit.segment) {
        let decode = |(&head, prefix): (&usize, &Option<Prefix>)| {
            let keys = visible[0].clone();
            let visited = decode_head(call, unit, head, prefix.as_ref(), keys.clone(), o, lse);
            (head, visited, keys.len())
        };
        heads.par_iter().zip(&prefixes).map(decode).collect()
    } else {
        let gathered = GatheredKeys::new(call, unit)?;
        let items: Vec<(usize, usize)> =
            (0..heads.len()).flat_map(|h| (0..visible.len()).rev().map(move |m| (h, m))).collect();
        let run = |&(h, m): &(usize, usize)| -> Result<Counts> {
            let mut scratch = call.pool.take(Forward::scratch_len(call.spec.head_dim))?;
            let block = QueryBlock { head: heads[h], m, keys: visible[m].clone() };
            let prefix = prefixes[h].as_ref();
            let queries = call.forward(unit, block, &gathered, prefix, o, lse, &mut scratch);
            let visited = call.level.run(StickForward { queries, tolerance });
            Ok((heads[h], visited, visible[m].len()))
        };
        if parallel {
            items.par_iter().map(run).collect::<Result<_>>()?
        } else {
            items.iter().map(run).collect::<Result<_>>()?
        }
    };
    Ok(visited)
}

/// Decoding of one head; returns the number of visited blocks.
fn decode_head(
    call: &Attention<'_>,
    unit: &Unit,
    head: usize,
    prefix: Option<&Prefix>,
    keys: Range<usize>,
    o: Shared<'_>,
    lse: Shared<'_>,
) -> usize {
    let (d, heads, segment) = (call.spec.head_dim, call.spec.heads, &unit.segment);
    let stride = call.spec.kv_heads * d;
    let rows = segment.k_start * stride..(segment.k_start + segment.k_len) * stride;
    call.level.run(StickDecode {
        head_dim: d,
        scale: call.spec.scale,
        q: &call.q[segment.q_start * heads * d..][..segment.q_len * heads * d],
        k: &call.k[rows.clone()],
        v: &call.v[rows],
        stride,
        column: unit.kv_head * d,
        prefix,
        view: call.view(segment),
        position: segment.offset(),
        keys,
        tolerance: call.spec.stick_tolerance(),
        heads,
        head,
        row: segment.q_start,
        o,
        lse,
    })
}

/// The backward pass.
pub fn backward(
    cpu: &Cpu,
    d_out: &Tensor,
    inputs: &AttentionInputs<'_>,
    o: &Tensor,
    spec: &AttentionSpec,
) -> Result<AttentionGrads> {
    let call = call(cpu, inputs, spec);
    let (d_out, o) = (cpu.real(d_out), cpu.real(o));
    start_gradients(cpu, inputs, |out| {
        let units = call.units();
        let parallel = units.len() >= MANY_UNITS;
        run_all(&units, parallel, |unit| backward_unit(&call, unit, d_out, o, out, !parallel))
    })
}

/// Partial gradients of keys and values, `[k_len up to a block, padded_dim]`, and partial sums over the queries of a
/// head for the gates, one per key.
struct Accumulator {
    dk: Buffer,
    dv: Buffer,
    columns: Buffer,
}

fn backward_unit(
    call: &Attention<'_>,
    unit: &Unit,
    d_out: &[f32],
    o: &[f32],
    out: &Outputs<'_>,
    parallel: bool,
) -> Result<()> {
    let (segment, dp) = (&unit.segment, call.padded_dim);
    let (k_padded, q_padded) =
        (segment.k_len.next_multiple_of(BLOCK), segment.q_len.next_multiple_of(BLOCK));
    let keys = GatheredKeys::new(call, unit)?;
    let visible = visible(call, unit);
    let run = |_| -> Result<Accumulator> {
        let [dk, dv] = [call.pool.zeros(k_padded * dp)?, call.pool.zeros(k_padded * dp)?];
        Ok(Accumulator { dk, dv, columns: call.pool.take(k_padded)? })
    };
    let count = if parallel { ACCUMULATORS.min(visible.len()) } else { 1 };
    let mut accumulators = (0..count).map(run).collect::<Result<Vec<_>>>()?;
    for head in call.query_heads(unit) {
        let prefix = call.prefix(unit, head)?;
        let queries = GatheredQueries::new(call, segment, head, d_out, o, None)?;
        let (mut dq, mut rows) = (call.pool.zeros(q_padded * dp)?, call.pool.zeros(q_padded)?);
        {
            let (dq, rows) = (Shared::new(&mut dq), Shared::new(&mut rows));
            let run_blocks = |(r, acc): (usize, &mut Accumulator)| -> Result<()> {
                acc.columns.fill(0.0);
                let mut scratch = call.pool.take(StickBackward::scratch_len())?;
                for m in (r..visible.len()).step_by(count) {
                    // SAFETY: every block of queries belongs to one accumulator.
                    let (dq, rows) = unsafe {
                        (dq.slice(m * BLOCK * dp, BLOCK * dp), rows.slice(m * BLOCK, BLOCK))
                    };
                    call.level.run(StickBackward {
                        head_dim: call.spec.head_dim,
                        padded_dim: dp,
                        k: &keys.k,
                        v: &keys.v,
                        prefix: prefix.as_ref(),
                        view: call.view(segment),
                        tolerance: call.spec.stick_tolerance(),
                        queries: queries.view(),
                        m,
                        count: BLOCK.min(segment.q_len - m * BLOCK),
                        position: segment.offset() + m * BLOCK,
                        keys: visible[m].clone(),
                        dk: &mut acc.dk,
                        dv: &mut acc.dv,
                        columns: &mut acc.columns,
                        dq,
                        rows,
                        scratch: &mut scratch,
                    });
                }
                Ok(())
            };
            if parallel {
                accumulators.par_iter_mut().enumerate().try_for_each(run_blocks)?;
            } else {
                accumulators.iter_mut().enumerate().try_for_each(run_blocks)?;
            }
        }
        let partial = [(dq, rows)];
        gather::scatter_queries(call, segment, head, &partial, out.dq);
        if let Some(dgates) = out.dgates {
            let columns = total(&mut accumulators, |acc| &mut acc.columns);
            gather::scatter_gates(call, segment, head, columns, &partial, dgates);
        }
    }
    gather::scatter_keys(call, unit, total(&mut accumulators, |acc| &mut acc.dk), out.dk);
    gather::scatter_keys(call, unit, total(&mut accumulators, |acc| &mut acc.dv), out.dv);
    Ok(())
}

/// Adds one buffer of all accumulators, in order, into the first.
fn total(
    accumulators: &mut [Accumulator],
    part: impl Fn(&mut Accumulator) -> &mut Buffer,
) -> &[f32] {
    let mut parts = accumulators.iter_mut().map(part);
    let Some(sum) = parts.next() else { return &[] };
    for part in parts {
        sum.par_iter_mut().zip(part.par_iter()).for_each(|(sum, x)| *sum += x);
    }
    sum
}
