//! Attention over pages: what is asked for, and a way that works on any device.

use std::sync::Arc;

use crate::{
    Acp, AttentionInputs, AttentionSpec, AttentionWeights, DType, Device, Error, KeyPages,
    LayerPages, Mask, PAGE, Page, Result, Segment, Segments, Tensor,
};

/// Options of attention over pages. Causal.
#[derive(Clone, Debug)]
pub struct PagedSpec {
    /// How scores become weights.
    pub weights: AttentionWeights,
    /// Query heads `H`.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Factor on `q . k`.
    pub scale: f32,
    /// Sliding window.
    pub window: Option<usize>,
    /// Per query head, the decay below which a block of keys may be skipped.
    pub thresholds: Option<Arc<[f64]>>,
    /// The queries of each sequence; its keys are all that were seen, the new ones included.
    pub segments: Segments,
}

/// Attention of `q: [R, H * d]` over pages, gathered and given to the backend's plain attention. Slow and
/// correct on any device; `keys[s]` belongs to segment `s`.
pub fn gathered_attention(q: &Tensor, keys: &[&LayerPages], spec: &PagedSpec) -> Result<Tensor> {
    let (device, d, group) = (q.device().clone(), spec.head_dim, spec.heads / spec.kv_heads);
    let backend = device.backend();
    let mut o = device.zeros(q.shape(), DType::F32)?.reshape([q.rows() * spec.heads, d])?;
    for (s, segment) in spec.segments.as_slice().iter().enumerate().filter(|(_, s)| s.q_len > 0) {
        for h in 0..spec.kv_heads {
            let pages = &keys[s].heads()[h];
            let kept = pages.len() - pages.first();
            let gather = |f: fn(&Page) -> &Tensor| -> Result<Tensor> {
                let mut all = device.uninit([kept.next_multiple_of(PAGE), d], DType::F32)?;
                for (p, page) in pages.pages().enumerate() {
                    backend.copy_rows(f(page), 0, &mut all, p * PAGE, PAGE)?;
                }
                Ok(all)
            };
            let (k, v) = (gather(|page| &page.k)?, gather(|page| &page.v)?);
            let mut own = device.uninit([segment.q_len, group * d], DType::F32)?;
            backend.copy_columns(
                q,
                (segment.q_start, h * group * d),
                &mut own,
                0,
                segment.q_len,
            )?;
            let gates = gathered_gates(pages, kept, &device)?;
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
            };
            let inputs = AttentionInputs { q: &own, k: &k, v: &v, log_gates: gates.as_ref() };
            let out = match spec.weights {
                AttentionWeights::Softmax => backend.attention_fwd(&inputs, &part)?,
                AttentionWeights::StickBreaking => backend.stick_breaking_fwd(&inputs, &part)?,
            };
            let out = out.o.reshape([segment.q_len * group, d])?;
            for t in 0..segment.q_len {
                let row = (segment.q_start + t) * spec.heads + h * group;
                backend.copy_rows(&out, t * group, &mut o, row, group)?;
            }
        }
    }
    o.reshape(q.shape())
}

/// Log gates `[kept up to a page, group]` whose sums are those of the pages.
fn gathered_gates(pages: &KeyPages, kept: usize, device: &Device) -> Result<Option<Tensor>> {
    let group = pages.group();
    if group == 0 {
        return Ok(None);
    }
    let rows = kept.next_multiple_of(PAGE);
    let mut gates = vec![0.0; rows * group];
    for g in 0..group {
        let sums = pages.pages().flat_map(|page| &page.sums[g * PAGE..][..PAGE]);
        let sums: Vec<f64> = sums.copied().take(kept).collect();
        for j in 1..kept {
            gates[j * group + g] = sums[j] - sums[j - 1];
        }
    }
    device.from_f64(&gates, [rows, group]).map(Some)
}

impl PagedSpec {
    /// Whether queries and pages fit each other.
    pub(crate) fn check(&self, q: &Tensor, keys: &[&LayerPages]) -> Result<()> {
        const OP: &str = "paged_attention";
        q.expect_shape(OP, "q", &[q.rows(), self.heads * self.head_dim])?;
        self.segments.check(OP, q.rows(), usize::MAX)?;
        if self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            return Err(Error::argument(
                OP,
                format!("{} heads cannot share {} key heads", self.heads, self.kv_heads),
            ));
        }
        let group = self.heads / self.kv_heads;
        let fits = |(s, segment): (usize, &Segment)| {
            keys[s].heads().len() == self.kv_heads
                && keys[s].heads().iter().all(|pages| {
                    pages.head_dim() == self.head_dim
                        && (pages.group() == 0 || pages.group() == group)
                        && pages.len() == segment.k_len
                        && pages.first() <= segment.k_len - segment.q_len.min(segment.k_len)
                })
        };
        if keys.len() != self.segments.len()
            || !self.segments.as_slice().iter().enumerate().all(fits)
            || self.thresholds.as_ref().is_some_and(|t| t.len() != self.heads)
        {
            return Err(Error::argument(OP, "the pages do not fit heads and segments"));
        }
        Ok(())
    }
}
