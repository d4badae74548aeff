//! Wrong operands of paged attention, of decode steps in slots and of collectives.

use std::any::Any;

use super::{Calls, Content, Operand, real};
use crate::cases::CasePages;
use crate::{
    Activation, AttentionShape, AttentionWeights, DecodeAttention, DecodeBlock, DecodeMixer,
    DecodeMlp, DecodeProjection, DecodeRow, DecodeWeights, Device, Error, LayerPast, NewKeys, Page,
    PageShape, PagedKeys, PagedSpec, RankInfo, Result, Rope, RowToken, Segment, Segments, Slab,
    SlotDecodeOps, Tensor,
};

pub(super) fn calls(calls: &mut Calls<'_>) -> Result<()> {
    gates(calls)?;
    pages(calls)?;
    attention(calls)?;
    slots(calls)?;
    peers(calls);
    Ok(())
}

const SHAPE: PageShape = PageShape { kv_heads: 2, head_dim: 8, group: 2, transition: 0 };

/// Reserved pages for `seen` keys.
fn pages_of(shape: PageShape, seen: usize, device: &Device) -> Result<CasePages> {
    let mut pages = CasePages::new(shape);
    pages.reserve(seen, device)?;
    Ok(pages)
}

fn gates(calls: &mut Calls<'_>) -> Result<()> {
    let Some(ops) = calls.device.backend().caps().paged else { return Ok(()) };
    let log_gates = [real("log_gates", &[3, 2], &[])];
    calls.op("gate_totals", &log_gates, |_, t| ops.gate_totals(&[&t[0]], &[0..2, 2..3]))?;
    let gates = calls.tensor(&[3, 2])?;
    for (start, end) in [(0, 4), (2, 1), (4, 4), (0, usize::MAX), (usize::MAX, usize::MAX)] {
        let range = start..end;
        let result = ops.gate_totals(&[&gates], std::slice::from_ref(&range));
        calls.must_fail(|| format!("gate_totals of rows {range:?}"), result);
    }
    Ok(())
}

fn pages(calls: &mut Calls<'_>) -> Result<()> {
    let (device, others) = (calls.device, calls.others);
    let Some(ops) = device.backend().caps().paged else { return Ok(()) };
    let operands = [
        real("k", &[70, 16], &[0, 1]),
        real("v", &[70, 16], &[0, 1]),
        real("log_gates", &[70, 4], &[0, 1]),
    ];
    let write = |t: &[Tensor], row: usize, count: usize, first: usize| {
        let new =
            NewKeys { k: &t[0], v: &t[1], transitions: None, log_gates: Some(&t[2]), row, count };
        ops.write_pages(&new, &mut pages_of(SHAPE, 70, device)?, first)
    };
    calls.op("write_pages", &operands, |_, t| write(t, 0, 70, 0))?;
    let make = |dims| calls.tensor(dims);
    let t = [make(&[70, 16])?, make(&[70, 16])?, make(&[70, 4])?];
    for (row, count, first) in
        [(1, 70, 0), (0, 70, 1), (0, 71, 0), (70, 1, 0), (usize::MAX, 2, 0), (0, 2, usize::MAX)]
    {
        let name = || format!("write_pages of {count} rows from {row} to position {first}");
        calls.must_fail(name, write(&t, row, count, first));
    }
    if device.backend().caps().gates_in_pages() {
        let new =
            NewKeys { k: &t[0], v: &t[1], transitions: None, log_gates: None, row: 0, count: 70 };
        let result = ops.write_pages(&new, &mut pages_of(SHAPE, 70, device)?, 0);
        calls.must_fail(|| "write_pages without gates".into(), result);
    }
    let slab = |shape: PageShape, device: &Device| Slab::new(&shape, 2, device);
    let (own, wide) = (slab(SHAPE, device)?, slab(PageShape { head_dim: 16, ..SHAPE }, device)?);
    let ungated = slab(PageShape { group: 0, ..SHAPE }, device)?;
    let mut wrong = vec![(&own, 2, &own, 0), (&own, 0, &own, 2), (&own, usize::MAX, &own, 0)];
    wrong.extend([(&wide, 0, &own, 0), (&own, 0, &wide, 0), (&own, 0, &ungated, 1)]);
    let foreign = others.iter().map(|other| slab(SHAPE, other)).collect::<Result<Vec<_>>>()?;
    wrong.extend(foreign.iter().map(|other| (other, 0, &own, 1)));
    wrong.extend(foreign.iter().map(|other| (&own, 0, other, 1)));
    for (from, at, to, place) in wrong {
        let (from, to) = (Page { slab: from, place: at }, Page { slab: to, place });
        calls.must_fail(|| format!("copy_page {from:?} to {to:?}"), ops.copy_page(from, to));
    }
    Ok(())
}

fn attention(calls: &mut Calls<'_>) -> Result<()> {
    let device = calls.device;
    let Some(ops) = device.backend().caps().paged else { return Ok(()) };
    let filled = |shape: PageShape| -> Result<CasePages> {
        let mut pages = pages_of(shape, 70, device)?;
        let rows = |width: usize| device.full([70, width], -0.25);
        let (k, gates) =
            (rows(shape.kv_heads * shape.head_dim)?, rows(shape.kv_heads * shape.group)?);
        let new =
            NewKeys { k: &k, v: &k, transitions: None, log_gates: Some(&gates), row: 0, count: 70 };
        ops.write_pages(&new, &mut pages, 0)?;
        Ok(pages)
    };
    let own = filled(SHAPE)?;
    let last =
        |q_start, q_len, k_len| Segments::new(vec![Segment { q_start, q_len, k_start: 0, k_len }]);
    let spec = PagedSpec {
        weights: AttentionWeights::Softmax,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        scale: 0.5,
        window: None,
        thresholds: None,
        sinks: None,
        reflected: false,
        segments: last(0, 3, 70)?,
    };
    let operands = [real("q", &[3, 32], &[1]), real("sinks", &[4], &[0])];
    calls.op("paged_attention", &operands, |_, t| {
        let spec = PagedSpec { sinks: Some(t[1].clone()), ..spec.clone() };
        ops.paged_attention(&t[0], &[&own], &spec)
    })?;
    let (q, sinks) = (calls.tensor(&[3, 32])?, calls.tensor(&[4])?);
    let heads = [(0, 2, 8), (4, 0, 8), (3, 2, 8), (4, 2, 0), (4, 2, 12), (2, 2, 16)];
    let mut wrong: Vec<PagedSpec> = heads
        .map(|(heads, kv_heads, head_dim)| PagedSpec { heads, kv_heads, head_dim, ..spec.clone() })
        .into();
    wrong.push(PagedSpec { window: Some(0), ..spec.clone() });
    wrong.push(PagedSpec { thresholds: Some(vec![0.0; 3].into()), ..spec.clone() });
    let stick = AttentionWeights::StickBreaking;
    wrong.push(PagedSpec { weights: stick, sinks: Some(sinks), ..spec.clone() });
    for segments in
        [last(1, 3, 70)?, last(0, 3, 69)?, last(0, 3, 71)?, last(usize::MAX - 1, 1, 70)?]
    {
        wrong.push(PagedSpec { segments, ..spec.clone() });
    }
    for spec in wrong {
        let result = ops.paged_attention(&q, &[&own], &spec);
        calls.must_fail(|| format!("paged_attention with {spec:?}"), result);
    }
    let other = filled(PageShape { kv_heads: 1, ..SHAPE })?;
    for keys in [&[][..], &[&other as &dyn PagedKeys], &[&own, &own]] {
        let result = ops.paged_attention(&q, keys, &spec);
        calls.must_fail(|| format!("paged_attention over {} other pages", keys.len()), result);
    }
    Ok(())
}

/// Width, heads, key heads, head dim, inner width and vocabulary of the model in slots.
const MODEL: [usize; 6] = [128, 2, 1, 64, 64, 32];
const SLOTS: usize = 2;
const SLOT_PAGES: PageShape = PageShape { kv_heads: 1, head_dim: 64, group: 2, transition: 0 };

const fn matrix(name: &'static str, dims: &'static [usize]) -> Operand {
    Operand { content: Content::Packable, ..real(name, dims, &[0, 1]) }
}

/// The tensors of the model in slots.
fn tensors() -> [Operand; 21] {
    [
        real("embeddings", &[32, 128], &[1]),
        Operand { fixed: &[1], ..matrix("head", &[32, 128]) },
        real("norm", &[128], &[0]),
        real("mixer norm", &[128], &[0]),
        real("MLP norm", &[128], &[0]),
        matrix("gate_up", &[128, 128]),
        matrix("down", &[128, 64]),
        matrix("q", &[128, 128]),
        matrix("k", &[64, 128]),
        matrix("v", &[64, 128]),
        real("q bias", &[128], &[0]),
        real("q norm", &[128], &[0]),
        real("k norm", &[64], &[0]),
        real("k shift", &[1, 128], &[0, 1]),
        real("v shift", &[1, 128], &[0, 1]),
        real("gate", &[2, 128], &[0, 1]),
        real("gate bias", &[2], &[0]),
        matrix("output gate", &[128, 128]),
        real("output norm", &[128], &[0]),
        real("sinks", &[2], &[0]),
        matrix("o_proj", &[128, 128]),
    ]
}

/// The model of [`tensors`].
fn model(t: &[Tensor]) -> DecodeWeights {
    let [_, heads, kv_heads, head_dim, ..] = MODEL;
    let some = |n: usize| Some(t[n].clone());
    let projection =
        |n: usize, bias, shift, norm| DecodeProjection { weight: t[n].clone(), bias, shift, norm };
    let attention = DecodeAttention {
        shape: AttentionShape {
            heads,
            kv_heads,
            head_dim,
            window: None,
            rope: Some(Rope::new(10_000.0)),
            qk_eps: 1e-6,
            norm_eps: 1e-6,
            output_act: Activation::Sigmoid,
        },
        q: projection(7, some(10), None, some(11)),
        k: projection(8, None, some(13), some(12)),
        v: projection(9, None, some(14), None),
        gate: some(15).zip(some(16)),
        output_gate: some(17),
        output_norm: some(18),
        sinks: some(19),
        o_proj: t[20].clone(),
        thresholds: None,
    };
    let mlp = DecodeMlp {
        norm: t[4].clone(),
        gate_up: t[5].clone(),
        down: t[6].clone(),
        act: Activation::Silu,
    };
    let mixer = DecodeMixer::Attention(Box::new(attention));
    DecodeWeights {
        slots: SLOTS,
        max_context: 64,
        embeddings: t[0].clone(),
        blocks: vec![DecodeBlock { mixer_norm: t[3].clone(), mixer, mlp }],
        norm: t[2].clone(),
        norm_eps: 1e-6,
        head: t[1].clone(),
    }
}

/// A device that does not support a model returns no slots, which is a refusal.
fn open(ops: &dyn SlotDecodeOps, model: &DecodeWeights) -> Result<Box<dyn Any + Send>> {
    ops.open_slots(model)?.ok_or_else(|| Error::unsupported("device", "slots of this model"))
}

fn slots(calls: &mut Calls<'_>) -> Result<()> {
    let device = calls.device;
    let Some(ops) = device.backend().caps().slots else { return Ok(()) };
    calls.op("open_slots", &tensors(), |_, t| open(ops, &model(t)))?;
    let linear = [real("x", &[3, 64], &[1]), matrix("weight", &[32, 64])];
    let linear = [linear[0], Operand { fixed: &[1], ..linear[1] }];
    calls.op("batch_invariant_linear", &linear, |_, t| ops.batch_invariant_linear(&t[0], &t[1]))?;
    let own = tensors().map(|operand| operand.on(device, operand.dims));
    let own = model(&own.into_iter().collect::<Result<Vec<_>>>()?);
    for wrong in [
        DecodeWeights { slots: 0, ..own.clone() },
        DecodeWeights { max_context: 0, ..own.clone() },
        with_attention(&own, |layer| layer.shape.heads = 3),
        with_attention(&own, |layer| layer.shape.kv_heads = 0),
        with_attention(&own, |layer| layer.shape.head_dim = 32),
        with_attention(&own, |layer| layer.shape.window = Some(0)),
        with_attention(&own, |layer| layer.thresholds = Some(vec![0.0].into())),
    ] {
        calls.must_fail(|| format!("open_slots of {wrong:?}"), open(ops, &wrong));
    }
    let mut state = match open(ops, &own) {
        Err(Error::Unsupported { .. }) => return Ok(()),
        state => state?,
    };
    entries(calls, ops, &mut *state)?;
    steps(calls, ops, &mut *state)
}

/// The model with another attention layer.
fn with_attention(model: &DecodeWeights, change: impl Fn(&mut DecodeAttention)) -> DecodeWeights {
    let mut model = model.clone();
    for block in &mut model.blocks {
        let DecodeMixer::Attention(layer) = &mut block.mixer;
        change(layer);
    }
    model
}

/// The state of a layer.
fn past<'a>(
    pages: &'a mut CasePages,
    last_k: Option<&'a Tensor>,
    last_v: Option<&'a Tensor>,
    gate_sums: &'a [f64],
) -> LayerPast<'a> {
    LayerPast { pages, last_k, last_v, gate_sums }
}

/// A sequence of ten tokens enters slot 0, after all that must not.
fn entries(calls: &mut Calls<'_>, ops: &dyn SlotDecodeOps, state: &mut dyn Any) -> Result<()> {
    let (device, sums) = (calls.device, [-1.0, -1.0]);
    let raw = |device: &Device, width: usize| {
        device.zeros([1, width], device.backend().caps().activation_type)
    };
    let last = raw(device, 64)?;
    let mut narrow = vec![("of width 32", raw(device, 32)?)];
    narrow.push(("of integers", device.zeros([1, 64], crate::DType::I32)?));
    for other in calls.others {
        narrow.push(("on another device", raw(other, 64)?));
    }
    let own = || pages_of(SLOT_PAGES, 11, device);
    let good = Some(&last);
    for (slot, len) in [(SLOTS, 10), (usize::MAX, 10), (0, 64), (0, usize::MAX)] {
        let mut pages = own()?;
        let result = ops.enter_slot(state, slot, len, &mut [past(&mut pages, good, good, &sums)]);
        calls.must_fail(|| format!("enter_slot {slot} with {len} tokens"), result);
    }
    let mut wrong = vec![("without a raw key", None, good, &sums[..])];
    wrong.push(("without a raw value", good, None, &sums[..]));
    wrong.extend([
        ("with one gate sum", good, good, &sums[..1]),
        ("ungated", good, good, &sums[..0]),
    ]);
    wrong.extend(narrow.iter().map(|(what, last)| (*what, Some(last), good, &sums[..])));
    wrong.extend(narrow.iter().map(|(what, last)| (*what, good, Some(last), &sums[..])));
    for (what, k, v, sums) in wrong {
        let mut pages = own()?;
        let result = ops.enter_slot(state, 0, 10, &mut [past(&mut pages, k, v, sums)]);
        calls.must_fail(|| format!("enter_slot: raw rows or sums {what}"), result);
    }
    calls.must_fail(|| "enter_slot without layers".into(), ops.enter_slot(state, 0, 10, &mut []));
    for shape in [SHAPE, PageShape { group: 0, ..SLOT_PAGES }] {
        let mut pages = pages_of(shape, 11, device)?;
        let result = ops.enter_slot(state, 0, 10, &mut [past(&mut pages, good, good, &sums)]);
        calls.must_fail(|| format!("enter_slot with {shape:?}"), result);
        let result = ops.update_slot_pages(state, 0, &mut [&mut pages]);
        calls.must_fail(|| format!("update_slot_pages with {shape:?}"), result);
    }
    let mut pages = own()?;
    let result = ops.enter_slot(&mut (), 0, 10, &mut [past(&mut pages, good, good, &sums)]);
    calls.must_fail(|| "enter_slot of another device's slots".into(), result);
    let result = ops.update_slot_pages(state, SLOTS, &mut [&mut pages]);
    calls.must_fail(|| "update_slot_pages of a slot out of range".into(), result);
    let result = ops.update_slot_pages(state, 0, &mut []);
    calls.must_fail(|| "update_slot_pages without layers".into(), result);
    ops.enter_slot(state, 0, 10, &mut [past(&mut pages, good, good, &sums)])
}

/// Steps of slot 0, which has seen ten tokens.
fn steps(calls: &mut Calls<'_>, ops: &dyn SlotDecodeOps, state: &mut dyn Any) -> Result<()> {
    let row = DecodeRow { slot: 0, token: RowToken::Id(5), position: 10, draw: None };
    let mut wrong = vec![vec![row, row]];
    wrong.extend([SLOTS, usize::MAX].map(|slot| vec![DecodeRow { slot, ..row }]));
    let ids = [-1, 32, i32::MIN, i32::MAX].map(RowToken::Id);
    let tokens = ids.into_iter().chain([0, usize::MAX].map(RowToken::Sampled));
    wrong.extend(tokens.map(|token| vec![DecodeRow { token, ..row }]));
    let positions = [0, 9, 11, 64, usize::MAX];
    wrong.extend(positions.map(|position| vec![DecodeRow { position, ..row }]));
    for rows in wrong {
        let result = ops.begin_slot_step(state, &rows);
        calls.must_fail(|| format!("begin_slot_step with {rows:?}"), result);
    }
    calls.must_fail(|| "finish_slot_step before a step".into(), ops.finish_slot_step(state));
    ops.begin_slot_step(state, &[row])?;
    let next = |position, from| DecodeRow { token: RowToken::Sampled(from), position, ..row };
    let result = ops.begin_slot_step(state, &[next(11, 1)]);
    calls.must_fail(|| "begin_slot_step with a token of a missing row".into(), result);
    ops.begin_slot_step(state, &[next(11, 0)])?;
    let result = ops.begin_slot_step(state, &[next(12, 0)]);
    calls.must_fail(|| "begin_slot_step with two unfinished steps".into(), result);
    ops.finish_slot_step(state)?;
    ops.finish_slot_step(state)?;
    for row in [1, usize::MAX] {
        calls.must_fail(|| format!("slot_logits of row {row}"), ops.slot_logits(state, row));
    }
    let foreign: &mut dyn Any = &mut ();
    calls.must_fail(|| "a step of foreign slots".into(), ops.begin_slot_step(foreign, &[row]));
    calls.must_fail(|| "the end of a foreign step".into(), ops.finish_slot_step(foreign));
    calls.must_fail(|| "logits of foreign slots".into(), ops.slot_logits(foreign, 0));
    Ok(())
}

/// Ranks out of range, and collectives before the device is connected.
fn peers(calls: &mut Calls<'_>) {
    let Some(ops) = calls.device.backend().caps().peers else { return };
    let place = |rank, size| RankInfo { rank, size, shares_device: false, one_machine: true };
    for (rank, size, id) in [(0, 0, 128), (1, 1, 128), (usize::MAX, 2, 128), (0, 1, 0), (0, 1, 9)] {
        let result = ops.join_peers(place(rank, size), &vec![0; id]);
        calls.must_fail(|| format!("join_peers as rank {rank} of {size}, {id} bytes"), result);
    }
    calls.must_fail(|| "begin_reduce before join_peers".into(), ops.begin_reduce(&mut []));
    calls.must_fail(|| "begin_broadcast before join_peers".into(), ops.begin_broadcast(&mut []));
    calls.must_fail(|| "finish_collectives".into(), ops.finish_collectives());
}
