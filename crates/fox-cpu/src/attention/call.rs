//! Operands of one attention call, and its division into units.

use std::ops::Range;
use std::sync::Arc;

use fox_tensor::{Acp, AttentionInputs, AttentionSpec, LogitBound, Result, Segment};

use super::forward::Forward;
use super::gather::GatheredKeys;
use super::visits::{Prefix, View, Visits};
use super::{BLOCK, decode};
use crate::Cpu;
use crate::pool::Pool;
use crate::shared::Shared;
use crate::simd::Level;

/// Operands and options of one call.
pub struct Attention<'a> {
    pub level: Level,
    pub pool: &'a Arc<Pool>,
    pub spec: &'a AttentionSpec,
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub v: &'a [f32],
    pub log_gates: Option<&'a [f32]>,
    pub padded_dim: usize,
    /// Whether a query attends to its own position.
    pub own: bool,
    /// Bounds on the logits that do not depend on queries and keys: from QK-norm weights, per head, or given, per
    /// segment and head.
    pub known_bounds: Option<Vec<f64>>,
}

/// One segment and one key head.
#[derive(Clone, Copy)]
pub struct Unit {
    /// Number of the segment.
    pub index: usize,
    pub segment: Segment,
    pub kv_head: usize,
}

/// A block of queries of a unit: its head, its number and the key blocks it may visit.
pub struct QueryBlock {
    pub head: usize,
    pub m: usize,
    pub keys: Range<usize>,
}

impl<'a> Attention<'a> {
    pub fn new(cpu: &'a Cpu, inputs: &AttentionInputs<'a>, spec: &'a AttentionSpec) -> Self {
        Attention {
            level: cpu.level(),
            pool: cpu.pool(),
            spec,
            q: cpu.real(inputs.q),
            k: cpu.real(inputs.k),
            v: cpu.real(inputs.v),
            log_gates: inputs.log_gates.map(|gates| cpu.real(gates)),
            padded_dim: spec.head_dim.next_multiple_of(16),
            own: true,
            known_bounds: known_bounds(cpu, spec),
        }
    }

    pub fn units(&self) -> Vec<Unit> {
        let segments =
            self.spec.segments.as_slice().iter().enumerate().filter(|(_, s)| s.q_len > 0);
        segments
            .flat_map(|(index, &segment)| {
                (0..self.spec.kv_heads).map(move |kv_head| Unit { index, segment, kv_head })
            })
            .collect()
    }

    pub fn group(&self) -> usize {
        self.spec.heads / self.spec.kv_heads
    }

    pub fn query_heads(&self, unit: &Unit) -> Range<usize> {
        unit.kv_head * self.group()..(unit.kv_head + 1) * self.group()
    }

    pub fn view(&self, segment: &Segment) -> View {
        let AttentionSpec { mask, window, .. } = *self.spec;
        View { mask, own: self.own, window, k_len: segment.k_len }
    }

    /// Whether a segment has so few queries that tiles would be almost empty. The end of a longer sequence uses tiles,
    /// for the same bits as the full sequence.
    pub fn is_decode(&self, segment: &Segment) -> bool {
        segment.q_len < decode::MAX_QUERIES
            && segment.q_len < segment.k_len
            && self.spec.full_sequence.is_none()
    }

    pub fn prefix(&self, unit: &Unit, head: usize) -> Result<Option<Prefix>> {
        let Some(gates) = self.log_gates else { return Ok(None) };
        let full = self.spec.full_sequence.as_deref();
        let before = full.map_or(0.0, |full| full.gate_sums[unit.index * self.spec.heads + head]);
        Prefix::new(self.pool, gates, self.spec.heads, head, &unit.segment, before).map(Some)
    }

    /// Prefix sums and visited blocks of one query head.
    pub fn prefix_and_visits(&self, unit: &Unit, head: usize) -> Result<(Option<Prefix>, Visits)> {
        let prefix = self.prefix(unit, head)?;
        let threshold = prefix.as_ref().and_then(|_| self.threshold(unit, head));
        let view = self.view(&unit.segment);
        let visits = Visits::new(&unit.segment, &view, prefix.as_ref(), threshold);
        Ok((prefix, visits))
    }

    /// The decay below which a pair may be dropped, with gates and pruning: `-(2 U + ln N) + log_tolerance`.
    pub fn threshold(&self, unit: &Unit, head: usize) -> Option<f64> {
        let Acp::On { log_tolerance, .. } = &self.spec.acp else { return None };
        self.log_gates?;
        let full = self.spec.full_sequence.as_deref();
        let at = unit.index * self.spec.heads + head;
        let known = match &self.known_bounds {
            Some(bounds) => Some(bounds[at % bounds.len()]),
            None => full.and_then(|full| full.bounds.get(at).copied()),
        };
        let bound = known.unwrap_or_else(|| self.norm_bound(unit, head));
        let keys = full.map_or(unit.segment.k_len, |full| full.keys[unit.index]) as f64;
        Some(-(2.0 * bound + keys.ln()) + *log_tolerance as f64)
    }

    /// The forward pass of a block of queries.
    pub fn forward<'k>(
        &self,
        unit: &Unit,
        block: QueryBlock,
        gathered: &'k GatheredKeys,
        prefix: Option<&'k Prefix>,
        o: Shared<'k>,
        lse: Shared<'k>,
        scratch: &'k mut [f32],
    ) -> Forward<'k>
    where
        'a: 'k,
    {
        let (segment, QueryBlock { head, m, keys }) = (&unit.segment, block);
        Forward {
            head_dim: self.spec.head_dim,
            padded_dim: self.padded_dim,
            k: &gathered.k,
            v: &gathered.v,
            prefix,
            view: self.view(segment),
            q: self.q,
            q_width: self.spec.heads * self.spec.head_dim,
            column: head * self.spec.head_dim,
            scale: self.spec.scale,
            row: segment.q_start + m * BLOCK,
            queries: BLOCK.min(segment.q_len - m * BLOCK),
            position: segment.offset() + m * BLOCK,
            keys,
            o,
            lse,
            heads: self.spec.heads,
            head,
            scratch,
        }
    }

    /// `max |q_i| max |k_j| scale` over the segment.
    fn norm_bound(&self, unit: &Unit, head: usize) -> f64 {
        let (d, s) = (self.spec.head_dim, &unit.segment);
        let largest = |x: &[f32], width: usize, column: usize, rows: Range<usize>| {
            let norm = |r: usize| {
                let row = &x[r * width + column..][..d];
                row.iter().map(|x| (x * x) as f64).sum::<f64>()
            };
            rows.map(norm).fold(0.0, f64::max).sqrt()
        };
        let q = largest(self.q, self.spec.heads * d, head * d, s.q_start..s.q_start + s.q_len);
        let kv_width = self.spec.kv_heads * d;
        let k = largest(self.k, kv_width, unit.kv_head * d, s.k_start..s.k_start + s.k_len);
        q * k * self.spec.scale.abs() as f64
    }
}

fn known_bounds(cpu: &Cpu, spec: &AttentionSpec) -> Option<Vec<f64>> {
    let Acp::On { bound, .. } = &spec.acp else { return None };
    let (q, k) = match bound {
        LogitBound::Norms => return None,
        LogitBound::Given(bounds) => {
            return Some(cpu.real(bounds).iter().map(|u| *u as f64).collect());
        }
        LogitBound::QkNorm { q, k } => (q, k),
    };
    let (d, group) = (spec.head_dim, spec.heads / spec.kv_heads);
    let largest = |weights: &[f32], head: usize| {
        let of_head = if weights.len() == d { weights } else { &weights[head * d..][..d] };
        of_head.iter().fold(0.0f64, |max, w| max.max(w.abs() as f64))
    };
    let (q, k) = (cpu.real(q), cpu.real(k));
    let scale = d as f64 * spec.scale.abs() as f64;
    Some((0..spec.heads).map(|h| largest(q, h) * largest(k, h / group) * scale).collect())
}
