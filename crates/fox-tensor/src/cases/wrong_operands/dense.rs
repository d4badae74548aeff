//! Wrong operands of ops that treat rows independently.

use super::{Calls, Content, Operand, real};
use crate::{
    Activation, ChannelDecayInputs, Dropout, GateInputs, GatedNormInputs, HgrnGates, HgrnInputs,
    IGNORE_LABEL, LossInputs, NormInputs, NormSaved, Result, RowNumbers, Teacher, Tensor,
    TimeStepInputs, WeightFormat,
};

const ACT: Activation = Activation::Silu;

pub(super) fn calls(calls: &mut Calls<'_>) -> Result<()> {
    linear(calls)?;
    groups(calls)?;
    norms(calls)?;
    gates(calls)?;
    vocabulary(calls)
}

fn linear(calls: &mut Calls<'_>) -> Result<()> {
    let weight = Operand { content: Content::Packable, ..real("weight", &[5, 4], &[0, 1]) };
    let operands = [real("x", &[3, 4], &[1]), weight, real("bias", &[5], &[0])];
    calls.op("linear_fwd", &operands, |b, t| b.linear_fwd(&t[0], &t[1], Some(&t[2])))?;
    // Without a bias, and with many rows, whose products take another path.
    let many = [real("x", &[200, 4], &[1]), Operand { fixed: &[1], ..weight }];
    calls.op("linear_fwd", &many, |b, t| b.linear_fwd(&t[0], &t[1], None))?;
    for format in [WeightFormat::Bf16, WeightFormat::Int8] {
        let wide = [Operand { dims: &[3, 64], ..operands[0] }];
        let packed = calls.tensor(&[5, 64])?.packed(format);
        if let Ok(w) = packed {
            calls.op("linear_fwd (packed)", &wide, |b, t| b.linear_fwd(&t[0], &w, None))?;
        }
    }
    let operands = [
        real("dy", &[3, 5], &[1]),
        real("weight", &[5, 4], &[0, 1]),
        real("acc", &[3, 4], &[0, 1]),
    ];
    calls.op("linear_bwd_input", &operands, |b, t| {
        b.linear_bwd_input(&t[0], &t[1], Some(t[2].clone()))
    })?;
    let operands =
        [real("dy", &[3, 5], &[0, 1]), real("x", &[3, 4], &[0, 1]), real("acc", &[5, 4], &[0, 1])];
    calls.op("linear_bwd_weight", &operands, |b, t| {
        b.linear_bwd_weight(&t[0], &t[1], Some(t[2].clone()))
    })?;
    let operands = [real("dy", &[3, 5], &[1]), real("acc", &[5], &[0])];
    calls.op("linear_bwd_bias", &operands, |b, t| b.linear_bwd_bias(&t[0], Some(t[1].clone())))?;
    let operands = [real("x", &[3, 4], &[1]), Operand { fixed: &[0, 1], ..weight }];
    calls.op("linear_split_fwd", &operands, |b, t| b.linear_split_fwd(&t[0], &t[1], &[2, 3]))?;
    let operands = [
        real("first dy", &[3, 2], &[0, 1]),
        real("second dy", &[3, 3], &[0, 1]),
        real("weight", &[5, 4], &[0, 1]),
        real("acc", &[3, 4], &[0, 1]),
    ];
    calls.op("linear_split_bwd_input", &operands, |b, t| {
        b.linear_split_bwd_input(&t[..2], &t[2], Some(t[3].clone()))
    })?;
    let operands = [
        real("first dy", &[3, 2], &[0, 1]),
        real("second dy", &[3, 3], &[0, 1]),
        real("x", &[3, 4], &[0, 1]),
        real("acc", &[5, 4], &[0, 1]),
    ];
    calls.op("linear_split_bwd_weight", &operands, |b, t| {
        b.linear_split_bwd_weight(&t[..2], &t[2], Some(t[3].clone()))
    })?;
    if let Some(packing) = calls.device.backend().caps().packing {
        calls.op("pack_weight", &[real("weight", &[5, 64], &[])], |_, t| {
            packing.pack_weight(&t[0], WeightFormat::Bf16)
        })?;
    }
    let x = real("x", &[3, 8], &[1]);
    calls.op("split_columns", &[x], |b, t| b.split_columns(&t[0], &[5, 3]))?;
    let pair = [real("first", &[3, 4], &[0]), real("second", &[3, 2], &[0])];
    calls.op("join_columns", &pair, |b, t| b.join_columns(t))?;
    let (b, x) = (calls.device.backend(), calls.tensor(&[3, 8])?);
    calls.must_fail(|| "join_columns of nothing".into(), b.join_columns(&[]));
    for widths in [&[5, 4][..], &[7], &[usize::MAX, 9], &[]] {
        calls.must_fail(|| format!("split_columns into {widths:?}"), b.split_columns(&x, widths));
    }
    let w = calls.tensor(&[5, 8])?;
    for widths in [&[5, 4][..], &[4], &[5, 0], &[usize::MAX, 6], &[]] {
        let result = b.linear_split_fwd(&x, &w, widths);
        calls.must_fail(|| format!("linear_split_fwd into {widths:?}"), result);
    }
    let result = b.linear_split_bwd_input(&[], &w, None);
    calls.must_fail(|| "linear_split_bwd_input of nothing".into(), result);
    let result = b.linear_split_bwd_weight(&[], &x, None);
    calls.must_fail(|| "linear_split_bwd_weight of nothing".into(), result);
    Ok(())
}

fn groups(calls: &mut Calls<'_>) -> Result<()> {
    let Some(group) = calls.device.backend().caps().linear_group else { return Ok(()) };
    let weight = |name, dims| Operand { content: Content::Packable, ..real(name, dims, &[1]) };
    let operands = [real("x", &[3, 4], &[1]), weight("first", &[5, 4]), weight("second", &[2, 4])];
    calls
        .op("linear_group_fwd", &operands, |_, t| group.linear_group_fwd(&t[0], &[&t[1], &t[2]]))?;
    let operands = [
        real("first dy", &[3, 5], &[0, 1]),
        real("second dy", &[3, 2], &[0, 1]),
        real("first weight", &[5, 4], &[0, 1]),
        real("second weight", &[2, 4], &[0, 1]),
        real("acc", &[3, 4], &[0, 1]),
    ];
    calls.op("linear_group_bwd_input", &operands, |_, t| {
        group.linear_group_bwd_input(&[&t[0], &t[1]], &[&t[2], &t[3]], Some(t[4].clone()))
    })?;
    let operands = [
        real("first dy", &[3, 5], &[0]),
        real("second dy", &[3, 2], &[0, 1]),
        real("x", &[3, 4], &[0, 1]),
        real("second acc", &[2, 4], &[0, 1]),
    ];
    calls.op("linear_group_bwd_weight", &operands, |_, t| {
        let accs = vec![None, Some(t[3].clone())];
        group.linear_group_bwd_weight(&[&t[0], &t[1]], &t[2], accs)
    })?;
    let (x, w) = (calls.tensor(&[3, 4])?, calls.tensor(&[5, 4])?);
    let dy = calls.tensor(&[3, 5])?;
    let none = group.linear_group_bwd_input(&[], &[], None);
    calls.must_fail(|| "linear_group_bwd_input of nothing".into(), none);
    let fewer = group.linear_group_bwd_input(&[&dy, &dy], &[&w], None);
    calls.must_fail(|| "linear_group_bwd_input with a weight missing".into(), fewer);
    let none = group.linear_group_bwd_weight(&[], &x, Vec::new());
    calls.must_fail(|| "linear_group_bwd_weight of nothing".into(), none);
    let fewer = group.linear_group_bwd_weight(&[&dy, &dy], &x, vec![None]);
    calls.must_fail(|| "linear_group_bwd_weight with an accumulator missing".into(), fewer);
    Ok(())
}

fn norms(calls: &mut Calls<'_>) -> Result<()> {
    let recompute = calls.device.backend().caps().recompute;
    let operands =
        [real("h", &[3, 8], &[0, 1]), real("delta", &[3, 8], &[0, 1]), real("weight", &[8], &[0])];
    calls.op("add_rms_norm_fwd", &operands, |b, t| {
        let inputs = NormInputs { h: &t[0], delta: Some(&t[1]), w: &t[2], eps: 1e-6 };
        b.add_rms_norm_fwd(&inputs)
    })?;
    let operands = [
        real("dy", &[3, 8], &[0, 1]),
        real("dsum", &[3, 8], &[0, 1]),
        real("sum", &[3, 8], &[0, 1]),
        real("rstd", &[3], &[0]),
        real("weight", &[8], &[0]),
        real("dw_acc", &[8], &[0]),
    ];
    calls.op("add_rms_norm_bwd", &operands, |b, t| {
        let saved = NormSaved { sum: &t[2], rstd: &t[3], w: &t[4], eps: 1e-6 };
        b.add_rms_norm_bwd(&t[0], Some(t[1].clone()), &saved, Some(t[5].clone()))
    })?;
    if let Some(ops) = recompute {
        calls.op("add_rms_norm_bwd_with_output", &operands, |_, t| {
            let saved = NormSaved { sum: &t[2], rstd: &t[3], w: &t[4], eps: 1e-6 };
            let (dsum, acc) = (Some(t[1].clone()), Some(t[5].clone()));
            ops.add_rms_norm_bwd_with_output(&t[0], dsum, &saved, acc)
        })?;
    }
    fn gated(t: &[Tensor], groups: usize, gate_first: bool) -> GatedNormInputs<'_> {
        let (norm, gate) = (Some(&t[1]), Some(&t[2]));
        GatedNormInputs { x: &t[0], norm, gate, groups, eps: 1e-6, act: ACT, gate_first }
    }
    let operands = [
        real("x", &[3, 8], &[0, 1]),
        real("norm", &[8], &[0]),
        real("gate", &[3, 8], &[0, 1]),
        real("dy", &[3, 8], &[0, 1]),
    ];
    // Groups that share weights, and the gate first, of one group and of several, which take other paths.
    let shared = [operands[0], real("norm", &[4], &[0]), operands[2], operands[3]];
    for (operands, groups, first) in
        [(operands, 2, false), (shared, 2, false), (operands, 1, true), (operands, 2, true)]
    {
        calls.op("gated_norm_fwd", &operands[..3], |b, t| {
            b.gated_norm_fwd(&gated(t, groups, first))
        })?;
        calls.op("gated_norm_bwd", &operands, |b, t| {
            b.gated_norm_bwd(&t[3], &gated(t, groups, first))
        })?;
        if let Some(ops) = recompute {
            calls.op("gated_norm_bwd_with_output", &operands, |_, t| {
                ops.gated_norm_bwd_with_output(t[3].clone(), &gated(t, groups, first))
            })?;
        }
    }
    let b = calls.device.backend();
    let tensors = [calls.tensor(&[3, 8])?, calls.tensor(&[8])?, calls.tensor(&[3, 8])?];
    for groups in [0, 3, 16, usize::MAX] {
        let result = b.gated_norm_fwd(&gated(&tensors, groups, false));
        calls.must_fail(|| format!("gated_norm_fwd with {groups} groups"), result);
    }
    let operands = [real("x", &[3, 8], &[1]), real("dy", &[3, 4], &[0, 1])];
    calls.op("glu_fwd", &operands[..1], |b, t| b.glu_fwd(&t[0], ACT))?;
    calls.op("glu_bwd", &operands, |b, t| b.glu_bwd(&t[1], &t[0], ACT))?;
    if let Some(ops) = recompute {
        calls.op("glu_bwd_with_output", &operands, |_, t| {
            ops.glu_bwd_with_output(t[1].clone(), t[0].clone(), ACT)
        })?;
    }
    let half = Dropout { rate: 0.5, seed: 1, rows: RowNumbers::from(0) };
    calls.op("dropout", &[real("x", &[3, 8], &[])], |b, t| b.dropout(&t[0], &half))?;
    for rate in [1.0, -0.1, f32::NAN, f32::INFINITY] {
        let result = b.dropout(&tensors[0], &Dropout { rate, ..half });
        calls.must_fail(|| format!("dropout of a rate of {rate}"), result);
    }
    let rows = RowNumbers { first: 0, width: 0, stride: 1 };
    let result = b.dropout(&tensors[0], &Dropout { rows, ..half });
    calls.must_fail(|| "dropout of rows without width".into(), result);
    Ok(())
}

fn gates(calls: &mut Calls<'_>) -> Result<()> {
    fn log_gate(t: &[Tensor]) -> Result<GateInputs<'_>> {
        GateInputs::new(Some(&t[0]), Some(&t[1]), 3)
    }
    let operands =
        [real("z", &[3, 2], &[0, 1]), real("bias", &[2], &[0]), real("dy", &[3, 2], &[0, 1])];
    calls.op("log_gate_fwd", &operands[..2], |b, t| b.log_gate_fwd(&log_gate(t)?))?;
    calls.op("log_gate_bwd", &operands, |b, t| b.log_gate_bwd(&t[2], &log_gate(t)?))?;
    let (b, z) = (calls.device.backend(), calls.tensor(&[3, 2])?);
    let valid = GateInputs::new(Some(&z), None, 3)?;
    let none = GateInputs { z: None, ..valid };
    calls.must_fail(|| "log_gate_fwd of nothing".into(), b.log_gate_fwd(&none));
    for (rows, heads) in [(4, 2), (3, 3), (3, 0), (usize::MAX, 2)] {
        let result = b.log_gate_fwd(&GateInputs { rows, heads, ..valid });
        calls.must_fail(|| format!("log_gate_fwd of {rows} rows and {heads} heads"), result);
    }
    for device in calls.others {
        let result = b.log_gate_fwd(&GateInputs { device, ..valid });
        calls.must_fail(|| format!("log_gate_fwd for {device}"), result);
    }
    fn time_step(t: &[Tensor], limits: (f32, f32)) -> TimeStepInputs<'_> {
        TimeStepInputs { z: &t[0], bias: &t[1], a_log: &t[2], limits }
    }
    let operands = [
        real("z", &[3, 2], &[1]),
        real("bias", &[2], &[0]),
        real("a_log", &[2], &[0]),
        real("ddt", &[3, 2], &[0, 1]),
        real("dlog_decay", &[3, 2], &[0, 1]),
    ];
    let limits = (0.0, 1.0);
    calls.op("time_step_fwd", &operands[..3], |b, t| b.time_step_fwd(&time_step(t, limits)))?;
    calls.op("time_step_bwd", &operands, |b, t| {
        b.time_step_bwd(Some(&t[3]), Some(&t[4]), &time_step(t, limits))
    })?;
    let tensors = [calls.tensor(&[3, 2])?, calls.tensor(&[2])?, calls.tensor(&[2])?];
    for limits in [(1.0, 0.0), (-1.0, 1.0), (f32::NAN, 1.0), (0.0, f32::NAN)] {
        let result = b.time_step_fwd(&time_step(&tensors, limits));
        calls.must_fail(|| format!("time_step_fwd with limits {limits:?}"), result);
    }
    fn channel_decay(t: &[Tensor], bound: Option<f32>) -> ChannelDecayInputs<'_> {
        ChannelDecayInputs { z: &t[0], bias: &t[1], a_log: &t[2], bound }
    }
    let operands = [
        real("z", &[3, 6], &[1]),
        real("bias", &[6], &[0]),
        real("a_log", &[2], &[]),
        real("dlog_decay", &[3, 6], &[0, 1]),
    ];
    calls.op("channel_decay_fwd", &operands[..3], |b, t| {
        b.channel_decay_fwd(&channel_decay(t, None))
    })?;
    calls.op("channel_decay_bwd", &operands, |b, t| {
        b.channel_decay_bwd(&t[3], &channel_decay(t, Some(-5.0)))
    })?;
    let tensors = [calls.tensor(&[3, 6])?, calls.tensor(&[6])?, calls.tensor(&[2])?];
    for bound in [0.0, 1.0, f32::NAN, f32::NEG_INFINITY] {
        let result = b.channel_decay_fwd(&channel_decay(&tensors, Some(bound)));
        calls.must_fail(|| format!("channel_decay_fwd with bound {bound}"), result);
    }
    fn hgrn(t: &[Tensor]) -> HgrnInputs<'_> {
        HgrnInputs { q: &t[0], z: &t[1], lower: Some(&t[2]) }
    }
    let operands = [
        real("q", &[3, 8], &[0, 1]),
        real("z", &[3, 8], &[0, 1]),
        real("lower", &[8], &[0]),
        real("dq", &[3, 8], &[0, 1]),
        real("dk", &[3, 8], &[0, 1]),
        real("dlog_f", &[3, 8], &[0, 1]),
    ];
    calls.op("hgrn_gates_fwd", &operands[..3], |b, t| b.hgrn_gates_fwd(&hgrn(t)))?;
    calls.op("hgrn_gates_bwd", &operands, |b, t| {
        let d_out = HgrnGates { q: t[3].clone(), k: t[4].clone(), log_f: t[5].clone() };
        b.hgrn_gates_bwd(&d_out, &hgrn(t))
    })?;
    let operands = [real("table", &[3, 8], &[]), real("dy", &[8], &[0])];
    calls.op("lower_bound_fwd", &operands[..1], |b, t| b.lower_bound_fwd(&t[0], 1))?;
    calls.op("lower_bound_bwd", &operands, |b, t| b.lower_bound_bwd(&t[1], &t[0], 1))?;
    let table = calls.tensor(&[3, 8])?;
    calls.must_fail(|| "lower_bound_fwd of layer 3 of 3".into(), b.lower_bound_fwd(&table, 3));
    Ok(())
}

fn vocabulary(calls: &mut Calls<'_>) -> Result<()> {
    let any = Operand { fixed_rank: false, content: Content::Ids(6), ..real("ids", &[3], &[]) };
    let operands = [real("table", &[6, 4], &[]), any];
    calls.op("embedding_fwd", &operands, |b, t| b.embedding_fwd(&t[0], &t[1]))?;
    let operands = [
        real("dy", &[3, 4], &[0, 1]),
        Operand { fixed: &[0], ..any },
        real("acc", &[6, 4], &[0, 1]),
    ];
    calls.op("embedding_bwd", &operands, |b, t| {
        b.embedding_bwd(&t[0], &t[1], 6, None, Some(t[2].clone()))
    })?;
    let (b, dy) = (calls.device.backend(), calls.tensor(&[3, 4])?);
    let ids = calls.device.from_i32(&[0, 1, 5], [3])?;
    for vocab in [0, 5, usize::MAX] {
        let result = b.embedding_bwd(&dy, &ids, vocab, None, None);
        calls.must_fail(|| format!("embedding_bwd for {vocab} ids"), result);
    }
    let labels = Operand { fixed_rank: true, fixed: &[0], name: "labels", ..any };
    let operands = [
        real("x", &[3, 4], &[0, 1]),
        real("weight", &[6, 4], &[0, 1]),
        labels,
        real("weights", &[3], &[0]),
        real("teacher's x", &[3, 8], &[0, 1]),
        real("teacher's weight", &[6, 8], &[0, 1]),
    ];
    calls.op("linear_cross_entropy", &operands, |b, t| {
        let teacher = Some(Teacher { x: &t[4], w: &t[5], weight: 0.5 });
        let (x, w, labels) = (&t[0], &t[1], &t[2]);
        b.linear_cross_entropy(&LossInputs { x, w, labels, weights: Some(&t[3]), teacher })
    })?;
    let ids = calls.device.from_i32(&[0, IGNORE_LABEL, 1], [3])?;
    let table = calls.tensor(&[6, 4])?;
    calls.must_fail(|| "embedding_fwd of the ignored label".into(), b.embedding_fwd(&table, &ids));
    Ok(())
}
