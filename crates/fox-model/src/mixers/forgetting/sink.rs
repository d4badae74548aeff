//! Attention over pages with a sink ([`fox_tensor::SinkOps`]).

use fox_tensor::{
    Acp, AttentionInputs, AttentionSpec, DType, Mask, PAGE, PagedKeys, PagedSpec, Result, Segment,
    Segments, Slab, Tensor, held_pages,
};

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
            // Rows are copied as they are: bf16 where pages hold that.
            let dtype =
                held_pages(keys[s], h).next().map_or(DType::F32, |page| page.slab.k.dtype());
            let gather = |f: fn(&Slab) -> &Tensor| -> Result<Tensor> {
                // Not the rows of the last page that nothing was written to: a weight of zero does not undo a NaN.
                let mut rows = device.uninit([kept, d], dtype)?;
                for (p, page) in held_pages(keys[s], h).enumerate().take(kept.div_ceil(PAGE)) {
                    let (from, row, count) = (f(page.slab), page.row(), PAGE.min(kept - p * PAGE));
                    device.backend().copy_rows(from, row, &mut rows, p * PAGE, count)?;
                }
                Ok(rows)
            };
            let (k, v) = (gather(|slab| &slab.k)?, gather(|slab| &slab.v)?);
            let gates = gates(keys[s], h, kept)?;
            let gates = gates.map(|gates| device.from_f64(&gates, [kept, group])).transpose()?;
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
            let sinks = device.from_f64(&sinks[h * group..(h + 1) * group], [group])?;
            let (o, _) = device.backend().sink_fwd(&out.o, &out.lse, &sinks)?;
            for (t, row) in o.to_f64()?.chunks(group * d).enumerate() {
                result[place(t)].copy_from_slice(row);
            }
        }
    }
    device.from_f64(&result, q.shape())
}

/// Log gates `[kept, group]` of the keys that a head holds; `None` where nothing is forgotten.
fn gates(keys: &dyn PagedKeys, head: usize, kept: usize) -> Result<Option<Vec<f64>>> {
    let group = keys.shape().group;
    if group == 0 {
        return Ok(None);
    }
    let mut rows = vec![0.0; kept * group];
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
