//! Pages that are held, and those that nobody holds any more, for the next one who needs some.
//!
//! A held page is a place of a slab with a count of those who hold it. Taking and giving back go through
//! [`CacheMeter`], many pages at a time, so that a piece of a prompt does not pay for each of its thousands of pages.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fox_tensor::{Device, Page, PageMut, PageShape, PagedOps, Result, Slab};

use crate::meter::CacheMeter;

/// A slab and how many hold each of its pages.
#[derive(Debug)]
struct SharedSlab {
    slab: Slab,
    holders: Box<[AtomicU32]>,
    /// Whether its pages are kept when nobody holds them.
    recycled: bool,
}

/// A page that is held. Whoever has it gives it back to the meter it came from: dropping it would leave it counted.
#[derive(Debug)]
pub(crate) struct HeldPage {
    slab: Arc<SharedSlab>,
    place: usize,
}

impl Clone for HeldPage {
    /// Another holder of the same page.
    fn clone(&self) -> Self {
        self.holders().fetch_add(1, Ordering::Relaxed);
        HeldPage { slab: Arc::clone(&self.slab), place: self.place }
    }
}

impl HeldPage {
    fn holders(&self) -> &AtomicU32 {
        &self.slab.holders[self.place]
    }

    /// Whether others hold it, too.
    pub fn is_shared(&self) -> bool {
        match self.slab.holders.len() {
            // Whoever has given the page back may not have let go of the slab yet, and it could not be written.
            1 => Arc::strong_count(&self.slab) > 1,
            _ => self.holders().load(Ordering::Acquire) > 1,
        }
    }

    /// Where it lies.
    pub fn page(&self) -> Page<'_> {
        Page { slab: &self.slab.slab, place: self.place }
    }

    /// The same for writing, if nobody else holds it or another page of its slab.
    pub fn page_mut(&mut self) -> Option<PageMut<'_>> {
        let place = self.place;
        Arc::get_mut(&mut self.slab).map(|shared| PageMut { slab: &mut shared.slab, place })
    }

    /// Writes all of another page to this new one.
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

/// Pages to be used again, on devices that ask for it. Clones share them.
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
    /// `count` pages whose contents mean nothing: free ones, and new ones where there are not enough.
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

    /// Gives pages back. Those that nobody else holds are not counted any more.
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
