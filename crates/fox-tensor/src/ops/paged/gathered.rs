//! Attention over pages on any device: gather the pages of each head and use plain attention.

use super::{PAGE, PagedKeys, PagedSpec, Slab, held_pages};
use crate::{
    Acp, AttentionInputs, AttentionSpec, AttentionWeights, DType, Device, Mask, PathInputs, Result,
    Segment, Segments, Tensor, check_paged_attention,
};

/// Attention of `q: [R, H * d]` over pages, gathered and given to the backend's plain attention. Slow and
/// correct on any device; `keys[s]` belongs to segment `s`. Gates come from the sums on the host.
pub fn gathered_attention(q: &Tensor, keys: &[&dyn PagedKeys], spec: &PagedSpec) -> Result<Tensor> {
    gathered(q, keys, spec, gates_of_sums)
}

/// [`gathered_attention`] with gates `[group][kept]` of a head from `gates`.
pub(super) fn gathered(
    q: &Tensor,
    keys: &[&dyn PagedKeys],
    spec: &PagedSpec,
    gates: impl Fn(&dyn PagedKeys, usize) -> Result<Vec<f64>>,
) -> Result<Tensor> {
    check_paged_attention(q.device().backend(), q, keys, spec)?;
    let (device, d, group) = (q.device().clone(), spec.head_dim, spec.heads / spec.kv_heads);
    let backend = device.backend();
    let mut o = device.zeros(q.shape(), DType::F32)?.reshape([q.rows() * spec.heads, d])?;
    for (s, segment) in spec.segments.as_slice().iter().enumerate().filter(|(_, s)| s.q_len > 0) {
        for h in 0..spec.kv_heads {
            let kept = keys[s].seen() - keys[s].first(h);
            let gather = |f: fn(&Slab) -> Option<&Tensor>| -> Result<Tensor> {
                let mut all = device.uninit([kept.next_multiple_of(PAGE), d], DType::F32)?;
                for (p, page) in held_pages(keys[s], h).enumerate() {
                    let Some(rows) = f(page.slab) else { continue };
                    backend.copy_rows(rows, page.row(), &mut all, p * PAGE, PAGE)?;
                }
                Ok(all)
            };
            let (k, v) = (gather(|slab| Some(&slab.k))?, gather(|slab| Some(&slab.v))?);
            let mut own = device.uninit([segment.q_len, group * d], DType::F32)?;
            backend.copy_columns(
                q,
                (segment.q_start, h * group * d),
                &mut own,
                0,
                segment.q_len,
            )?;
            let gated = keys[s].shape().group > 0;
            let gates = gated.then(|| rows_of_gates(&gates(keys[s], h)?, group, kept, &device));
            let gates = gates.transpose()?;
            let part = AttentionSpec {
                heads: group,
                kv_heads: 1,
                head_dim: d,
                scale: spec.scale,
                mask: Mask::Causal,
                window: spec.window,
                acp: Acp::Off,
                segments: Segments::new(vec![Segment {
                    q_start: 0,
                    q_len: segment.q_len,
                    k_start: 0,
                    k_len: kept,
                }])?,
                full_sequence: None,
            };
            let inputs = AttentionInputs { q: &own, k: &k, v: &v, log_gates: gates.as_ref() };
            let out = match spec.weights {
                AttentionWeights::Softmax if spec.reflected => {
                    let u = &gather(|slab| slab.transitions.as_ref())?;
                    let log_gates = gates.as_ref();
                    let inputs = PathInputs { q: &own, k: &k, v: &v, u, log_gates };
                    backend.path_attention_fwd(&inputs, &part)?
                }
                AttentionWeights::Softmax => backend.attention_fwd(&inputs, &part)?,
                AttentionWeights::StickBreaking => backend.stick_breaking_fwd(&inputs, &part)?,
            };
            let o_of_head = match &spec.sinks {
                None => out.o,
                Some(sinks) => {
                    let own = sinks.reshape([spec.heads, 1])?.slice_rows(h * group, group)?;
                    backend.sink_fwd(&out.o, &out.lse, &own.reshape([group])?)?.0
                }
            };
            let out = o_of_head.reshape([segment.q_len * group, d])?;
            for t in 0..segment.q_len {
                let row = (segment.q_start + t) * spec.heads + h * group;
                backend.copy_rows(&out, t * group, &mut o, row, group)?;
            }
        }
    }
    o.reshape(q.shape())
}

/// Log gates `[group][kept]` whose sums are those of the pages; the first of each is 0, which no score
/// depends on.
fn gates_of_sums(keys: &dyn PagedKeys, head: usize) -> Result<Vec<f64>> {
    let kept = keys.seen() - keys.first(head);
    let group = keys.shape().group;
    let mut gates = Vec::with_capacity(group * kept);
    for g in 0..group {
        let sums = held_pages(keys, head).filter_map(|page| page.sums(g, group)).flatten();
        let sums: Vec<f64> = sums.copied().take(kept).collect();
        gates.push(0.0);
        gates.extend(sums.windows(2).map(|pair| pair[1] - pair[0]));
    }
    Ok(gates)
}

/// Gates `[group][kept]` as `[kept up to a page, group]` on the device.
fn rows_of_gates(gates: &[f64], group: usize, kept: usize, device: &Device) -> Result<Tensor> {
    let rows = kept.next_multiple_of(PAGE);
    let mut transposed = vec![0.0; rows * group];
    for (g, own) in gates.chunks(kept).enumerate() {
        own.iter().enumerate().for_each(|(j, gate)| transposed[j * group + g] = *gate);
    }
    device.from_f64(&transposed, [rows, group])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::paged::cases::PagedCase;

    #[test]
    fn gates_from_sums_equal_gates_from_pages() {
        let device = Device::naive();
        for seed in 300..330 {
            let case = PagedCase::random(seed).unwrap();
            let pages = case.pages(&device).unwrap();
            let keys: Vec<&dyn PagedKeys> = pages.iter().map(|keys| keys as _).collect();
            let width = case.spec.heads * case.spec.head_dim;
            let q = device.from_f64(&case.q, [case.q.len() / width, width]).unwrap();
            let spec = case.spec_on(&device, &case.spec).unwrap();
            let plain = gathered_attention(&q, &keys, &spec).unwrap().to_f64().unwrap();
            let ops = device.backend().caps().paged.unwrap();
            let oracle = ops.paged_attention(&q, &keys, &spec).unwrap();
            for (a, b) in plain.iter().zip(oracle.to_f64().unwrap()) {
                assert!((a - b).abs() < 1e-9, "seed {seed}: {a} {b}");
            }
        }
    }
}
