//! Keys and values in pages, so that a head's oldest ones can be freed on their own.
//!
//! A [`KeyPages`] belongs to one key head of one sequence. Pages are shared between sequences that
//! begin alike and copied before they are written; a head that has forgotten its oldest pages drops
//! them, whatever the other heads do.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::{
    Acp, AttentionInputs, AttentionSpec, DType, Device, Error, Mask, Result, Segment, Segments,
    Tensor,
};

/// Keys per page.
pub const PAGE: usize = 64;

/// Counts the bytes of all pages that were made with it and still exist, shared ones once.
#[derive(Clone, Debug, Default)]
pub struct PageMeter(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    now: AtomicUsize,
    peak: AtomicUsize,
}

impl PageMeter {
    /// Bytes held now.
    pub fn bytes(&self) -> usize {
        self.0.now.load(Ordering::Relaxed)
    }

    /// The most that was ever held at once.
    pub fn peak(&self) -> usize {
        self.0.peak.load(Ordering::Relaxed)
    }

    /// Counts `bytes` until the result is dropped.
    pub fn lease(&self, bytes: usize) -> Lease {
        let now = self.0.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.0.peak.fetch_max(now, Ordering::Relaxed);
        Lease { bytes, meter: self.clone() }
    }
}

/// Bytes that are counted as long as this exists. A clone is counted again.
#[derive(Debug)]
pub struct Lease {
    bytes: usize,
    meter: PageMeter,
}

impl Clone for Lease {
    fn clone(&self) -> Self {
        self.meter.lease(self.bytes)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.meter.0.now.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Room for [`PAGE`] keys of one head.
#[derive(Clone, Debug)]
pub struct Page {
    /// `[PAGE, d]`.
    pub k: Tensor,
    /// `[PAGE, d]`.
    pub v: Tensor,
    /// Sums of the log gates up to and including each key, `[group, PAGE]` for the query heads that
    /// read this key head; empty when nothing is forgotten. On the host, in f64: differences stay
    /// accurate after millions of tokens.
    pub sums: Vec<f64>,
    _lease: Lease,
}

impl Page {
    /// Bytes of a page for heads of width `head_dim` and `group` gates.
    pub fn bytes(head_dim: usize, group: usize) -> usize {
        PAGE * (2 * head_dim * DType::F32.size() + group * size_of::<f64>())
    }
}

/// The keys and values of one head of one sequence.
#[derive(Clone, Debug)]
pub struct KeyPages {
    head_dim: usize,
    /// Query heads with gates of their own that read these keys; 0 when nothing is forgotten.
    group: usize,
    meter: PageMeter,
    pages: VecDeque<Arc<Page>>,
    /// Pages dropped from the front.
    dropped: usize,
    /// Keys seen, dropped ones included.
    len: usize,
}

impl KeyPages {
    /// No keys yet.
    pub fn new(head_dim: usize, group: usize, meter: &PageMeter) -> Self {
        let (pages, meter) = (VecDeque::new(), meter.clone());
        KeyPages { head_dim, group, meter, pages, dropped: 0, len: 0 }
    }

    /// Keys seen, dropped ones included.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no key was seen.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Position of the first key that is held.
    pub fn first(&self) -> usize {
        self.dropped * PAGE
    }

    /// Pages dropped so far.
    pub fn dropped(&self) -> usize {
        self.dropped
    }

    /// The pages that are held, oldest first.
    pub fn pages(&self) -> impl ExactSizeIterator<Item = &Page> {
        self.pages.iter().map(|page| &**page)
    }

    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Query heads with gates of their own.
    pub fn group(&self) -> usize {
        self.group
    }

    /// Writes `count` keys and values behind position `len`, forgetting what may have been there:
    /// columns `column .. column + d` of rows `row ..` of `k` and `v` `[R, W]`, and `sums[group][count]`.
    pub fn append(
        &mut self,
        (k, v): (&Tensor, &Tensor),
        (row, column): (usize, usize),
        count: usize,
        sums: &[f64],
        len: usize,
    ) -> Result<()> {
        let device = k.device().clone();
        self.pages.truncate(len.div_ceil(PAGE) - self.dropped);
        let mut done = 0;
        while done < count {
            let at = len + done;
            let (page, slot) = (at / PAGE - self.dropped, at % PAGE);
            if page == self.pages.len() {
                self.pages.push_back(Arc::new(self.new_page(&device)?));
            }
            let take = (PAGE - slot).min(count - done);
            let page = Arc::make_mut(&mut self.pages[page]);
            let backend = device.backend();
            let from = (row + done, column);
            backend.copy_columns(k, from, &mut page.k, slot, take)?;
            backend.copy_columns(v, from, &mut page.v, slot, take)?;
            for g in 0..self.group {
                page.sums[g * PAGE + slot..][..take]
                    .copy_from_slice(&sums[g * count + done..][..take]);
            }
            done += take;
        }
        self.len = len + count;
        Ok(())
    }

    fn new_page(&self, device: &Device) -> Result<Page> {
        // Zeros, because whole pages are read: what is not written yet must be a number.
        let zeros = || device.zeros([PAGE, self.head_dim], DType::F32);
        Ok(Page {
            k: zeros()?,
            v: zeros()?,
            sums: vec![0.0; self.group * PAGE],
            _lease: self.meter.lease(Page::bytes(self.head_dim, self.group)),
        })
    }

    /// Drops full pages from the front as long as `forgotten` says so; the last page stays.
    pub fn drop_while(&mut self, mut forgotten: impl FnMut(usize, &Page) -> bool) {
        while self.pages.len() > 1 && forgotten(self.first(), &self.pages[0]) {
            self.pages.pop_front();
            self.dropped += 1;
        }
    }
}

/// Options of attention over pages. Causal.
#[derive(Clone, Debug)]
pub struct PagedSpec {
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
/// correct on any device; `keys[s * H_kv + h]` belongs to segment `s` and key head `h`.
pub fn gathered_attention(q: &Tensor, keys: &[&KeyPages], spec: &PagedSpec) -> Result<Tensor> {
    let (device, d, group) = (q.device().clone(), spec.head_dim, spec.heads / spec.kv_heads);
    let backend = device.backend();
    let mut o = device.zeros(q.shape(), DType::F32)?.reshape([q.rows() * spec.heads, d])?;
    for (s, segment) in spec.segments.as_slice().iter().enumerate().filter(|(_, s)| s.q_len > 0) {
        for h in 0..spec.kv_heads {
            let pages = keys[s * spec.kv_heads + h];
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
            let out =
                backend.attention_fwd(&inputs, &part)?.o.reshape([segment.q_len * group, d])?;
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
    pub(crate) fn check(&self, q: &Tensor, keys: &[&KeyPages]) -> Result<()> {
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
            keys[s * self.kv_heads..][..self.kv_heads].iter().all(|pages| {
                pages.head_dim() == self.head_dim
                    && (pages.group() == 0 || pages.group() == group)
                    && pages.len() == segment.k_len
                    && pages.first() <= segment.k_len - segment.q_len.min(segment.k_len)
            })
        };
        if keys.len() != self.segments.len() * self.kv_heads
            || !self.segments.as_slice().iter().enumerate().all(fits)
            || self.thresholds.as_ref().is_some_and(|t| t.len() != self.heads)
        {
            return Err(Error::argument(OP, "the pages do not fit heads and segments"));
        }
        Ok(())
    }
}
