//! Reference-counted pages and the free list.
//!
//! Pages are allocated and freed through [`CacheMeter`], many at a time, because a prefill chunk needs thousands.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fox_tensor::{Device, Page, PageMut, PageShape, PagedOps, Result, Slab};

use crate::meter::CacheMeter;

/// A slab and the reference counts of its pages.
#[derive(Debug)]
struct SharedSlab {
    slab: Slab,
    holders: Box<[AtomicU32]>,
    /// Whether free pages are reused.
    recycled: bool,
}

/// A reference to a page. It must be returned with [`CacheMeter::give_back`]; a drop would leave it counted.
#[derive(Debug)]
pub(crate) struct HeldPage {
    slab: Arc<SharedSlab>,
    place: usize,
}

impl Clone for HeldPage {
    /// Another reference to the same page.
    fn clone(&self) -> Self {
        self.holders().fetch_add(1, Ordering::Relaxed);
        HeldPage { slab: Arc::clone(&self.slab), place: self.place }
    }
}

impl HeldPage {
    fn holders(&self) -> &AtomicU32 {
        &self.slab.holders[self.place]
    }

    /// Whether there are other references.
    pub fn is_shared(&self) -> bool {
        match self.slab.holders.len() {
            // Another thread may have returned the page but still reference the slab, which then cannot be written.
            1 => Arc::strong_count(&self.slab) > 1,
            _ => self.holders().load(Ordering::Acquire) > 1,
        }
    }

    /// The page.
    pub fn page(&self) -> Page<'_> {
        Page { slab: &self.slab.slab, place: self.place }
    }

    /// The page for writing, if neither it nor another page of its slab is referenced elsewhere.
    pub fn page_mut(&mut self) -> Option<PageMut<'_>> {
        let place = self.place;
        Arc::get_mut(&mut self.slab).map(|shared| PageMut { slab: &mut shared.slab, place })
    }

    /// Copies another page to this new one.
    pub fn copy_from(&mut self, other: &HeldPage) -> Result<()> {
        if let Some(PageMut { slab, place }) = self.page_mut() {
            return slab.copy_page(place, other.page());
        }
        let device = self.slab.slab.k.device();
        match device.backend().caps().paged {
            Some(ops) => ops.copy_page(other.page(), self.page()),
            None => Ok(()),
        }
    }
}

/// The free pages of one shape.
type List = (PageShape, Vec<HeldPage>);

/// Free lists by shape, for devices that reuse pages. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct FreePages(Arc<Mutex<Vec<List>>>);

impl FreePages {
    fn lock(&self) -> MutexGuard<'_, Vec<List>> {
        // Lists are valid after a panic of any holder.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The list of a shape.
fn list_of<'a>(lists: &'a mut Vec<List>, shape: &PageShape) -> &'a mut Vec<HeldPage> {
    let at = lists.iter().position(|(own, _)| own == shape).unwrap_or_else(|| {
        lists.push((*shape, Vec::new()));
        lists.len() - 1
    });
    &mut lists[at].1
}

impl CacheMeter {
    /// Allocates `count` pages with unspecified contents, free ones first.
    pub(crate) fn take_pages(
        &self,
        shape: &PageShape,
        count: usize,
        device: &Device,
    ) -> Result<Vec<HeldPage>> {
        if count == 0 {
            return Ok(Vec::new());
        }
        let mut lists = self.free_pages().lock();
        let list = list_of(&mut lists, shape);
        while list.len() < count {
            let pages = device.backend().caps().paged.and_then(PagedOps::slab_pages);
            let slab = Arc::new(SharedSlab {
                slab: Slab::new(shape, pages.unwrap_or(1), device)?,
                holders: (0..pages.unwrap_or(1)).map(|_| AtomicU32::new(0)).collect(),
                recycled: pages.is_some(),
            });
            let page = |place| HeldPage { slab: Arc::clone(&slab), place };
            list.extend((0..slab.holders.len()).map(page));
        }
        let taken = list.split_off(list.len() - count);
        taken.iter().for_each(|page| page.holders().store(1, Ordering::Relaxed));
        self.add(count * shape.page_bytes(device.backend()));
        Ok(taken)
    }

    /// Returns references; pages without further references are freed.
    pub(crate) fn give_back(&self, shape: &PageShape, pages: impl Iterator<Item = HeldPage>) {
        let mut pages = pages.peekable();
        if pages.peek().is_none() {
            return;
        }
        let (mut freed, mut bytes) = (0, 0);
        let mut lists = self.free_pages().lock();
        let list = list_of(&mut lists, shape);
        for page in pages {
            if page.holders().fetch_sub(1, Ordering::AcqRel) > 1 {
                continue;
            }
            if freed == 0 {
                bytes = shape.page_bytes(page.slab.slab.k.device().backend());
            }
            freed += 1;
            if page.slab.recycled {
                list.push(page);
            }
        }
        self.subtract(freed * bytes);
    }
}
