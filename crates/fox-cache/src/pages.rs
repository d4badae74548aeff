//! The pages of one layer of one sequence.
//!
//! Pages are shared between sequences that begin alike and copied before they are written; a head
//! that has forgotten its oldest pages drops them, whatever the other heads do.

use std::collections::VecDeque;
use std::sync::Arc;

use fox_tensor::{
    Device, NewKeys, PAGE, Page, PageShape, PageTable, PagedKeys, Result, page_parts, write_pages,
};

use crate::meter::{CacheMeter, Lease};

/// Pages of all key heads of one layer of one sequence.
#[derive(Debug)]
pub struct LayerPages {
    shape: PageShape,
    meter: CacheMeter,
    heads: Vec<KeyPages>,
    /// Keys seen, dropped ones included.
    seen: usize,
    table: PageTable,
}

/// The pages of one key head.
#[derive(Clone, Debug, Default)]
struct KeyPages {
    pages: VecDeque<Arc<Counted>>,
    /// Pages dropped from the front.
    dropped: usize,
}

/// A page and the count of its bytes.
#[derive(Debug)]
struct Counted {
    page: Page,
    _lease: Lease,
}

impl Clone for LayerPages {
    /// Shares the pages, not the table, which is written in place.
    fn clone(&self) -> Self {
        let (meter, heads) = (self.meter.clone(), self.heads.clone());
        LayerPages { shape: self.shape, meter, heads, seen: self.seen, table: PageTable::default() }
    }
}

impl LayerPages {
    /// No keys yet.
    pub fn new(shape: PageShape, meter: &CacheMeter) -> Self {
        let heads = vec![KeyPages::default(); shape.kv_heads];
        LayerPages { shape, meter: meter.clone(), heads, seen: 0, table: PageTable::default() }
    }

    /// Pages of key head `head` that are held.
    pub fn held(&self, head: usize) -> usize {
        self.heads[head].pages.len()
    }

    /// Makes room for `count` keys from position `first` on that nobody shares, forgetting what may have
    /// been there.
    pub fn reserve(&mut self, first: usize, count: usize, device: &Device) -> Result<()> {
        self.truncate(first);
        for keys in &mut self.heads {
            for part in page_parts(first, count) {
                let changed = keys.reserve(part.index, &self.shape, device, &self.meter)?;
                if changed {
                    self.table.valid = self.table.valid.min(part.index);
                }
            }
        }
        self.seen = first + count;
        Ok(())
    }

    /// Forgets the keys from position `len` on.
    pub fn truncate(&mut self, len: usize) {
        let pages = len.div_ceil(PAGE);
        for keys in &mut self.heads {
            let kept = pages.saturating_sub(keys.dropped).min(keys.pages.len());
            keys.pages.drain(kept..).for_each(|page| recycle(page, self.shape, &self.meter));
        }
        self.table.valid = self.table.valid.min(pages);
        self.seen = self.seen.min(len);
    }

    /// Writes new keys from position `first` on, forgetting what may have been there.
    pub fn append(&mut self, new: &NewKeys<'_>, first: usize) -> Result<()> {
        let device = new.k.device();
        self.reserve(first, new.count, device)?;
        write_pages(new, self, first)
    }

    /// Writes the sums of the log gates `[H][count]` from position `first` on, where there is room.
    pub fn write_sums(&mut self, first: usize, count: usize, sums: &[f64]) {
        let group = self.shape.group;
        for head in 0..self.heads.len() {
            for part in page_parts(first, count) {
                let Some(page) = self.page_mut(head, part.index) else { continue };
                for g in 0..group {
                    let own = &sums[(head * group + g) * count + part.before..];
                    let slots = part.slots.start + g * PAGE..;
                    page.sums[slots][..part.slots.len()].copy_from_slice(&own[..part.slots.len()]);
                }
            }
        }
    }

    /// The page that ends at position `len` is full; `sums: [H]` are the sums of the log gates there.
    pub fn write_end(&mut self, len: usize, sums: &[f64]) {
        self.seen = len;
        let group = self.shape.group;
        for (h, sum) in sums.iter().enumerate() {
            if let Some(page) = self.page_mut(h / group, len / PAGE - 1) {
                page.sums[h % group * PAGE + PAGE - 1] = *sum;
            }
        }
    }

    /// Drops full pages of a head from the front as long as `forgotten` says so of a page and the position
    /// of its first key; the last page stays.
    pub fn drop_while(&mut self, head: usize, mut forgotten: impl FnMut(usize, &Page) -> bool) {
        let keys = &mut self.heads[head];
        let first = |dropped: usize| dropped * PAGE;
        while keys.pages.len() > 1 && forgotten(first(keys.dropped), &keys.pages[0].page) {
            keys.pages
                .pop_front()
                .into_iter()
                .for_each(|page| recycle(page, self.shape, &self.meter));
            keys.dropped += 1;
        }
    }
}

impl Drop for LayerPages {
    fn drop(&mut self) {
        for keys in &mut self.heads {
            keys.pages.drain(..).for_each(|page| recycle(page, self.shape, &self.meter));
        }
    }
}

/// Keeps the page for others, if nobody holds it any more.
fn recycle(page: Arc<Counted>, shape: PageShape, meter: &CacheMeter) {
    if let Some(counted) = Arc::into_inner(page) {
        meter.free_pages().put(shape, counted.page);
    }
}

impl KeyPages {
    /// Makes sure that page number `index` is there and shared with nobody; whether it is another one than
    /// before.
    fn reserve(
        &mut self,
        index: usize,
        shape: &PageShape,
        device: &Device,
        meter: &CacheMeter,
    ) -> Result<bool> {
        let count = |page: Page| {
            let lease = meter.lease(shape.page_bytes(device.backend()));
            Arc::new(Counted { page, _lease: lease })
        };
        match self.pages.get_mut(index - self.dropped) {
            None => self.pages.push_back(count(meter.free_pages().take(shape, device)?)),
            Some(shared) if Arc::strong_count(shared) > 1 => *shared = count(shared.page.copy()?),
            Some(_) => return Ok(false),
        }
        Ok(true)
    }
}

impl PagedKeys for LayerPages {
    fn shape(&self) -> PageShape {
        self.shape
    }

    fn seen(&self) -> usize {
        self.seen
    }

    fn dropped(&self, head: usize) -> usize {
        self.heads[head].dropped
    }

    fn page(&self, head: usize, index: usize) -> Option<&Page> {
        let keys = &self.heads[head];
        keys.pages.get(index.checked_sub(keys.dropped)?).map(|counted| &counted.page)
    }

    fn page_mut(&mut self, head: usize, index: usize) -> Option<&mut Page> {
        let keys = &mut self.heads[head];
        let counted = keys.pages.get_mut(index.checked_sub(keys.dropped)?)?;
        Arc::get_mut(counted).map(|counted| &mut counted.page)
    }

    fn table(&self) -> &PageTable {
        &self.table
    }

    fn table_mut(&mut self) -> &mut PageTable {
        &mut self.table
    }
}
