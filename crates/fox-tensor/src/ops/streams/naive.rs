//! The oracle: a slot has all keys in a row, and everything happens token by token.

use std::any::Any;
use std::sync::Arc;

use super::{Choice, StreamDraw, StreamModel, StreamOps, StreamPast, StreamRow, stream_state};
use crate::naive::{Act, Naive, dot, log_sigmoid, logsumexp, maybe_real, real, rstd, sigmoid};
use crate::{
    DecodeBlock, DecodeProjection, DecodeShape, Error, LinearOps, PAGE, PagedKeys, Result, Tensor,
    clamp_log_gate,
};

/// The model, and what its slots remember.
struct NaiveStreams {
    shape: DecodeShape,
    embeddings: Weights,
    blocks: Vec<Block>,
    norm: Vec<f64>,
    head: Weights,
    /// `[slots][blocks]`.
    slots: Vec<Vec<Past>>,
    /// Of the last step.
    logits: Vec<Vec<f64>>,
    draws: Vec<Option<StreamDraw>>,
}

/// A matrix `[rows, cols]`.
struct Weights {
    cols: usize,
    values: Vec<f64>,
}

struct Head {
    weight: Weights,
    bias: Option<Vec<f64>>,
    shift: Option<Weights>,
    norm: Option<Vec<f64>>,
}

struct Block {
    mixer_norm: Vec<f64>,
    mlp_norm: Vec<f64>,
    q: Head,
    k: Head,
    v: Head,
    gate: Option<(Weights, Vec<f64>)>,
    output_gate: Option<Weights>,
    output_norm: Option<Vec<f64>>,
    o_proj: Weights,
    gate_up: Weights,
    down: Weights,
    thresholds: Option<Arc<[f64]>>,
}

/// What a layer remembers of a sequence, by position: keys and values `[H_kv * d]`, sums of the log gates `[H]`.
#[derive(Default)]
struct Past {
    k: Vec<Vec<f64>>,
    v: Vec<Vec<f64>>,
    sums: Vec<Vec<f64>>,
    last_k: Option<Vec<f64>>,
    last_v: Option<Vec<f64>>,
}

impl Weights {
    fn new(w: &Tensor) -> Result<Self> {
        Ok(Weights { cols: w.cols(), values: real(w)?.to_vec() })
    }

    fn row(&self, row: usize) -> &[f64] {
        &self.values[row * self.cols..][..self.cols]
    }

    fn times(&self, x: &[f64]) -> Vec<f64> {
        self.values.chunks(self.cols).map(|row| dot(row, x)).collect()
    }
}

impl Head {
    fn new(p: &DecodeProjection<'_>) -> Result<Self> {
        Ok(Head {
            weight: Weights::new(p.weight)?,
            bias: maybe_real(p.bias)?.map(<[f64]>::to_vec),
            shift: p.shift.map(Weights::new).transpose()?,
            norm: maybe_real(p.norm)?.map(<[f64]>::to_vec),
        })
    }

    /// The heads of a token, and its raw row, which becomes `last`.
    fn run(
        &self,
        x: &[f64],
        last: &mut Option<Vec<f64>>,
        position: usize,
        shape: &DecodeShape,
        turns: bool,
    ) -> Vec<f64> {
        let d = shape.head_dim;
        let mut u = self.weight.times(x);
        if let Some(bias) = &self.bias {
            u.iter_mut().zip(bias).for_each(|(u, bias)| *u += bias);
        }
        let raw = u.clone();
        if let (Some(shift), Some(last)) = (&self.shift, last.as_ref()) {
            let a: Vec<f64> = shift.times(x).into_iter().map(sigmoid).collect();
            for (i, u) in u.iter_mut().enumerate() {
                *u = a[i / d] * last[i] + (1.0 - a[i / d]) * *u;
            }
        }
        if last.is_some() {
            *last = Some(raw);
        }
        for (head, own) in u.chunks_mut(d).enumerate() {
            if let Some(norm) = &self.norm {
                let own_norm = if norm.len() == d { norm } else { &norm[head * d..][..d] };
                let scale = rstd(own, f64::from(shape.qk_eps));
                own.iter_mut().zip(own_norm).for_each(|(u, w)| *u *= scale * w);
            }
            let Some(rope) = shape.rope.filter(|_| turns) else { continue };
            for m in 0..d / 2 {
                let angle = position as f64 * rope.base.powf(-2.0 * m as f64 / d as f64);
                let ((sin, cos), (a, b)) = (angle.sin_cos(), (own[m], own[m + d / 2]));
                (own[m], own[m + d / 2]) = (a * cos - b * sin, a * sin + b * cos);
            }
        }
        u
    }
}

impl Block {
    fn new(block: &DecodeBlock<'_>, thresholds: Option<Arc<[f64]>>) -> Result<Self> {
        let gate = |(w, bias): (&Tensor, &Tensor)| Ok((Weights::new(w)?, real(bias)?.to_vec()));
        Ok(Block {
            mixer_norm: real(block.mixer_norm)?.to_vec(),
            mlp_norm: real(block.mlp_norm)?.to_vec(),
            q: Head::new(&block.q)?,
            k: Head::new(&block.k)?,
            v: Head::new(&block.v)?,
            gate: block.gate.map(gate).transpose()?,
            output_gate: block.output_gate.map(Weights::new).transpose()?,
            output_norm: maybe_real(block.output_norm)?.map(<[f64]>::to_vec),
            o_proj: Weights::new(block.o_proj)?,
            gate_up: Weights::new(block.gate_up)?,
            down: Weights::new(block.down)?,
            thresholds,
        })
    }

    /// One token through the block; `h` is the residual stream `[D]`.
    fn run(&self, h: &mut [f64], past: &mut Past, position: usize, shape: &DecodeShape) {
        let x = normed(h, &self.mixer_norm, shape.norm_eps);
        let q = self.q.run(&x, &mut None, position, shape, true);
        let k = self.k.run(&x, &mut past.last_k, position, shape, true);
        let v = self.v.run(&x, &mut past.last_v, position, shape, false);
        past.k.push(k);
        past.v.push(v);
        if let Some((weight, bias)) = &self.gate {
            let before = past.sums.last().cloned().unwrap_or_else(|| vec![0.0; shape.heads]);
            let logits = weight.times(&x);
            let sum = |h: usize| before[h] + clamp_log_gate(log_sigmoid(logits[h] + bias[h]));
            past.sums.push((0..shape.heads).map(sum).collect());
        }
        let mut o: Vec<f64> = (0..shape.heads)
            .flat_map(|head| self.attend(head, &q, past, position, shape))
            .collect();
        if let Some(norm) = &self.output_norm {
            for (own, norm) in o.chunks_mut(shape.head_dim).zip(norm.chunks(shape.head_dim)) {
                let scale = rstd(own, f64::from(shape.norm_eps));
                own.iter_mut().zip(norm).for_each(|(o, w)| *o *= scale * w);
            }
        }
        if let Some(gate) = &self.output_gate {
            let act = Act(shape.output_act);
            o.iter_mut().zip(gate.times(&x)).for_each(|(o, z)| *o *= act.value(z));
        }
        add(h, &self.o_proj.times(&o));
        let gate_up = self.gate_up.times(&normed(h, &self.mlp_norm, shape.norm_eps));
        let (gate, up) = gate_up.split_at(gate_up.len() / 2);
        let act = Act(shape.mlp_act);
        let inner: Vec<f64> = gate.iter().zip(up).map(|(g, u)| act.value(*g) * u).collect();
        add(h, &self.down.times(&inner));
    }

    fn attend(
        &self,
        head: usize,
        q: &[f64],
        past: &Past,
        position: usize,
        shape: &DecodeShape,
    ) -> Vec<f64> {
        let (d, kv_head) = (shape.head_dim, head / (shape.heads / shape.kv_heads));
        let sum = |key: usize| past.sums.get(key).map_or(0.0, |sums| sums[head]);
        let decay = |key: usize| sum(position) - sum(key);
        let is_seen = |key: &usize| {
            let last = key / PAGE * PAGE + PAGE - 1;
            let forgotten = |t: &Arc<[f64]>| last <= position && decay(last) < t[head];
            shape.window.is_none_or(|window| key + window > position)
                && !self.thresholds.as_ref().is_some_and(forgotten)
        };
        let own = |x: &[f64], head: usize| x[head * d..][..d].to_vec();
        let keys: Vec<usize> = (0..=position).filter(is_seen).collect();
        let score = |key: &usize| {
            dot(&own(q, head), &own(&past.k[*key], kv_head)) / (d as f64).sqrt() + decay(*key)
        };
        let scores: Vec<f64> = keys.iter().map(score).collect();
        let norm = logsumexp(&scores);
        let mut o = vec![0.0; d];
        for (key, score) in keys.iter().zip(scores) {
            let weight = (score - norm).exp();
            o.iter_mut().zip(own(&past.v[*key], kv_head)).for_each(|(o, v)| *o += weight * v);
        }
        o
    }
}

/// `rms(h) * w`.
fn normed(h: &[f64], w: &[f64], eps: f32) -> Vec<f64> {
    let scale = rstd(h, f64::from(eps));
    h.iter().zip(w).map(|(h, w)| h * scale * w).collect()
}

fn add(h: &mut [f64], x: &[f64]) {
    h.iter_mut().zip(x).for_each(|(h, x)| *h += x);
}

impl Past {
    /// The first `len` keys of a layer; what was dropped is 0 and has decayed to nothing.
    fn new(past: &StreamPast<'_>, len: usize) -> Result<Self> {
        let shape = past.keys.shape();
        let (heads, d, group) = (shape.kv_heads, shape.head_dim, shape.group);
        let mut own = Past {
            last_k: maybe_real(past.last_k)?.map(<[f64]>::to_vec),
            last_v: maybe_real(past.last_v)?.map(<[f64]>::to_vec),
            ..Past::default()
        };
        for position in 0..len {
            let (mut k, mut v) = (vec![0.0; heads * d], vec![0.0; heads * d]);
            for head in 0..heads {
                let Some(page) = past.keys.page(head, position / PAGE) else { continue };
                let row = page.row() + position % PAGE;
                k[head * d..][..d].copy_from_slice(&real(&page.slab.k)?[row * d..][..d]);
                v[head * d..][..d].copy_from_slice(&real(&page.slab.v)?[row * d..][..d]);
            }
            own.k.push(k);
            own.v.push(v);
        }
        own.sums = vec![vec![f64::INFINITY; heads * group]; if group > 0 { len } else { 0 }];
        for (h, &now) in past.sums.iter().enumerate() {
            // From the last key back, because pages hold gates and not their sums.
            let mut sum = now;
            for position in (past.keys.first(h / group)..len).rev() {
                let Some(page) = past.keys.page(h / group, position / PAGE) else { break };
                let Some(gates) = &page.slab.gates else { break };
                own.sums[position][h] = sum;
                let row = page.place * group + h % group;
                sum -= clamp_log_gate(real(gates)?[row * PAGE + position % PAGE]);
            }
        }
        Ok(own)
    }
}

fn choose(logits: &[f64], draw: &Option<StreamDraw>) -> Choice {
    let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if logits.iter().any(|x| x.is_nan()) || top == f64::NEG_INFINITY {
        return Choice { id: None, logprob: 0.0 };
    }
    let best = logits.iter().position(|x| *x == top).unwrap_or(0);
    let id = draw.as_ref().map_or(best, |draw| draw.choose(logits));
    Choice { id: Some(id as i32), logprob: (logits[id] - logsumexp(logits)) as f32 }
}

impl StreamDraw {
    /// The oracle's choice from logits that are numbers.
    pub fn choose(&self, logits: &[f64]) -> usize {
        let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weight = |id: usize| ((logits[id] - top) / f64::from(self.temperature)).exp();
        let mut ids: Vec<usize> = (0..logits.len()).collect();
        ids.sort_by(|a, b| weight(*b).total_cmp(&weight(*a)).then(a.cmp(b)));
        if self.top_k > 0 {
            ids.truncate(self.top_k);
        }
        let enough = f64::from(self.top_p) * ids.iter().map(|id| weight(*id)).sum::<f64>();
        let (mut sum, mut kept) = (0.0, 0);
        while kept < ids.len() && (kept == 0 || self.top_p >= 1.0 || sum < enough) {
            sum += weight(ids[kept]);
            kept += 1;
        }
        ids.truncate(kept);
        ids.retain(|id| weight(*id) >= f64::from(self.min_p));
        ids.sort_unstable();
        let mut left = self.uniform * ids.iter().map(|id| weight(*id)).sum::<f64>();
        for id in &ids {
            left -= weight(*id);
            if left < 0.0 {
                return *id;
            }
        }
        ids.last().copied().unwrap_or(0)
    }
}

impl StreamOps for Naive {
    fn open_streams(&self, model: &StreamModel<'_>) -> Result<Option<Box<dyn Any + Send>>> {
        let blocks = model.blocks.iter().zip(&model.thresholds);
        let empty = || model.blocks.iter().map(|_| Past::default()).collect();
        Ok(Some(Box::new(NaiveStreams {
            shape: model.shape,
            embeddings: Weights::new(model.embeddings)?,
            blocks: blocks.map(|(b, t)| Block::new(b, t.clone())).collect::<Result<_>>()?,
            norm: real(model.norm)?.to_vec(),
            head: Weights::new(model.head)?,
            slots: (0..model.slots).map(|_| empty()).collect(),
            logits: Vec::new(),
            draws: Vec::new(),
        })))
    }

    fn enter_stream(
        &self,
        state: &mut dyn Any,
        slot: usize,
        len: usize,
        past: &mut [StreamPast<'_>],
    ) -> Result<()> {
        let streams: &mut NaiveStreams = stream_state(state)?;
        streams.slots[slot] =
            past.iter().map(|past| Past::new(past, len)).collect::<Result<_>>()?;
        Ok(())
    }

    fn extend_stream(
        &self,
        _state: &mut dyn Any,
        _slot: usize,
        _keys: &mut [&mut dyn PagedKeys],
    ) -> Result<()> {
        Ok(())
    }

    fn begin_stream_step(&self, state: &mut dyn Any, rows: &[StreamRow]) -> Result<()> {
        let streams: &mut NaiveStreams = stream_state(state)?;
        streams.logits.clear();
        streams.draws = rows.iter().map(|row| row.draw).collect();
        for row in rows {
            let layers = &mut streams.slots[row.slot];
            if layers.first().is_none_or(|past| past.k.len() != row.position) {
                let detail = format!("slot {} is not at position {}", row.slot, row.position);
                return Err(Error::argument("step", detail));
            }
            let mut h = streams.embeddings.row(row.token as usize).to_vec();
            for (block, past) in streams.blocks.iter().zip(layers) {
                block.run(&mut h, past, row.position, &streams.shape);
            }
            let x = normed(&h, &streams.norm, streams.shape.norm_eps);
            streams.logits.push(streams.head.times(&x));
        }
        Ok(())
    }

    fn finish_stream_step(&self, state: &mut dyn Any) -> Result<Vec<Choice>> {
        let streams: &mut NaiveStreams = stream_state(state)?;
        Ok(streams.logits.iter().zip(&streams.draws).map(|(l, draw)| choose(l, draw)).collect())
    }

    fn stream_logits(&self, state: &mut dyn Any, row: usize) -> Result<Vec<f32>> {
        let streams: &mut NaiveStreams = stream_state(state)?;
        Ok(streams.logits[row].iter().map(|x| *x as f32).collect())
    }

    fn stream_sums(&self, state: &mut dyn Any, slot: usize) -> Result<Vec<f64>> {
        let streams: &mut NaiveStreams = stream_state(state)?;
        let last = |past: &Past| past.sums.last().cloned().unwrap_or_default();
        Ok(streams.slots[slot].iter().flat_map(last).collect())
    }

    fn rows_product(&self, x: &Tensor, w: &Tensor) -> Result<Option<Tensor>> {
        self.linear_fwd(x, w, None).map(Some)
    }
}
