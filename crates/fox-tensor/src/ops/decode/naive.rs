//! The oracle: a step is composed of the oracle's ops, one row after the other. A slot holds all keys in rows.

use std::any::Any;
use std::collections::VecDeque;

use super::{
    DecodeAttention, DecodeBlock, DecodeMixer, DecodeProjection, DecodeRow, DecodeWeights,
    FinishedStep, LayerPast, RowToken, SampledToken, SlotDecodeOps, TokenDraw, check_enter_slot,
    check_open_slots, check_slot_rows, check_update_slot_pages, slot_state,
};
use crate::naive::{Naive, logsumexp, maybe_real, real};
use crate::{
    Acp, AttentionSpec, AttentionWeights, Device, Error, HeadSpec, LinearOps, Mask, PAGE,
    PagedKeys, Result, Segment, Segments, Tape, Tensor, Var, clamp_log_gate,
};

/// The model and the state of its slots.
struct NaiveSlots {
    weights: DecodeWeights,
    device: Device,
    /// `[slots][blocks]`.
    slots: Vec<Vec<LayerKeys>>,
    /// Logits of each row of the step that was begun last.
    logits: Vec<Vec<f64>>,
    /// The tokens that it has sampled.
    sampled: Vec<SampledToken>,
    unfinished: VecDeque<FinishedStep>,
}

/// The keys of one layer of a sequence, one row per position.
#[derive(Default)]
struct LayerKeys {
    len: usize,
    /// `[len, H_kv * d]`; evicted keys are 0.
    k: Vec<f64>,
    v: Vec<f64>,
    /// Log gates `[len, H]`; empty without forget gates.
    gates: Vec<f64>,
    /// Sums of the log gates up to each position `[len, H]`.
    sums: Vec<f64>,
    /// First position that each key head holds `[H_kv]`.
    first: Vec<usize>,
    /// Last raw projections `[H_kv * d]`, with a token shift.
    last_k: Option<Vec<f64>>,
    last_v: Option<Vec<f64>>,
}

impl LayerKeys {
    /// Copies the first `len` keys out of the pages.
    fn new(past: &LayerPast<'_>, len: usize) -> Result<Self> {
        let (shape, pages) = (past.pages.shape(), &past.pages);
        let (d, group, width) = (shape.head_dim, shape.group, shape.kv_heads * shape.head_dim);
        let heads = past.gate_sums.len();
        let mut keys = LayerKeys {
            len,
            k: vec![0.0; len * width],
            v: vec![0.0; len * width],
            gates: vec![0.0; len * heads],
            sums: vec![0.0; len * heads],
            first: (0..shape.kv_heads).map(|head| pages.first(head)).collect(),
            last_k: maybe_real(past.last_k)?.map(<[f64]>::to_vec),
            last_v: maybe_real(past.last_v)?.map(<[f64]>::to_vec),
        };
        for head in 0..shape.kv_heads {
            // From the last key back, because pages hold the gates, not their sums.
            let mut sums: Vec<f64> = (0..group).map(|g| past.gate_sums[head * group + g]).collect();
            for position in (pages.first(head)..len).rev() {
                let Some(page) = pages.page(head, position / PAGE) else { break };
                let (row, to) = (page.row() + position % PAGE, position * width + head * d);
                keys.k[to..][..d].copy_from_slice(&real(&page.slab.k)?[row * d..][..d]);
                keys.v[to..][..d].copy_from_slice(&real(&page.slab.v)?[row * d..][..d]);
                let Some(gates) = &page.slab.gates else { continue };
                for (g, sum) in sums.iter_mut().enumerate() {
                    let gate = real(gates)?[(page.place * group + g) * PAGE + position % PAGE];
                    let at = position * heads + head * group + g;
                    (keys.gates[at], keys.sums[at]) = (gate, *sum);
                    *sum -= clamp_log_gate(gate);
                }
            }
        }
        Ok(keys)
    }

    /// The first position that query head `head` of `attention` reads: what its key head holds, without the pages
    /// that have decayed below its threshold.
    fn first_visible(&self, attention: &DecodeAttention, head: usize) -> usize {
        let shape = &attention.shape;
        let first = self.first.get(head / (shape.heads / shape.kv_heads)).copied().unwrap_or(0);
        let Some(thresholds) = attention.thresholds.as_ref().filter(|_| !self.sums.is_empty())
        else {
            return first;
        };
        let sum = |position: usize| self.sums[position * shape.heads + head];
        let forgotten = |page: &usize| {
            let end = (page + 1) * PAGE - 1;
            end < self.len && sum(self.len - 1) - sum(end) < thresholds[head]
        };
        let pages = (first / PAGE..self.len.div_ceil(PAGE)).take_while(forgotten).count();
        first + pages * PAGE
    }
}

impl NaiveSlots {
    /// Sums of the log gates of a slot `[layers][H]`; empty without forget gates.
    fn gate_sums(&self, slot: usize) -> Vec<f64> {
        let last = |(keys, block): (&LayerKeys, &DecodeBlock)| {
            let DecodeMixer::Attention(attention) = &block.mixer;
            keys.sums[keys.sums.len().saturating_sub(attention.shape.heads)..].to_vec()
        };
        self.slots[slot].iter().zip(&self.weights.blocks).flat_map(last).collect()
    }

    /// Logits `[V]` after one more token of a slot.
    fn step(&mut self, row: &DecodeRow) -> Result<Vec<f64>> {
        let layers = &mut self.slots[row.slot];
        let mut tape = Tape::inference(&self.device);
        let (weights, eps) = (&self.weights, self.weights.norm_eps);
        let token = match row.token {
            RowToken::Id(id) => id,
            RowToken::Sampled(row) => self.sampled[row].id.unwrap_or(0),
        };
        let ids = self.device.from_i32(&[token], [1])?;
        let mut h = tape.embedding(&var(&weights.embeddings), &ids, None)?;
        let mut delta: Option<Var> = None;
        for (block, keys) in weights.blocks.iter().zip(layers) {
            let DecodeBlock { mixer_norm, mixer, mlp } = block;
            let (sum, x) = tape.add_rms_norm(&h, delta.as_ref(), &var(mixer_norm), eps)?;
            let DecodeMixer::Attention(attention) = mixer;
            let mixed = attend(&mut tape, &x, attention, keys)?;
            let (sum, x) = tape.add_rms_norm(&sum, Some(&mixed), &var(&mlp.norm), eps)?;
            let gate_up = tape.linear(&x, &var(&mlp.gate_up), None)?;
            let inner = tape.glu(&gate_up, mlp.act)?;
            delta = Some(tape.linear(&inner, &var(&mlp.down), None)?);
            h = sum;
        }
        let (_, x) = tape.add_rms_norm(&h, delta.as_ref(), &var(&weights.norm), eps)?;
        tape.linear(&x, &var(&weights.head), None)?.value().to_f64()
    }
}

fn var(x: &Tensor) -> Var {
    Var::constant(x.clone())
}

/// An attention layer for one token `x: [1, D]` at position `keys.len`.
fn attend(
    tape: &mut Tape<'_>,
    x: &Var,
    attention: &DecodeAttention,
    keys: &mut LayerKeys,
) -> Result<Var> {
    let (shape, device) = (&attention.shape, x.value().device().clone());
    let (heads, kv_heads, d) = (shape.heads, shape.kv_heads, shape.head_dim);
    let (_, q) = project(tape, x, &attention.q, (attention, heads, true), None, keys.len)?;
    let projection = (attention, kv_heads, true);
    let (uk, k) = project(tape, x, &attention.k, projection, keys.last_k.as_deref(), keys.len)?;
    let projection = (attention, kv_heads, false);
    let (uv, v) = project(tape, x, &attention.v, projection, keys.last_v.as_deref(), keys.len)?;
    keys.last_k = keys.last_k.is_some().then_some(uk);
    keys.last_v = keys.last_v.is_some().then_some(uv);
    keys.k.extend(k.value().to_f64()?);
    keys.v.extend(v.value().to_f64()?);
    if let Some((weight, bias)) = &attention.gate {
        let z = tape.linear(x, &var(weight), None)?;
        let gates = tape.log_gate(Some(&z), Some(&var(bias)), 1)?.value().to_f64()?;
        let before = keys.sums.len().checked_sub(heads);
        for (h, gate) in gates.iter().enumerate() {
            let sum = before.map_or(0.0, |last| keys.sums[last + h]);
            keys.sums.push(sum + clamp_log_gate(*gate));
        }
        keys.gates.extend(gates);
    }
    keys.len += 1;
    let q = q.value().to_f64()?;
    let mut out = Vec::with_capacity(heads * d);
    for head in 0..heads {
        let first = keys.first_visible(attention, head);
        let (kv_head, rows) = (head / (heads / kv_heads), keys.len - first);
        let column = |x: &[f64], width: usize, at: usize, len: usize| -> Result<Var> {
            let rows_of = x[first * width..].chunks(width).flat_map(|row| &row[at..at + len]);
            let values: Vec<f64> = rows_of.copied().collect();
            Ok(Var::constant(device.from_f64(&values, [rows, len])?))
        };
        let k = column(&keys.k, kv_heads * d, kv_head * d, d)?;
        let v = column(&keys.v, kv_heads * d, kv_head * d, d)?;
        let gates =
            (!keys.gates.is_empty()).then(|| column(&keys.gates, heads, head, 1)).transpose()?;
        let spec = AttentionSpec {
            heads: 1,
            kv_heads: 1,
            head_dim: d,
            scale: 1.0 / (d as f32).sqrt(),
            mask: Mask::Causal,
            window: shape.window,
            acp: Acp::Off,
            segments: last_of(rows)?,
            full_sequence: None,
        };
        let q = Var::constant(device.from_f64(&q[head * d..][..d], [1, d])?);
        let gates = gates.as_ref();
        let (o, _) = match &attention.sinks {
            None => tape.attend(AttentionWeights::Softmax, &q, &k, &v, gates, &spec)?,
            Some(sinks) => {
                let own = var(&sinks.reshape([heads, 1])?.slice_rows(head, 1)?.reshape([1])?);
                tape.sink_attention([&q, &k, &v], gates, &own, &spec)?
            }
        };
        out.extend(o.value().to_f64()?);
    }
    let mut o = Var::constant(device.from_f64(&out, [1, heads * d])?);
    if attention.output_norm.is_some() || attention.output_gate.is_some() {
        let z =
            attention.output_gate.as_ref().map(|w| tape.linear(x, &var(w), None)).transpose()?;
        let norm = attention.output_norm.as_ref().map(var);
        let (eps, act) = (shape.norm_eps, shape.output_act);
        o = tape.gated_norm(&o, norm.as_ref(), z.as_ref(), heads, eps, act)?;
    }
    tape.linear(&o, &var(&attention.o_proj), None)
}

/// One query behind `len - 1` keys.
fn last_of(len: usize) -> Result<Segments> {
    Segments::new(vec![Segment { q_start: 0, q_len: 1, k_start: 0, k_len: len }])
}

/// The raw projection of `x: [1, D]` and its prepared heads `[1, heads * d]`; `last` is the raw row before.
fn project(
    tape: &mut Tape<'_>,
    x: &Var,
    p: &DecodeProjection,
    (attention, heads, rotated): (&DecodeAttention, usize, bool),
    last: Option<&[f64]>,
    position: usize,
) -> Result<(Vec<f64>, Var)> {
    let shape = &attention.shape;
    let u = tape.linear(x, &var(&p.weight), p.bias.as_ref().map(var).as_ref())?;
    let raw = u.value().to_f64()?;
    let shift = p.shift.as_ref().map(|w| tape.linear(x, &var(w), None)).transpose()?;
    let width = heads * shape.head_dim;
    let device = x.value().device();
    let last = last.map(|row| device.from_f64(row, [1, width])).transpose()?.map(Var::constant);
    let spec = HeadSpec {
        heads,
        head_dim: shape.head_dim,
        norm_eps: shape.qk_eps,
        rope: shape.rope.filter(|_| rotated),
        segments: last_of(position + 1)?,
    };
    if shift.is_none() && p.norm.is_none() && spec.rope.is_none() {
        return Ok((raw, u));
    }
    let norm = p.norm.as_ref().map(var);
    let heads = tape.prepare_heads(&u, shift.as_ref(), last.as_ref(), norm.as_ref(), &spec)?;
    Ok((raw, heads))
}

/// The next token from logits `[V]`.
fn sample(logits: &[f64], draw: &Option<TokenDraw>) -> SampledToken {
    let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if logits.iter().any(|x| x.is_nan()) || top == f64::NEG_INFINITY {
        return SampledToken { id: None, logprob: 0.0 };
    }
    let best = logits.iter().position(|x| *x == top).unwrap_or(0);
    let id = draw.as_ref().map_or(best, |draw| draw.choose(logits));
    SampledToken { id: Some(id as i32), logprob: (logits[id] - logsumexp(logits)) as f32 }
}

impl SlotDecodeOps for Naive {
    fn open_slots(&self, weights: &DecodeWeights) -> Result<Option<Box<dyn Any + Send>>> {
        check_open_slots(self, weights)?;
        let empty = || weights.blocks.iter().map(|_| LayerKeys::default()).collect();
        Ok(Some(Box::new(NaiveSlots {
            weights: weights.clone(),
            device: weights.embeddings.device().clone(),
            slots: (0..weights.slots).map(|_| empty()).collect(),
            logits: Vec::new(),
            sampled: Vec::new(),
            unfinished: VecDeque::new(),
        })))
    }

    fn enter_slot(
        &self,
        state: &mut dyn Any,
        slot: usize,
        len: usize,
        past: &mut [LayerPast<'_>],
    ) -> Result<()> {
        let slots: &mut NaiveSlots = slot_state(state)?;
        check_enter_slot(&slots.weights, slot, len, past)?;
        slots.slots[slot] =
            past.iter().map(|past| LayerKeys::new(past, len)).collect::<Result<_>>()?;
        Ok(())
    }

    fn update_slot_pages(
        &self,
        state: &mut dyn Any,
        slot: usize,
        pages: &mut [&mut dyn PagedKeys],
    ) -> Result<()> {
        let slots: &mut NaiveSlots = slot_state(state)?;
        check_update_slot_pages(&slots.weights, slot, pages)
    }

    fn begin_slot_step(&self, state: &mut dyn Any, rows: &[DecodeRow]) -> Result<()> {
        let slots: &mut NaiveSlots = slot_state(state)?;
        let len = |slot: usize| slots.slots[slot].first().map_or(0, |keys| keys.len);
        check_slot_rows(&slots.weights, rows, len, (slots.sampled.len(), slots.unfinished.len()))?;
        slots.logits = rows.iter().map(|row| slots.step(row)).collect::<Result<_>>()?;
        let sampled = |(row, logits): (&DecodeRow, &Vec<f64>)| sample(logits, &row.draw);
        slots.sampled = rows.iter().zip(&slots.logits).map(sampled).collect();
        let ends = rows.iter().enumerate().filter(|(_, row)| (row.position + 1) % PAGE == 0);
        slots.unfinished.push_back(FinishedStep {
            tokens: slots.sampled.clone(),
            page_ends: ends.map(|(n, row)| (n, slots.gate_sums(row.slot))).collect(),
        });
        Ok(())
    }

    fn finish_slot_step(&self, state: &mut dyn Any) -> Result<FinishedStep> {
        let slots: &mut NaiveSlots = slot_state(state)?;
        let none = || Error::argument("step", "no step is unfinished");
        slots.unfinished.pop_front().ok_or_else(none)
    }

    fn slot_logits(&self, state: &mut dyn Any, row: usize) -> Result<Vec<f32>> {
        let slots: &mut NaiveSlots = slot_state(state)?;
        let Some(logits) = slots.logits.get(row) else {
            let detail = format!("row {row} is out of range ({} rows)", slots.logits.len());
            return Err(Error::argument("logits", detail));
        };
        Ok(logits.iter().map(|x| *x as f32).collect())
    }

    fn batch_invariant_linear(&self, x: &Tensor, w: &Tensor) -> Result<Option<Tensor>> {
        self.linear_fwd(x, w, None).map(Some)
    }
}
