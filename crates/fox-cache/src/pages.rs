//! The pages of one layer of one sequence.
//!
//! Pages are shared between sequences with a common prefix and copied on write. Every key head evicts its oldest pages
//! independently of the other heads.

use std::collections::VecDeque;

use fox_tensor::{
    Device, NewKeys, PAGE, Page, PageMut, PageShape, PageTable, PagedKeys, Result, page_parts,
    write_pages,
};

use crate::meter::CacheMeter;
use crate::recycled::HeldPage;

/// Pages of all key heads of one layer of one sequence.
#[derive(Debug)]
pub struct LayerPages {
    shape: PageShape,
    meter: CacheMeter,
    heads: Vec<KeyPages>,
    /// Sums of the log gates at the ends of full pages `[page, H]`, evicted ones included.
    ends: Vec<f64>,
    /// Keys seen, evicted ones included.
    seen: usize,
    table: PageTable,
}

/// The pages of one key head.
#[derive(Clone, Debug, Default)]
struct KeyPages {
    pages: VecDeque<HeldPage>,
    /// Evicted pages.
    dropped: usize,
}

impl Clone for LayerPages {
    /// Shares the pages, not the page table, which is written in place.
    fn clone(&self) -> Self {
        LayerPages {
            shape: self.shape,
            meter: self.meter.clone(),
            heads: self.heads.clone(),
            ends: self.ends.clone(),
            seen: self.seen,
            table: PageTable::default(),
        }
    }
}

impl LayerPages {
    /// No keys yet.
    pub fn new(shape: PageShape, meter: &CacheMeter) -> Self {
        LayerPages {
            shape,
            meter: meter.clone(),
            heads: vec![KeyPages::default(); shape.kv_heads],
            ends: Vec::new(),
            seen: 0,
            table: PageTable::default(),
        }
    }

    /// Pages of key head `head` that are held.
    pub fn held(&self, head: usize) -> usize {
        self.heads[head].pages.len()
    }

    /// Reserves unshared room for `count` keys from position `first` on, discarding later keys.
    pub fn reserve(&mut self, first: usize, count: usize, device: &Device) -> Result<()> {
        self.truncate(first);
        let indices = first / PAGE..(first + count).div_ceil(PAGE);
        let missing = |keys: &KeyPages| indices.clone().filter(|&n| keys.needs(n)).count();
        let missing = self.heads.iter().map(missing).sum();
        let mut fresh = self.meter.take_pages(&self.shape, missing, device)?.into_iter();
        let mut old = Vec::new();
        let mut replace = || -> Result<()> {
            for keys in &mut self.heads {
                for index in indices.clone() {
                    if !keys.needs(index) {
                        continue;
                    }
                    let Some(mut page) = fresh.next() else { continue };
                    self.table.valid = self.table.valid.min(index);
                    let Some(shared) = keys.pages.get_mut(index - keys.dropped) else {
                        keys.pages.push_back(page);
                        continue;
                    };
                    let copied = page.copy_from(shared);
                    if copied.is_ok() {
                        std::mem::swap(shared, &mut page);
                    }
                    old.push(page);
                    copied?;
                }
            }
            Ok(())
        };
        let replaced = replace();
        self.meter.give_back(&self.shape, old.into_iter().chain(fresh));
        replaced?;
        self.seen = first + count;
        Ok(())
    }

    /// Discards the keys from position `len` on.
    pub fn truncate(&mut self, len: usize) {
        let pages = len.div_ceil(PAGE);
        let gone = self.heads.iter_mut().flat_map(|keys| {
            let kept = pages.saturating_sub(keys.dropped).min(keys.pages.len());
            keys.pages.drain(kept..)
        });
        self.meter.give_back(&self.shape, gone);
        self.ends.truncate(len / PAGE * self.gates());
        self.table.valid = self.table.valid.min(pages);
        self.seen = self.seen.min(len);
    }

    /// Writes new keys from position `first` on, discarding later keys.
    pub fn append(&mut self, new: &NewKeys<'_>, first: usize) -> Result<()> {
        let device = new.k.device();
        self.reserve(first, new.count, device)?;
        write_pages(new, self, first)
    }

    /// Writes the sums of the log gates `[H][count]` from position `first` on, into slabs that have room for them.
    pub fn write_sums(&mut self, first: usize, count: usize, sums: &[f64]) {
        let group = self.shape.group;
        for part in page_parts(first, count) {
            let (len, of) = (part.slots.len(), |h: usize| &sums[h * count + part.before..]);
            for head in 0..self.heads.len() {
                let Some(PageMut { slab, place }) = self.page_mut(head, part.index) else {
                    continue;
                };
                for g in 0..group {
                    let slots = (place * group + g) * PAGE + part.slots.start;
                    if let Some(slots) = slab.sums.get_mut(slots..slots + len) {
                        slots.copy_from_slice(&of(head * group + g)[..len]);
                    }
                }
            }
            if part.slots.end == PAGE {
                let ends: Vec<f64> = (0..self.gates()).map(|h| of(h)[len - 1]).collect();
                self.write_end(part.index, &ends);
            }
        }
    }

    /// Stores the sums of the log gates `[H]` at the end of page number `index`.
    pub(crate) fn write_end(&mut self, index: usize, sums: &[f64]) {
        self.ends.truncate(index * sums.len());
        self.ends.extend(sums);
    }

    /// Sets the number of keys that a device has written.
    pub(crate) fn set_seen(&mut self, len: usize) {
        self.seen = len;
    }

    /// Evicts full pages of a head from the front while `forgotten(position of the first key, sums of the log gates at the
    /// end [group])` holds; the last page stays.
    pub fn drop_while(&mut self, head: usize, mut forgotten: impl FnMut(usize, &[f64]) -> bool) {
        let (group, gates) = (self.shape.group, self.gates());
        let keys = &mut self.heads[head];
        let mut gone = 0;
        while keys.pages.len() > gone + 1 {
            let index = keys.dropped + gone;
            let end =
                self.ends.get(index * gates + head * group..).and_then(|end| end.get(..group));
            if !end.is_some_and(|end| forgotten(index * PAGE, end)) {
                break;
            }
            gone += 1;
        }
        if gone > 0 {
            keys.dropped += gone;
            self.meter.give_back(&self.shape, keys.pages.drain(..gone));
        }
    }

    /// Query heads with gates.
    fn gates(&self) -> usize {
        self.shape.kv_heads * self.shape.group
    }
}

impl Drop for LayerPages {
    fn drop(&mut self) {
        let pages = self.heads.iter_mut().flat_map(|keys| keys.pages.drain(..));
        self.meter.give_back(&self.shape, pages);
    }
}

impl KeyPages {
    /// Whether page number `index` is missing or shared.
    fn needs(&self, index: usize) -> bool {
        self.pages.get(index - self.dropped).is_none_or(HeldPage::is_shared)
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

    fn page(&self, head: usize, index: usize) -> Option<Page<'_>> {
        let keys = &self.heads[head];
        keys.pages.get(index.checked_sub(keys.dropped)?).map(HeldPage::page)
    }

    fn page_mut(&mut self, head: usize, index: usize) -> Option<PageMut<'_>> {
        let keys = &mut self.heads[head];
        keys.pages.get_mut(index.checked_sub(keys.dropped)?)?.page_mut()
    }

    fn ends(&self) -> &[f64] {
        &self.ends
    }

    fn table(&self) -> &PageTable {
        &self.table
    }

    fn table_mut(&mut self) -> &mut PageTable {
        &mut self.table
    }
}
