//! Wrong operands of ops along the time axis.

use std::sync::Arc;

use super::{Calls, Operand, real};
use crate::{
    Acp, Activation, AttentionInputs, AttentionOut, AttentionSpec, ConvInputs, ConvSpec,
    FullSequence, HeadInputs, HeadSpec, L2Norm, LogitBound, Mask, PathInputs, ReflectionInputs,
    Result, Rope, ScanExtras, ScanInputs, ScanSpec, Segment, Segments, StateUpdate, Tensor,
    WallBlock, WallInputs,
};

pub(super) fn calls(calls: &mut Calls<'_>) -> Result<()> {
    heads(calls)?;
    attention(calls)?;
    attention_options(calls)?;
    path(calls)?;
    wall(calls)?;
    conv(calls)?;
    scan(calls)
}

/// Segments that do not fit six rows.
fn too_long() -> Result<Vec<Segments>> {
    let far = |q_start, q_len, k_start, k_len| {
        Segments::new(vec![Segment { q_start, q_len, k_start, k_len }])
    };
    Ok(vec![
        Segments::uniform(1, 7),
        Segments::uniform(2, 4),
        Segments::uniform(2, usize::MAX),
        far(6, 1, 0, 1)?,
        far(usize::MAX - 1, 1, 0, 1)?,
    ])
}

fn heads(calls: &mut Calls<'_>) -> Result<()> {
    fn inputs(t: &[Tensor]) -> HeadInputs<'_> {
        HeadInputs { u: &t[0], shift: Some(&t[1]), prev: Some(&t[2]), norm: Some(&t[3]) }
    }
    let spec = HeadSpec {
        heads: 2,
        head_dim: 8,
        norm_eps: 1e-6,
        rope: Some(Rope::new(10_000.0)),
        segments: Segments::uniform(2, 3),
    };
    let operands = [
        real("u", &[6, 16], &[0, 1]),
        real("shift", &[6, 2], &[0, 1]),
        real("prev", &[2, 16], &[0, 1]),
        real("norm", &[16], &[0]),
        real("dy", &[6, 16], &[0, 1]),
    ];
    calls.op("prepare_heads_fwd", &operands[..4], |b, t| b.prepare_heads_fwd(&inputs(t), &spec))?;
    calls
        .op("prepare_heads_bwd", &operands, |b, t| b.prepare_heads_bwd(&t[4], &inputs(t), &spec))?;
    let (b, u) = (calls.device.backend(), calls.tensor(&[6, 16])?);
    let inputs = HeadInputs { u: &u, shift: None, prev: None, norm: None };
    let mut wrong: Vec<HeadSpec> = [(1, 8), (0, 8), (2, 0), (16, 1), (usize::MAX / 8 + 3, 8)]
        .map(|(heads, head_dim)| HeadSpec { heads, head_dim, ..spec.clone() })
        .into();
    wrong.extend(too_long()?.into_iter().map(|segments| HeadSpec { segments, ..spec.clone() }));
    for spec in wrong {
        let result = b.prepare_heads_fwd(&inputs, &spec);
        calls.must_fail(|| format!("prepare_heads_fwd with {spec:?}"), result);
    }
    Ok(())
}

fn attention_inputs(t: &[Tensor]) -> AttentionInputs<'_> {
    AttentionInputs { q: &t[0], k: &t[1], v: &t[2], log_gates: Some(&t[3]) }
}

fn attention_spec() -> AttentionSpec {
    AttentionSpec { kv_heads: 1, ..AttentionSpec::causal(2, 8, Segments::uniform(2, 3)) }
}

fn attention(calls: &mut Calls<'_>) -> Result<()> {
    let (inputs, spec) = (attention_inputs, attention_spec());
    let tiles = Operand { content: super::Content::Ids(9), ..real("tiles", &[2, 4], &[0, 1]) };
    let operands = [
        real("q", &[6, 16], &[1]),
        real("k", &[6, 8], &[0, 1]),
        real("v", &[6, 8], &[0, 1]),
        real("log_gates", &[6, 2], &[0, 1]),
        real("d_out", &[6, 16], &[0, 1]),
        real("o", &[6, 16], &[0, 1]),
        real("lse", &[6, 2], &[0, 1]),
        real("sinks", &[2], &[0]),
    ];
    calls.op("attention_fwd", &operands[..4], |b, t| b.attention_fwd(&inputs(t), &spec))?;
    calls
        .op("stick_breaking_fwd", &operands[..4], |b, t| b.stick_breaking_fwd(&inputs(t), &spec))?;
    let counts = tiles.on(calls.device, tiles.dims)?;
    let out =
        |t: &[Tensor]| AttentionOut { o: t[5].clone(), lse: t[6].clone(), tiles: counts.clone() };
    calls.op("attention_bwd", &operands[..7], |b, t| {
        b.attention_bwd(&t[4], &inputs(t), &out(t), &spec)
    })?;
    calls.op("stick_breaking_bwd", &operands[..7], |b, t| {
        b.stick_breaking_bwd(&t[4], &inputs(t), &out(t), &spec)
    })?;
    calls.op("sink_attention_bwd", &operands[..7], |b, t| {
        let sinks = real("sinks", &[2], &[]).on(t[4].device(), &[2])?;
        b.sink_attention_bwd(&t[4], &inputs(t), &out(t), &sinks, &spec)
    })?;
    let sinks = [operands[5], operands[6], operands[7], operands[4]];
    calls.op("sink_fwd", &sinks[..3], |b, t| b.sink_fwd(&t[0], &t[1], &t[2]))?;
    calls.op("sink_bwd", &sinks, |b, t| b.sink_bwd(&t[3], &t[0], &t[1], &t[2]))
}

/// Head dims, head counts, windows, bounds, tolerances and segments out of range.
fn attention_options(calls: &mut Calls<'_>) -> Result<()> {
    let (spec, b) = (attention_spec(), calls.device.backend());
    let acp = |log_tolerance, bound| Acp::On { log_tolerance, bound };
    let mut wrong: Vec<AttentionSpec> =
        [(2, 1, 0), (2, 1, 12), (2, 1, 264), (0, 1, 8), (2, 0, 8), (3, 2, 8)]
            .map(|(heads, kv_heads, head_dim)| AttentionSpec {
                heads,
                kv_heads,
                head_dim,
                ..spec.clone()
            })
            .into();
    wrong.push(AttentionSpec { window: Some(0), ..spec.clone() });
    wrong.push(AttentionSpec { heads: usize::MAX / 8 + 3, ..spec.clone() });
    for log_tolerance in [1.0, f32::NAN] {
        wrong.push(AttentionSpec { acp: acp(log_tolerance, LogitBound::Norms), ..spec.clone() });
    }
    let (w, short) = (calls.tensor(&[16])?, calls.tensor(&[7])?);
    let far = match calls.others.first() {
        Some(other) => real("", &[16], &[]).on(other, &[16])?,
        None => short.clone(),
    };
    let bounds = [(&short, &short), (&w, &w), (&far, &calls.tensor(&[8])?)];
    for (q, k) in bounds.map(|(q, k)| (q.clone(), k.clone())) {
        wrong.push(AttentionSpec { acp: acp(-1.0, LogitBound::QkNorm { q, k }), ..spec.clone() });
    }
    let given = LogitBound::Given(calls.tensor(&[2, 3])?);
    wrong.push(AttentionSpec { acp: acp(-1.0, given), ..spec.clone() });
    wrong
        .extend(too_long()?.into_iter().map(|segments| AttentionSpec { segments, ..spec.clone() }));
    let keys = Segment { q_start: 0, q_len: 1, k_start: 2, k_len: 5 };
    wrong.push(AttentionSpec { segments: Segments::new(vec![keys])?, ..spec.clone() });
    for (gate_sums, keys, bounds) in [(3, 2, 0), (4, 1, 0), (4, 2, 3)] {
        let (gate_sums, bounds) = (vec![0.0; gate_sums], vec![0.0; bounds]);
        let full = Arc::new(FullSequence { gate_sums, keys: vec![9; keys], bounds });
        wrong.push(AttentionSpec { full_sequence: Some(full), ..spec.clone() });
    }
    let tensors = [&[6, 16][..], &[6, 8], &[6, 8], &[6, 2]];
    let tensors: Vec<Tensor> =
        tensors.into_iter().map(|dims| calls.tensor(dims)).collect::<Result<_>>()?;
    let inputs = attention_inputs(&tensors);
    for spec in &wrong {
        let name = |op: &str| format!("{op} with {spec:?}");
        calls.must_fail(|| name("attention_fwd"), b.attention_fwd(&inputs, spec));
        calls.must_fail(|| name("stick_breaking_fwd"), b.stick_breaking_fwd(&inputs, spec));
    }
    let both_ways = AttentionSpec { mask: Mask::Bidirectional, ..spec };
    let result = b.stick_breaking_fwd(&inputs, &both_ways);
    calls.must_fail(|| "stick_breaking_fwd with a bidirectional mask".into(), result);
    Ok(())
}

fn path(calls: &mut Calls<'_>) -> Result<()> {
    fn inputs(t: &[Tensor]) -> PathInputs<'_> {
        PathInputs { q: &t[0], k: &t[1], v: &t[2], u: &t[3], log_gates: Some(&t[4]) }
    }
    let spec = attention_spec();
    let tiles = Operand { content: super::Content::Ids(9), ..real("tiles", &[2, 4], &[0, 1]) };
    let operands = [
        real("q", &[6, 16], &[1]),
        real("k", &[6, 8], &[0, 1]),
        real("v", &[6, 8], &[0, 1]),
        real("u", &[6, 8], &[0, 1]),
        real("log_gates", &[6, 2], &[0, 1]),
        real("d_out", &[6, 16], &[0, 1]),
        real("o", &[6, 16], &[0, 1]),
        real("lse", &[6, 2], &[0, 1]),
    ];
    calls
        .op("path_attention_fwd", &operands[..5], |b, t| b.path_attention_fwd(&inputs(t), &spec))?;
    let counts = tiles.on(calls.device, tiles.dims)?;
    calls.op("path_attention_bwd", &operands, |b, t| {
        let out = AttentionOut { o: t[6].clone(), lse: t[7].clone(), tiles: counts.clone() };
        b.path_attention_bwd(&t[5], &inputs(t), &out, &spec)
    })?;
    let full = FullSequence { gate_sums: vec![0.0; 4], keys: vec![9; 2], bounds: Vec::new() };
    let mut wrong = vec![
        AttentionSpec { mask: Mask::Bidirectional, ..spec.clone() },
        AttentionSpec { window: Some(3), ..spec.clone() },
        AttentionSpec { full_sequence: Some(Arc::new(full)), ..spec.clone() },
    ];
    wrong
        .extend(too_long()?.into_iter().map(|segments| AttentionSpec { segments, ..spec.clone() }));
    let b = calls.device.backend();
    let tensors = [&[6, 16][..], &[6, 8], &[6, 8], &[6, 8], &[6, 2]];
    let tensors: Vec<Tensor> =
        tensors.into_iter().map(|dims| calls.tensor(dims)).collect::<Result<_>>()?;
    for spec in &wrong {
        let result = b.path_attention_fwd(&inputs(&tensors), spec);
        calls.must_fail(|| format!("path_attention_fwd with {spec:?}"), result);
    }
    let wide = AttentionSpec::causal(1, 136, Segments::uniform(2, 3));
    let t = calls.tensor(&[6, 136])?;
    let operands = PathInputs { q: &t, k: &t, v: &t, u: &t, log_gates: None };
    calls.must_fail(
        || "path_attention_fwd with heads of 136".into(),
        b.path_attention_fwd(&operands, &wide),
    );
    let operands =
        [real("y", &[3, 6], &[0, 1]), real("z", &[3, 2], &[0]), real("du", &[3, 6], &[0, 1])];
    let reflection =
        |t: &[Tensor], eps| b.reflection_fwd(&ReflectionInputs { y: &t[0], z: &t[1], eps });
    calls.op("reflection_fwd", &operands[..2], |b, t| {
        b.reflection_fwd(&ReflectionInputs { y: &t[0], z: &t[1], eps: 1e-6 })
    })?;
    calls.op("reflection_bwd", &operands, |b, t| {
        b.reflection_bwd(&t[2], &ReflectionInputs { y: &t[0], z: &t[1], eps: 1e-6 })
    })?;
    let tensors = [calls.tensor(&[3, 6])?, calls.tensor(&[3, 2])?];
    for eps in [0.0, f32::NAN] {
        calls.must_fail(|| format!("reflection_fwd with eps {eps}"), reflection(&tensors, eps));
    }
    Ok(())
}

fn wall(calls: &mut Calls<'_>) -> Result<()> {
    fn inputs(t: &[Tensor]) -> WallInputs<'_> {
        let (log_decays, log_gates) = (&t[3], Some(&t[4]));
        WallInputs { q: &t[0], k: &t[1], v: &t[2], log_decays, log_gates }
    }
    let spec = attention_spec();
    let operands = [
        real("q", &[6, 16], &[1]),
        real("k", &[6, 8], &[0, 1]),
        real("v", &[6, 8], &[0, 1]),
        real("log_decays", &[6, 16], &[0, 1]),
        real("log_gates", &[6, 2], &[0, 1]),
        real("d_out", &[6, 16], &[0, 1]),
        real("o", &[6, 16], &[0, 1]),
        real("lse", &[6, 2], &[0, 1]),
    ];
    calls.op("wall_attention_fwd", &operands[..5], |b, t| {
        b.wall_attention_fwd(&inputs(t), &[], &spec)
    })?;
    let tiles = Operand { content: super::Content::Ids(9), ..real("tiles", &[2, 4], &[0, 1]) };
    let counts = tiles.on(calls.device, tiles.dims)?;
    calls.op("wall_attention_bwd", &operands, |b, t| {
        let out = AttentionOut { o: t[6].clone(), lse: t[7].clone(), tiles: counts.clone() };
        b.wall_attention_bwd(&t[5], &inputs(t), &out, &spec)
    })?;
    let closed = [real("k", &[64, 8], &[0]), real("log_decays", &[64, 16], &[0, 1])];
    calls.op("wall_close_block", &closed, |b, t| b.wall_close_block(&t[0], &t[1], 8))?;
    let block = [
        real("past k", &[64, 16], &[0, 1]),
        real("past v", &[64, 8], &[0, 1]),
        real("past decay", &[1, 16], &[0, 1]),
        real("past log_gates", &[64, 2], &[0, 1]),
    ];
    let own: Vec<Tensor> = operands[..5]
        .iter()
        .map(|operand| operand.on(calls.device, operand.dims))
        .collect::<Result<_>>()?;
    calls.op("wall_attention_fwd with past blocks", &block, |b, t| {
        let block = WallBlock { k: &t[0], v: &t[1], decay: &t[2], log_gates: Some(&t[3]) };
        b.wall_attention_fwd(&inputs(&own), &[vec![block], Vec::new()], &spec)
    })?;
    let b = calls.device.backend();
    let both_ways = AttentionSpec { mask: Mask::Bidirectional, ..spec.clone() };
    let result = b.wall_attention_fwd(&inputs(&own), &[], &both_ways);
    calls.must_fail(|| "wall_attention_fwd with a bidirectional mask".into(), result);
    let result = b.wall_attention_fwd(&inputs(&own), &[Vec::new()], &spec);
    calls.must_fail(|| "wall_attention_fwd with the past of one of two segments".into(), result);
    Ok(())
}

fn conv(calls: &mut Calls<'_>) -> Result<()> {
    fn inputs(t: &[Tensor]) -> ConvInputs<'_> {
        ConvInputs { x: &t[0], weight: &t[1], bias: Some(&t[2]), before: Some(&t[3]) }
    }
    let spec = ConvSpec {
        activation: Some(Activation::Silu),
        l2_norm: Some(L2Norm { width: 4, eps: 1e-6 }),
        segments: Segments::uniform(2, 3),
    };
    let operands = [
        real("x", &[6, 8], &[1]),
        Operand { fixed_rank: false, ..real("weight", &[8, 3], &[0, 1]) },
        real("bias", &[8], &[0]),
        real("before", &[4, 8], &[0, 1]),
        real("dy", &[6, 8], &[0, 1]),
    ];
    calls.op("short_conv_fwd", &operands[..4], |b, t| b.short_conv_fwd(&inputs(t), &spec))?;
    calls.op("short_conv_bwd", &operands, |b, t| b.short_conv_bwd(&t[4], &inputs(t), &spec))?;
    let wider = [
        real("x", &[6, 10], &[]),
        Operand { fixed_rank: false, ..real("weight", &[8, 3], &[0, 1]) },
        real("bias", &[8], &[0]),
        real("before", &[4, 8], &[0, 1]),
        real("first dy", &[6, 4], &[0, 1]),
        real("last dy", &[6, 4], &[0, 1]),
        real("other dy", &[6, 2], &[0, 1]),
    ];
    calls.op("short_conv_split_fwd", &wider[..4], |b, t| {
        b.short_conv_split_fwd(&inputs(t), &[4, 4], &spec)
    })?;
    calls.op("short_conv_split_bwd", &wider, |b, t| {
        b.short_conv_split_bwd(&t[4..], &inputs(t), &[4, 4], &spec)
    })?;
    let (b, x, weight) = (calls.device.backend(), calls.tensor(&[6, 8])?, calls.tensor(&[8, 3])?);
    for widths in [&[4][..], &[4, 5], &[2, 6], &[8, 0], &[usize::MAX, 9], &[]] {
        let inputs = ConvInputs { x: &x, weight: &weight, bias: None, before: None };
        let result = b.short_conv_split_fwd(&inputs, widths, &spec);
        calls.must_fail(|| format!("short_conv_split_fwd into {widths:?}"), result);
    }
    let inputs = ConvInputs { x: &x, weight: &weight, bias: None, before: None };
    for count in [0, 1, 3] {
        let result =
            b.short_conv_split_bwd(&vec![calls.tensor(&[6, 4])?; count], &inputs, &[4, 4], &spec);
        calls.must_fail(|| format!("short_conv_split_bwd of {count} gradients"), result);
    }
    let mut wrong: Vec<ConvSpec> = [0, 3, 16]
        .map(|width| ConvSpec { l2_norm: Some(L2Norm { width, eps: 1e-6 }), ..spec.clone() })
        .into();
    wrong.extend(too_long()?.into_iter().map(|segments| ConvSpec { segments, ..spec.clone() }));
    for spec in wrong {
        let result = b.short_conv_fwd(&inputs, &spec);
        calls.must_fail(|| format!("short_conv_fwd with {spec:?}"), result);
    }
    Ok(())
}

fn scan(calls: &mut Calls<'_>) -> Result<()> {
    fn inputs(t: &[Tensor]) -> ScanInputs<'_> {
        let (log_decay, write, skip) = (Some(&t[3]), Some(&t[4]), Some(&t[5]));
        ScanInputs { q: &t[0], k: &t[1], v: &t[2], log_decay, write, skip, state: Some(&t[6]) }
    }
    let spec = ScanSpec {
        heads: 2,
        key_heads: 1,
        key_dim: 4,
        value_dim: 8,
        scale: 0.5,
        update: StateUpdate::Delta,
        segments: Segments::uniform(2, 3),
    };
    let extras = ScanExtras { state: true, backward: true };
    let operands = [
        real("q", &[6, 4], &[0, 1]),
        real("k", &[6, 4], &[0, 1]),
        real("v", &[6, 16], &[0, 1]),
        real("log_decay", &[6, 2], &[0, 1]),
        real("write", &[6, 2], &[0, 1]),
        real("skip", &[2], &[0]),
        real("state", &[2, 64], &[0, 1]),
        real("d_out", &[6, 16], &[0, 1]),
        real("d_state", &[2, 64], &[0, 1]),
    ];
    calls.op("scan_fwd", &operands[..7], |b, t| b.scan_fwd(&inputs(t), &spec, extras))?;
    calls.op("scan_bwd", &operands, |b, t| {
        b.scan_bwd(&t[7], Some(&t[8]), &inputs(t), None, &spec)
    })?;
    let b = calls.device.backend();
    let shapes = [&[6, 4][..], &[6, 4], &[6, 16], &[6, 2], &[6, 2], &[2], &[2, 64], &[6, 16]];
    let t: Vec<Tensor> =
        shapes.into_iter().map(|dims| calls.tensor(dims)).collect::<Result<_>>()?;
    if let Some(saved) = b.scan_fwd(&inputs(&t), &spec, extras)?.saved {
        let result = b.scan_bwd(&t[7], None, &inputs(&t), Some(&calls.tensor(&[1, 3])?), &spec);
        calls.must_fail(|| "scan_bwd with saved states of another call".into(), result);
        b.scan_bwd(&t[7], None, &inputs(&t), Some(&saved), &spec)?;
    }
    let dims = [
        (0, 1, 4, 8),
        (2, 0, 4, 8),
        (3, 2, 4, 8),
        (2, 1, 0, 8),
        (2, 1, 4, 0),
        (usize::MAX, 1, 4, 8),
        (2, 1, usize::MAX / 2 + 3, 8),
    ];
    let mut wrong: Vec<ScanSpec> = dims
        .map(|(heads, key_heads, key_dim, value_dim)| ScanSpec {
            heads,
            key_heads,
            key_dim,
            value_dim,
            ..spec.clone()
        })
        .into();
    wrong.extend(too_long()?.into_iter().map(|segments| ScanSpec { segments, ..spec.clone() }));
    for spec in wrong {
        let result = b.scan_fwd(&inputs(&t), &spec, extras);
        calls.must_fail(|| format!("scan_fwd with {spec:?}"), result);
    }
    let channels = calls.tensor(&[6, 9])?;
    let result =
        b.scan_fwd(&ScanInputs { log_decay: Some(&channels), ..inputs(&t) }, &spec, extras);
    calls.must_fail(|| "scan_fwd with decays of 9 channels".into(), result);
    Ok(())
}
