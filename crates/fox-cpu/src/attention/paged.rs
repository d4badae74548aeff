//! Attention over pages: a few queries read the pages in place, many queries gather them first.
//!
//! A page is a block of the tiled forward pass. Positions are counted from the first cached key.

use std::ops::Range;

use fox_tensor::{
    AttentionWeights, Error, Mask, NewKeys, PAGE, Page, PagedKeys, PagedOps, PagedSpec, Result,
    Segment, Slab, Tensor, check_paged_attention, check_write_pages, copy_to_pages,
    gathered_attention, held_pages, host_gate_totals,
};
use rayon::prelude::*;

use super::BLOCK;
use super::decode::MAX_QUERIES;
use super::forward::Forward;
use super::visits::{Prefix, View, Visits};
use crate::Cpu;
use crate::pool::Buffer;
use crate::shared::Shared;
use crate::simd::{Kernel, Simd, dot, exp, scale_add, update};
use crate::sink;

impl PagedOps for Cpu {
    fn gates_in_pages(&self) -> bool {
        false
    }

    fn gate_totals(&self, log_gates: &[&Tensor], ranges: &[Range<usize>]) -> Result<Vec<f64>> {
        host_gate_totals(self, log_gates, ranges)
    }

    fn write_pages(&self, new: &NewKeys<'_>, keys: &mut dyn PagedKeys, first: usize) -> Result<()> {
        check_write_pages(self, new, keys, first)?;
        copy_to_pages(new, keys, first)
    }

    fn paged_attention(
        &self,
        q: &Tensor,
        keys: &[&dyn PagedKeys],
        spec: &PagedSpec,
    ) -> Result<Tensor> {
        check_paged_attention(self, q, keys, spec)?;
        match spec.weights {
            AttentionWeights::Softmax if spec.reflected => gathered_attention(q, keys, spec),
            AttentionWeights::Softmax => self.run(|| forward(self, q, keys, spec)),
            AttentionWeights::StickBreaking => gathered_attention(q, keys, spec),
        }
    }
}

/// Pages per partial result of a decode step. Fixed, so that the result does not depend on the number of
/// threads.
const CHUNK: usize = 16;

/// Queries times keys times head dim per task.
const GRAIN: usize = 1 << 17;

/// Operands and options of one call.
struct PagedAttention<'a> {
    cpu: &'a Cpu,
    spec: &'a PagedSpec,
    q: &'a [f32],
    o: Shared<'a>,
    lse: Shared<'a>,
}

/// One sequence and one key head.
struct Unit<'a> {
    keys: &'a dyn PagedKeys,
    kv_head: usize,
    /// Queries, and keys counted from the first cached one.
    segment: Segment,
}

impl<'a> Unit<'a> {
    /// The cached pages, oldest first.
    fn pages(&self) -> impl Iterator<Item = Page<'a>> {
        held_pages(self.keys, self.kv_head)
    }
}

/// `[R, H * d]`.
pub fn forward(cpu: &Cpu, q: &Tensor, keys: &[&dyn PagedKeys], spec: &PagedSpec) -> Result<Tensor> {
    let mut o = cpu.pool().zeros(q.len())?;
    let mut lse = cpu.pool().take(q.rows() * spec.heads)?;
    if spec.sinks.is_some() {
        // Rows without queries have no visible key.
        lse.fill(f32::NEG_INFINITY);
    }
    let call = PagedAttention {
        cpu,
        spec,
        q: cpu.real(q),
        o: Shared::new(&mut o),
        lse: Shared::new(&mut lse),
    };
    let mut units = Vec::new();
    for (s, segment) in spec.segments.as_slice().iter().enumerate().filter(|(_, s)| s.q_len > 0) {
        for kv_head in 0..spec.kv_heads {
            let keys = keys[s];
            // `PagedKeys` is a trait of the caller: its answers are not relied on.
            let k_len = segment.k_len.saturating_sub(keys.first(kv_head)).max(segment.q_len);
            units.push(Unit { keys, kv_head, segment: Segment { k_start: 0, k_len, ..*segment } });
        }
    }
    let work = |unit: &Unit<'_>| unit.segment.q_len * unit.segment.k_len * spec.head_dim;
    let all: usize = units.iter().map(work).sum();
    // Short sequences share a task.
    let together = (GRAIN * units.len() / all.max(1)).max(1);
    let group = spec.heads / spec.kv_heads;
    units.par_iter().with_min_len(together).try_for_each(|unit| {
        let heads = unit.kv_head * group..(unit.kv_head + 1) * group;
        if unit.segment.q_len < MAX_QUERIES {
            heads.into_iter().try_for_each(|head| call.decode(unit, head))
        } else {
            heads.into_par_iter().try_for_each(|head| call.tiled(unit, head))
        }
    })?;
    let o = cpu.tensor(o, q.shape(), q.device());
    let Some(sinks) = &spec.sinks else { return Ok(o) };
    let lse = cpu.tensor(lse, [q.rows(), spec.heads], q.device());
    Ok(sink::forward(cpu, &o, &lse, sinks)?.0)
}

impl PagedAttention<'_> {
    fn view(&self, unit: &Unit<'_>) -> View {
        View { mask: Mask::Causal, window: self.spec.window, own: true, k_len: unit.segment.k_len }
    }

    /// Many queries: the tiled forward pass over gathered pages.
    fn tiled(&self, unit: &Unit<'_>, head: usize) -> Result<()> {
        let (d, pool, segment) = (self.spec.head_dim, self.cpu.pool(), &unit.segment);
        let padded_dim = d.next_multiple_of(16);
        let pages: Vec<Page<'_>> = unit.pages().collect();
        let gather = |f: fn(&Slab) -> &Tensor| -> Result<Buffer> {
            let mut out = pool.take(pages.len() * PAGE * padded_dim)?;
            for (page, out) in pages.iter().zip(out.chunks_mut(PAGE * padded_dim)) {
                let rows = self.cpu.real(f(page.slab))[page.row() * d..].chunks(d);
                for (row, out) in rows.zip(out.chunks_mut(padded_dim)) {
                    out[..d].copy_from_slice(row);
                    out[d..].fill(0.0);
                }
            }
            Ok(out)
        };
        if pages.len() * PAGE < segment.k_len {
            let detail = format!("{} pages for {} keys", pages.len(), segment.k_len);
            return Err(Error::argument("paged_attention", detail));
        }
        let (k, v) = (gather(|slab| &slab.k)?, gather(|slab| &slab.v)?);
        let own = head % (self.spec.heads / self.spec.kv_heads);
        let group = unit.keys.shape().group;
        let prefix = (group > 0).then(|| {
            let sums = pages.iter().filter_map(|page| page.sums(own, group)).flatten();
            Prefix::from_sums(pool, sums.copied(), segment.k_len)
        });
        let prefix = prefix.transpose()?;
        let threshold = self.spec.thresholds.as_ref().map(|thresholds| thresholds[head]);
        let view = self.view(unit);
        let visits = Visits::new(segment, &view, prefix.as_ref(), threshold);
        visits.ranges.par_iter().enumerate().try_for_each(|(m, blocks)| {
            let mut scratch = pool.take(Forward::scratch_len(d))?;
            self.cpu.level().run(Forward {
                head_dim: d,
                padded_dim,
                k: &k,
                v: &v,
                prefix: prefix.as_ref(),
                view,
                q: self.q,
                q_width: self.spec.heads * d,
                column: head * d,
                scale: self.spec.scale,
                row: segment.q_start + m * BLOCK,
                queries: BLOCK.min(segment.q_len - m * BLOCK),
                position: segment.offset() + m * BLOCK,
                keys: blocks.clone(),
                o: self.o,
                lse: self.lse,
                heads: self.spec.heads,
                head,
                scratch: &mut scratch,
            });
            Ok(())
        })
    }

    /// A few queries: fixed chunks of pages (split-K), whose results are combined in order.
    fn decode(&self, unit: &Unit<'_>, head: usize) -> Result<()> {
        let (d, segment, view) = (self.spec.head_dim, &unit.segment, self.view(unit));
        let own = head % (self.spec.heads / self.spec.kv_heads);
        let group = unit.keys.shape().group;
        let pages: Vec<PageView<'_>> = unit
            .pages()
            .map(|page| PageView {
                k: &self.cpu.real(&page.slab.k)[page.row() * d..],
                v: &self.cpu.real(&page.slab.v)[page.row() * d..],
                sums: page.sums(own, group),
            })
            .collect();
        for t in 0..segment.q_len {
            let (row, position) = (segment.q_start + t, segment.offset() + t);
            let seen = view.keys(position, position);
            let chunks: Vec<usize> =
                (seen.start / PAGE..seen.end.div_ceil(PAGE)).step_by(CHUNK).collect();
            let mut partial = self.cpu.pool().take(chunks.len() * (d + CHUNK * PAGE))?;
            let run = |(memory, &first): (&mut [f32], &usize)| {
                let (o, scores) = memory.split_at_mut(d);
                self.cpu.level().run(Decode {
                    q: &self.q[(row * self.spec.heads + head) * d..][..d],
                    scale: self.spec.scale,
                    sum: pages[position / PAGE].sums.map_or(0.0, |sums| sums[position % PAGE]),
                    pages: &pages,
                    keys: seen.start.max(first * PAGE)..seen.end.min((first + CHUNK) * PAGE),
                    scores,
                    o,
                })
            };
            let parts = partial.par_chunks_mut(d + CHUNK * PAGE).zip(&chunks);
            // Most sequences have one chunk, which runs on this thread.
            let results: Vec<(f32, f32)> = match chunks.len() {
                0..=1 => partial.chunks_mut(d + CHUNK * PAGE).zip(&chunks).map(run).collect(),
                _ => parts.map(run).collect(),
            };
            // SAFETY: no other task writes this row's columns of this head.
            let out = unsafe { self.o.slice((row * self.spec.heads + head) * d, d) };
            // SAFETY: the same for its entry of `lse`.
            let lse = unsafe { self.lse.slice(row * self.spec.heads + head, 1) };
            lse[0] = combine(&partial, d + CHUNK * PAGE, &results, out);
        }
        Ok(())
    }
}

/// Weighs the chunks' outputs, `stride` apart, by their maxima and sums; the log of the sum of all weights.
fn combine(partial: &[f32], stride: usize, results: &[(f32, f32)], out: &mut [f32]) -> f32 {
    let maximum = results.iter().fold(f32::NEG_INFINITY, |max, r| max.max(r.0));
    let mut sum = 0.0;
    for (part, (m, l)) in partial.chunks(stride).zip(results) {
        let weight = (m - maximum).exp();
        sum += weight * l;
        out.iter_mut().zip(part).for_each(|(o, x)| *o += weight * x);
    }
    out.iter_mut().for_each(|o| *o /= sum);
    maximum + sum.ln()
}

/// The data of a page for one query head.
struct PageView<'a> {
    /// `[PAGE, d]`.
    k: &'a [f32],
    v: &'a [f32],
    /// Sums of the log gates `[PAGE]`.
    sums: Option<&'a [f64]>,
}

/// One query against a chunk of its keys.
struct Decode<'a> {
    /// `[head_dim]`.
    q: &'a [f32],
    scale: f32,
    /// Sum of the log gates at the query.
    sum: f64,
    pages: &'a [PageView<'a>],
    keys: Range<usize>,
    /// Scratch for the chunk's scores.
    scores: &'a mut [f32],
    /// The chunk's unnormalised output `[head_dim]`.
    o: &'a mut [f32],
}

impl Kernel for Decode<'_> {
    /// The chunk's maximum and sum.
    type Out = (f32, f32);

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> (f32, f32) {
        let d = self.q.len();
        let scores = &mut self.scores[..self.keys.len()];
        let pages = self.keys.start / PAGE..self.keys.end.div_ceil(PAGE);
        let within = |p: usize| {
            let keys = &self.keys;
            keys.start.max(p * PAGE) - p * PAGE..keys.end.min((p + 1) * PAGE) - p * PAGE
        };
        let mut maximum = f32::NEG_INFINITY;
        let mut at = 0;
        for p in pages.clone() {
            let page = &self.pages[p];
            for j in within(p) {
                let mut score = dot(s, self.q, &page.k[j * d..][..d]) * self.scale;
                if let Some(sums) = page.sums {
                    score += (self.sum - sums[j]) as f32;
                }
                maximum = maximum.max(score);
                scores[at] = score;
                at += 1;
            }
        }
        let maximum_lanes = s.splat(maximum);
        update(s, [], scores, |[], x| exp(s, s.sub(x, maximum_lanes)));
        self.o.fill(0.0);
        let mut at = 0;
        for p in pages {
            let keys = within(p);
            let weights = &scores[at..][..keys.len()];
            add_weighted(s, weights, &self.pages[p].v[keys.start * d..keys.end * d], d, self.o);
            at += keys.len();
        }
        (maximum, scores.iter().sum())
    }
}

/// `o[d] += sum_j weights[j] v[j][d]`, each element in the order of `j`.
#[inline(always)]
fn add_weighted<S: Simd>(s: S, weights: &[f32], v: &[f32], d: usize, o: &mut [f32]) {
    if d.is_multiple_of(4 * S::LANES) {
        for column in (0..d).step_by(4 * S::LANES) {
            add_columns::<S, 4>(s, weights, v, d, column, o);
        }
    } else if d.is_multiple_of(S::LANES) {
        for column in (0..d).step_by(S::LANES) {
            add_columns::<S, 1>(s, weights, v, d, column, o);
        }
    } else {
        for (weight, v) in weights.iter().zip(v.chunks(d)) {
            scale_add(s, *weight, v, o);
        }
    }
}

/// `N` vectors of columns, in registers over all rows.
#[inline(always)]
fn add_columns<S: Simd, const N: usize>(
    s: S,
    weights: &[f32],
    v: &[f32],
    d: usize,
    column: usize,
    o: &mut [f32],
) {
    assert!(weights.len() * d <= v.len() && column + N * S::LANES <= d && d <= o.len());
    let mut sums = [s.splat(0.0); N];
    // SAFETY: by the assertion, `N` vectors from `column` on lie inside `o` and inside every row of `v`.
    unsafe {
        for (n, sum) in sums.iter_mut().enumerate() {
            *sum = s.load(o.as_ptr().add(column + n * S::LANES));
        }
        for (j, weight) in weights.iter().enumerate() {
            let weight = s.splat(*weight);
            for (n, sum) in sums.iter_mut().enumerate() {
                let v = s.load(v.as_ptr().add(j * d + column + n * S::LANES));
                *sum = s.mul_add(weight, v, *sum);
            }
        }
        for (n, sum) in sums.iter().enumerate() {
            s.store(o.as_mut_ptr().add(column + n * S::LANES), *sum);
        }
    }
}
