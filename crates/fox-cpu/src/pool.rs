//! Memory: buffers are aligned to cache lines and go back to a pool when they are dropped.
//!
//! A training step allocates the same sizes over and over. Fresh memory from the system costs a page fault for every
//! 4 KiB, more than many of the kernels that write to it.

use std::any::Any;
use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fox_tensor::{DType, Error, MemoryStats, Result, Storage};

const LINE: usize = 16;

/// Buffers of at least this many bytes ask for large pages.
const LARGE: usize = 4 << 20;

/// A cache line of 4-byte words.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([f32; LINE]);

#[derive(Default)]
struct FreeLists {
    /// Buffers not in use, by their length in lines.
    free: HashMap<usize, Vec<Vec<Line>>>,
    stats: MemoryStats,
}

/// A pool of buffers.
pub struct Pool {
    lists: Mutex<FreeLists>,
    /// Fill buffers with NaN, so that tests detect elements that a kernel did not write.
    poison: bool,
}

impl Pool {
    pub fn new(poison: bool) -> Arc<Self> {
        Arc::new(Pool { lists: Mutex::default(), poison })
    }

    pub fn stats(&self) -> MemoryStats {
        self.lock().stats
    }

    pub fn reset_peak(&self) {
        let mut lists = self.lock();
        lists.stats.peak = lists.stats.in_use;
    }

    /// A buffer of `len` words with the contents of its last use (zeros when new).
    pub fn take(self: &Arc<Self>, len: usize) -> Result<Buffer> {
        let lines = size_class(len.div_ceil(LINE));
        let bytes = lines * size_of::<Line>();
        let recycled = {
            let mut lists = self.lock();
            lists.stats.in_use += bytes;
            lists.stats.peak = lists.stats.peak.max(lists.stats.in_use);
            lists.free.get_mut(&lines).and_then(Vec::pop)
        };
        let memory = match recycled {
            Some(memory) => memory,
            None => self.fresh(lines)?,
        };
        let mut buffer = Buffer { memory: Memory::Pooled(memory, self.clone()), len };
        if self.poison {
            buffer.fill(f32::NAN);
        }
        Ok(buffer)
    }

    /// A buffer of `len` zeros.
    pub fn zeros(self: &Arc<Self>, len: usize) -> Result<Buffer> {
        let mut buffer = self.take(len)?;
        buffer.fill(0.0);
        Ok(buffer)
    }

    fn fresh(&self, lines: usize) -> Result<Vec<Line>> {
        let bytes = lines * size_of::<Line>();
        let mut memory = Vec::new();
        if memory.try_reserve_exact(lines).is_err() {
            self.lock().stats.in_use -= bytes;
            return Err(Error::OutOfMemory { device: "cpu".into(), bytes });
        }
        if bytes >= LARGE {
            ask_for_huge_pages(&memory.spare_capacity_mut()[..lines]);
        }
        memory.resize(lines, Line([0.0; LINE]));
        self.lock().stats.reserved += bytes;
        Ok(memory)
    }

    fn lock(&self) -> MutexGuard<'_, FreeLists> {
        // The counters and lists are valid after any panic elsewhere.
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Requests huge pages for a range that was not touched yet: a product that reads gigabytes of weights once would
/// otherwise miss the TLB at every 4 KiB. It is only a hint.
#[cfg(target_os = "linux")]
fn ask_for_huge_pages(range: &[MaybeUninit<Line>]) {
    const PAGE: usize = 4096;
    let start = range.as_ptr() as usize;
    let (first, end) = (start.next_multiple_of(PAGE), (start + size_of_val(range)) & !(PAGE - 1));
    if first < end {
        // SAFETY: whole pages inside an allocation that this thread owns; the advice changes no contents.
        unsafe { libc::madvise(first as *mut libc::c_void, end - first, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn ask_for_huge_pages(_: &[MaybeUninit<Line>]) {}

/// Rounds up so that nearby sizes share buffers: at most an eighth is wasted.
fn size_class(lines: usize) -> usize {
    if lines <= 8 {
        return lines.max(1);
    }
    let step = 1 << (lines.ilog2() - 3);
    lines.next_multiple_of(step)
}

/// Words of a [`Pool`], or borrowed from the caller; tensor storage and scratch of kernels.
pub struct Buffer {
    memory: Memory,
    len: usize,
}

enum Memory {
    /// Lines that return to their pool.
    Pooled(Vec<Line>, Arc<Pool>),
    /// Borrowed words, read only.
    Borrowed(NonNull<f32>),
}

// SAFETY: pooled lines are owned; borrowed words are only read, and stay valid by the promise of `borrowed`.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Borrows `len` words for reading.
    ///
    /// # Safety
    /// They must be initialised, aligned for f32, and neither move nor change while the buffer lives.
    pub unsafe fn borrowed(start: NonNull<f32>, len: usize) -> Self {
        Buffer { memory: Memory::Borrowed(start), len }
    }

    /// Whether the words are borrowed, and must not be written.
    pub fn is_borrowed(&self) -> bool {
        matches!(self.memory, Memory::Borrowed(_))
    }
}

/// Views of a buffer's words as `$n` elements of an integer type each.
macro_rules! casts {
    ($($get:ident, $get_mut:ident: $t:ty, $n:expr;)*) => {
        impl Buffer {$(
            pub fn $get(&self) -> &[$t] {
                let words: &[f32] = self;
                // SAFETY: `$n` elements fill a word and need no more alignment, and every bit pattern is valid.
                unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), $n * words.len()) }
            }

            pub fn $get_mut(&mut self) -> &mut [$t] {
                let words: &mut [f32] = self;
                // SAFETY: as above, and every bit pattern is a valid f32; the borrow is exclusive.
                unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), $n * words.len()) }
            }
        )*}
    };
}

casts! {
    as_i32, as_i32_mut: i32, 1;
    as_u32, as_u32_mut: u32, 1;
}

impl Deref for Buffer {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        let start = match &self.memory {
            Memory::Pooled(lines, _) => lines.as_ptr().cast(),
            Memory::Borrowed(start) => start.as_ptr().cast_const(),
        };
        // SAFETY: a `Line` is exactly `LINE` initialised f32, and `len` never exceeds their number; borrowed words
        // are valid by the promise of `borrowed`.
        unsafe { std::slice::from_raw_parts(start, self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        let Memory::Pooled(lines, _) = &mut self.memory else {
            unreachable!("borrowed words are copied before they are written")
        };
        // SAFETY: as above; the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Memory::Pooled(memory, pool) = &mut self.memory else { return };
        let memory = std::mem::take(memory);
        let mut lists = pool.lock();
        lists.stats.in_use -= memory.len() * size_of::<Line>();
        lists.free.entry(memory.len()).or_default().push(memory);
    }
}

impl Storage for Buffer {
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }

    // Every type takes a word per element here, also bfloat16.
    fn holds(&self, len: usize, _: DType) -> bool {
        self.len == len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reuses_a_dropped_buffer() {
        let pool = Pool::new(false);
        let first = pool.take(1000).unwrap();
        let address = first.as_ptr();
        assert_eq!(address as usize % 64, 0);
        drop(first);
        let second = pool.take(990).unwrap();
        assert_eq!(second.as_ptr(), address);
        assert_eq!(second.len(), 990);
        assert_eq!(pool.stats().reserved, pool.stats().in_use);
        drop(second);
        assert_eq!(pool.stats().in_use, 0);
        assert_eq!(pool.stats().peak, pool.stats().reserved);
    }

    #[test]
    fn size_classes_waste_at_most_an_eighth() {
        for lines in 1..5000 {
            let class = size_class(lines);
            assert!(class >= lines && class - lines <= lines / 8, "{lines} -> {class}");
            assert_eq!(size_class(class), class);
        }
    }

    #[test]
    fn rejects_an_allocation_that_is_too_large() {
        let pool = Pool::new(false);
        assert!(pool.take(usize::MAX / 128).is_err());
        assert_eq!(pool.stats().in_use, 0);
    }

    #[test]
    fn poison_fills_buffers_with_nan() {
        let buffer = Pool::new(true).take(5).unwrap();
        assert!(buffer.iter().all(|x| x.is_nan()));
    }
}
