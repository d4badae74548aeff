//! Attention with a sink: a learned logit `b` per query head that is in the denominator of the softmax only.
//!
//! ```text
//! p_ij = exp(s_ij) / (sum_j' exp(s_ij') + exp(b))      neither scaled nor decayed nor part of a window
//! ```
//!
//! With `o` and `lse` of attention without it, `o' = o sigmoid(lse - b)` and `lse' = log(exp(lse) + exp(b))`. A
//! device's backward pass needs nothing but these two, because it computes the weights as `exp(s - lse')` and their
//! mean gradient as `o' . do`. What is done to `o` and `lse` is done on the host.

use fox_tensor::{
    Acp, AttentionInputs, AttentionOut, AttentionSpec, CustomOp, DType, Error, Mask, PAGE,
    PagedKeys, PagedSpec, Result, Segment, Segments, Slab, Tape, Tensor, Var, held_pages,
};

/// `tape.attend` with sinks `[H]`: the output `[R_q, H * d]`, and tiles visited and in all.
pub(super) fn attend(
    tape: &mut Tape<'_>,
    [q, k, v]: [&Var; 3],
    log_gates: Option<&Var>,
    sinks: &Var,
    spec: &AttentionSpec,
) -> Result<(Var, Tensor)> {
    let inputs: Vec<&Var> = [q, k, v, sinks].into_iter().chain(log_gates).collect();
    let outs = tape.custom(SinkAttention { spec: spec.clone() }, &inputs)?;
    match <[Var; 3]>::try_from(outs) {
        Ok([o, _, tiles]) => Ok((o, tiles.value().clone())),
        Err(_) => Err(Error::argument("sink", "attention gave no output")),
    }
}

/// Inputs: queries, keys, values, sinks and, where there are any, log gates. Outputs: `o'`, `lse'` and tiles.
struct SinkAttention {
    spec: AttentionSpec,
}

impl SinkAttention {
    fn operands<'a>(inputs: &[&'a Tensor]) -> AttentionInputs<'a> {
        let log_gates = inputs.get(4).copied();
        AttentionInputs { q: inputs[0], k: inputs[1], v: inputs[2], log_gates }
    }
}

impl CustomOp for SinkAttention {
    fn name(&self) -> &'static str {
        "attention with sinks"
    }

    fn forward(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let device = inputs[0].device();
        let out = device.backend().attention_fwd(&Self::operands(inputs), &self.spec)?;
        let (o, lse) = drain(&out.o.to_f64()?, &out.lse.to_f64()?, &inputs[3].to_f64()?);
        let (o, lse) =
            (device.from_f64(&o, out.o.shape())?, device.from_f64(&lse, out.lse.shape())?);
        Ok(vec![o, lse, out.tiles])
    }

    fn backward(
        &self,
        inputs: &[&Tensor],
        outputs: &[&Tensor],
        grads: &[&Tensor],
    ) -> Result<Vec<Option<Tensor>>> {
        let device = inputs[0].device();
        let [o, lse, tiles] = [0, 1, 2].map(|i| outputs[i].clone());
        let out = AttentionOut { o, lse, tiles };
        let operands = Self::operands(inputs);
        let found = device.backend().attention_bwd(grads[0], &operands, &out, &self.spec)?;
        let (sinks, d) = (inputs[3].to_f64()?, self.spec.head_dim);
        let (o, lse, d_out) = (out.o.to_f64()?, out.lse.to_f64()?, grads[0].to_f64()?);
        let mut d_sinks = vec![0.0; sinks.len()];
        for (i, (o, d_out)) in o.chunks(d).zip(d_out.chunks(d)).enumerate() {
            let (h, product) =
                (i % sinks.len(), o.iter().zip(d_out).map(|(o, g)| o * g).sum::<f64>());
            if lse[i] > f64::NEG_INFINITY {
                d_sinks[h] -= (sinks[h] - lse[i]).exp() * product;
            }
        }
        let d_sinks = device.from_f64(&d_sinks, [sinks.len()])?;
        let grads = [found.dq, found.dk, found.dv, d_sinks];
        let gates = operands.log_gates.map(|_| found.dlog_gates);
        Ok(grads.into_iter().map(Some).chain(gates).collect())
    }
}

/// `o'` and `lse'` of `o: [R, H * d]` and `lse: [R, H]`; rows that see nothing stay as they are.
fn drain(o: &[f64], lse: &[f64], sinks: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let d = o.len() / lse.len().max(1);
    let (mut o, mut lse) = (o.to_vec(), lse.to_vec());
    for (i, (o, lse)) in o.chunks_mut(d.max(1)).zip(&mut lse).enumerate() {
        let sink = sinks[i % sinks.len()];
        if *lse == f64::NEG_INFINITY {
            continue;
        }
        let share = 1.0 / (1.0 + (sink - *lse).exp());
        o.iter_mut().for_each(|x| *x *= share);
        *lse = lse.max(sink) + (-(*lse - sink).abs()).exp().ln_1p();
    }
    (o, lse)
}

/// Attention of `q: [R, H * d]` over pages, with sinks `[H]`. The pages of each head are gathered, as devices do that
/// have no kernel for pages.
pub(super) fn attend_pages(
    q: &Tensor,
    keys: &[&dyn PagedKeys],
    spec: &PagedSpec,
    sinks: &Tensor,
) -> Result<Tensor> {
    let (device, d, group) = (q.device().clone(), spec.head_dim, spec.heads / spec.kv_heads);
    let (all, sinks) = (q.to_f64()?, sinks.to_f64()?);
    let mut result = vec![0.0; all.len()];
    for (s, segment) in spec.segments.as_slice().iter().enumerate().filter(|(_, s)| s.q_len > 0) {
        for h in 0..spec.kv_heads {
            let kept = keys[s].seen() - keys[s].first(h);
            let gather = |f: fn(&Slab) -> &Tensor| -> Result<Tensor> {
                let mut rows = device.uninit([kept.next_multiple_of(PAGE), d], DType::F32)?;
                for (p, page) in held_pages(keys[s], h).enumerate() {
                    let (from, row) = (f(page.slab), page.row());
                    device.backend().copy_rows(from, row, &mut rows, p * PAGE, PAGE)?;
                }
                Ok(rows)
            };
            let (k, v) = (gather(|slab| &slab.k)?, gather(|slab| &slab.v)?);
            let gates = gates(keys[s], h, kept)?;
            let rows = kept.next_multiple_of(PAGE);
            let gates = gates.map(|gates| device.from_f64(&gates, [rows, group])).transpose()?;
            // The queries of the heads that read these keys, `[q_len, group * d]`.
            let place = |t: usize| {
                let start = ((segment.q_start + t) * spec.heads + h * group) * d;
                start..start + group * d
            };
            let own: Vec<f64> = (0..segment.q_len).flat_map(|t| all[place(t)].to_vec()).collect();
            let own = device.from_f64(&own, [segment.q_len, group * d])?;
            let (q_len, k_len) = (segment.q_len, kept);
            let part = AttentionSpec {
                scale: spec.scale,
                mask: Mask::Causal,
                window: spec.window,
                acp: Acp::Off,
                kv_heads: 1,
                ..AttentionSpec::causal(
                    group,
                    d,
                    Segments::new(vec![Segment { q_start: 0, q_len, k_start: 0, k_len }])?,
                )
            };
            let inputs = AttentionInputs { q: &own, k: &k, v: &v, log_gates: gates.as_ref() };
            let out = device.backend().attention_fwd(&inputs, &part)?;
            let sinks = &sinks[h * group..(h + 1) * group];
            let (o, _) = drain(&out.o.to_f64()?, &out.lse.to_f64()?, sinks);
            for (t, row) in o.chunks(group * d).enumerate() {
                result[place(t)].copy_from_slice(row);
            }
        }
    }
    device.from_f64(&result, q.shape())
}

/// Log gates `[kept up to a page, group]` of the keys that a head holds; `None` where nothing is forgotten.
fn gates(keys: &dyn PagedKeys, head: usize, kept: usize) -> Result<Option<Vec<f64>>> {
    let group = keys.shape().group;
    if group == 0 {
        return Ok(None);
    }
    let mut rows = vec![0.0; kept.next_multiple_of(PAGE) * group];
    let mut before = vec![None; group];
    for (p, page) in held_pages(keys, head).enumerate() {
        let in_page = match &page.slab.gates {
            Some(gates) => Some(gates.slice_rows(page.place * group, group)?.to_f64()?),
            None => None,
        };
        for at in p * PAGE..kept.min((p + 1) * PAGE) {
            for (g, before) in before.iter_mut().enumerate() {
                let sum = || page.sums(g, group).map_or(0.0, |sums| sums[at % PAGE]);
                // Of the first key no score depends on the gate.
                rows[at * group + g] = match &in_page {
                    Some(gates) => gates[g * PAGE + at % PAGE],
                    None => before.replace(sum()).map_or(0.0, |last| sum() - last),
                };
            }
        }
    }
    Ok(Some(rows))
}
