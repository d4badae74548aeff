//! Pages that nobody holds any more, for the next one who needs some.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fox_tensor::{Device, Page, PageShape, PagedOps, Result};

/// Pages by their shape.
type Lists = Vec<(PageShape, Vec<Page>)>;

/// Pages to be used again, on devices that ask for it. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct FreePages(Arc<Mutex<Lists>>);

impl FreePages {
    /// A page whose contents mean nothing: one of those here, or a new one.
    pub fn take(&self, shape: &PageShape, device: &Device) -> Result<Page> {
        let kept = self.lock().iter_mut().find(|(own, _)| own == shape).and_then(|(_, l)| l.pop());
        match kept {
            Some(page) => Ok(page),
            None => Page::new(shape, device),
        }
    }

    /// Keeps a page, if its device wants that.
    pub fn put(&self, shape: PageShape, page: Page) {
        let ops = page.k.device().backend().caps().paged;
        if !ops.is_some_and(PagedOps::recycles_pages) {
            return;
        }
        let mut lists = self.lock();
        match lists.iter_mut().find(|(own, _)| *own == shape) {
            Some((_, list)) => list.push(page),
            None => lists.push((shape, vec![page])),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Lists> {
        // Lists are valid after a panic of any holder.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
