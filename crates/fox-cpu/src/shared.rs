//! Output memory that several tasks write concurrently, each to disjoint elements.

use std::marker::PhantomData;

/// A slice whose disjoint ranges are written from several threads.
#[derive(Clone, Copy)]
pub struct Shared<'a> {
    start: *mut f32,
    len: usize,
    life: PhantomData<&'a mut [f32]>,
}

// SAFETY: access goes through `slice`, whose callers promise that live ranges never overlap.
unsafe impl Send for Shared<'_> {}
// SAFETY: as above.
unsafe impl Sync for Shared<'_> {}

impl<'a> Shared<'a> {
    /// Takes the slice for as long as tasks write to it.
    pub fn new(slice: &'a mut [f32]) -> Self {
        Shared { start: slice.as_mut_ptr(), len: slice.len(), life: PhantomData }
    }

    /// Elements `start .. start + len`, checked to lie inside.
    ///
    /// # Safety
    /// While the returned slice lives, no other code may access its elements.
    #[inline(always)]
    pub unsafe fn slice(&self, start: usize, len: usize) -> &'a mut [f32] {
        assert!(start <= self.len && len <= self.len - start);
        // SAFETY: in bounds by the check; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }
}
