//! Keys and values in pages, so that a head's oldest ones can be freed on their own.
//!
//! A [`KeyPages`] belongs to one key head of one sequence, [`LayerPages`] are those of all key heads of a
//! layer. Pages are shared between sequences that begin alike and copied before they are written; a head
//! that has forgotten its oldest pages drops them, whatever the other heads do.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::{Backend, DType, Device, Result, Tensor};

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
    /// Log gates `[group, PAGE]`, where the device has kernels that read them here.
    pub gates: Option<Tensor>,
    /// Sums of the log gates up to and including each key, `[group, PAGE]` for the query heads that
    /// read this key head; empty when nothing is forgotten. On the host, in f64: differences stay
    /// accurate after millions of tokens.
    pub sums: Vec<f64>,
    _lease: Lease,
}

impl Page {
    /// Bytes of a page for heads of width `head_dim` and `group` gates.
    pub fn bytes(head_dim: usize, group: usize, backend: &dyn Backend) -> usize {
        let gate = if backend.has_page_kernels() { DType::F32.size() } else { 0 };
        let row = 2 * head_dim * backend.activation_type().size();
        PAGE * (row + group * (size_of::<f64>() + gate))
    }

    fn new(head_dim: usize, group: usize, device: &Device, meter: &PageMeter) -> Result<Self> {
        let backend = device.backend();
        let kernels = backend.has_page_kernels();
        let room = |rows: usize, width: usize, dtype: DType| match kernels {
            true => device.uninit([rows, width], dtype),
            // Whole pages are read: what is not written yet must be a number.
            false => device.zeros([rows, width], dtype),
        };
        let gates = (kernels && group > 0).then(|| room(group, PAGE, DType::F32));
        Ok(Page {
            k: room(PAGE, head_dim, backend.activation_type())?,
            v: room(PAGE, head_dim, backend.activation_type())?,
            gates: gates.transpose()?,
            sums: vec![0.0; group * PAGE],
            _lease: meter.lease(Page::bytes(head_dim, group, backend)),
        })
    }

    /// The same in memory of its own.
    fn copy(&self) -> Result<Self> {
        let own = |x: &Tensor| x.slice_rows(0, x.rows());
        let gates = self.gates.as_ref().map(own).transpose()?;
        Ok(Page { k: own(&self.k)?, v: own(&self.v)?, gates, ..self.clone() })
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

    /// Page number `index`, counted from the first token, if it is held.
    pub fn page(&self, index: usize) -> Option<&Page> {
        self.pages.get(index.checked_sub(self.dropped)?).map(|page| &**page)
    }

    /// The same for writing. Only after `reserve`.
    fn page_mut(&mut self, index: usize) -> Option<&mut Page> {
        self.pages.get_mut(index.checked_sub(self.dropped)?).and_then(Arc::get_mut)
    }

    /// Makes pages for `count` keys behind position `len` that nobody shares, forgetting what may have been
    /// there; the number of the first page that is another than before.
    fn reserve(&mut self, len: usize, count: usize, device: &Device) -> Result<Option<usize>> {
        self.pages.truncate(len.div_ceil(PAGE) - self.dropped);
        let mut first = None;
        for index in len / PAGE..(len + count).div_ceil(PAGE) {
            let at = index - self.dropped;
            let changed = match self.pages.get_mut(at) {
                None => {
                    let page = Page::new(self.head_dim, self.group, device, &self.meter)?;
                    self.pages.push_back(Arc::new(page));
                    true
                }
                Some(page) if Arc::strong_count(page) > 1 => {
                    *page = Arc::new(page.copy()?);
                    true
                }
                Some(_) => false,
            };
            first = first.or(changed.then_some(index));
        }
        self.len = len + count;
        Ok(first)
    }

    /// Writes `sums: [group][count]` from position `len` on.
    fn write_sums(&mut self, len: usize, count: usize, sums: &[f64]) {
        for (index, taken, slots) in pieces(len, count) {
            let group = self.group;
            let Some(page) = self.page_mut(index) else { continue };
            for g in 0..group {
                page.sums[g * PAGE + slots.start..g * PAGE + slots.end]
                    .copy_from_slice(&sums[g * count + taken..][..slots.len()]);
            }
        }
    }

    /// Drops full pages from the front as long as `forgotten` says so; the last page stays.
    pub fn drop_while(&mut self, mut forgotten: impl FnMut(usize, &Page) -> bool) {
        while self.pages.len() > 1 && forgotten(self.first(), &self.pages[0]) {
            self.pages.pop_front();
            self.dropped += 1;
        }
    }
}

/// Positions `len .. len + count` page by page: the page's number, how many came before, its slots.
fn pieces(len: usize, count: usize) -> impl Iterator<Item = (usize, usize, Range<usize>)> {
    (len / PAGE..(len + count).div_ceil(PAGE)).map(move |index| {
        let (from, to) = (len.max(index * PAGE), (len + count).min((index + 1) * PAGE));
        (index, from - len, from - index * PAGE..to - index * PAGE)
    })
}

/// New keys of one layer of one sequence: rows `row .. row + count` of what a step has made.
#[derive(Clone, Copy, Debug)]
pub struct NewKeys<'a> {
    /// `[R, H_kv * d]`.
    pub k: &'a Tensor,
    /// `[R, H_kv * d]`.
    pub v: &'a Tensor,
    /// `[R, H]`.
    pub log_gates: Option<&'a Tensor>,
    /// Sums of all log gates at the new keys `[H][count]`.
    pub sums: &'a [f64],
    /// The first row.
    pub row: usize,
    /// Number of rows.
    pub count: usize,
}

/// The pages of all key heads of one layer of one sequence.
#[derive(Debug)]
pub struct LayerPages {
    heads: Vec<KeyPages>,
    /// What the device wants to remember about where the pages lie.
    pub table: PageTable,
}

/// Where pages lie, in memory of the device. Only the device writes and reads it.
#[derive(Debug, Default)]
pub struct PageTable {
    /// One row per page.
    pub rows: Option<Tensor>,
    /// Rows that are up to date.
    pub valid: usize,
}

impl Clone for LayerPages {
    /// Shares the pages, not the table, which is written in place.
    fn clone(&self) -> Self {
        LayerPages { heads: self.heads.clone(), table: PageTable::default() }
    }
}

impl LayerPages {
    /// No keys yet.
    pub fn new(kv_heads: usize, head_dim: usize, group: usize, meter: &PageMeter) -> Self {
        let heads = vec![KeyPages::new(head_dim, group, meter); kv_heads];
        LayerPages { heads, table: PageTable::default() }
    }

    /// Head by head.
    pub fn heads(&self) -> &[KeyPages] {
        &self.heads
    }

    /// Head by head, for dropping pages.
    pub fn heads_mut(&mut self) -> &mut [KeyPages] {
        &mut self.heads
    }

    /// Makes room for `count` keys behind position `len`, forgetting what may have been there.
    pub fn reserve(&mut self, len: usize, count: usize, device: &Device) -> Result<()> {
        for keys in &mut self.heads {
            if let Some(first) = keys.reserve(len, count, device)? {
                self.table.valid = self.table.valid.min(first);
            }
        }
        Ok(())
    }

    /// Writes the sums of the log gates `[H][count]` from position `len` on, where there is room.
    pub fn write_sums(&mut self, len: usize, count: usize, sums: &[f64]) {
        for (h, keys) in self.heads.iter_mut().enumerate() {
            let each = keys.group * count;
            keys.write_sums(len, count, &sums[h * each..][..each]);
        }
    }

    /// Writes new keys behind position `len`, forgetting what may have been there.
    pub fn append(&mut self, new: &NewKeys<'_>, len: usize) -> Result<()> {
        let device = new.k.device().clone();
        self.reserve(len, new.count, &device)?;
        self.write_sums(len, new.count, new.sums);
        device.backend().write_pages(new, self, len)
    }
}

/// Copies new keys to their pages one by one: [`Backend::write_pages`] on any device.
pub(crate) fn copy_to_pages(new: &NewKeys<'_>, pages: &mut LayerPages, len: usize) -> Result<()> {
    let device = new.k.device().clone();
    let backend = device.backend();
    for (h, keys) in pages.heads.iter_mut().enumerate() {
        let column = h * keys.head_dim;
        for (index, taken, slots) in pieces(len, new.count) {
            let Some(page) = keys.page_mut(index) else { continue };
            let from = (new.row + taken, column);
            backend.copy_columns(new.k, from, &mut page.k, slots.start, slots.len())?;
            backend.copy_columns(new.v, from, &mut page.v, slots.start, slots.len())?;
        }
    }
    Ok(())
}
