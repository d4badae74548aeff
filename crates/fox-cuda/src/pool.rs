//! Device memory that is kept for reuse.
//!
//! All work goes to one stream, so a buffer that was dropped may be handed out again at once: whatever
//! still runs on it comes earlier in the stream.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{result, sys};
use fox_tensor::MemoryStats;

use crate::{Error, Result};

/// What a buffer may hold: plain bits, of which all patterns are values.
pub trait Element: bytemuck::AnyBitPattern + bytemuck::NoUninit {}
impl<T: bytemuck::AnyBitPattern + bytemuck::NoUninit> Element for T {}

/// Types of activations.
pub trait Float: Element {
    /// Whether it is f32 rather than bf16.
    const WIDE: bool;
}
impl Float for f32 {
    const WIDE: bool = true;
}
impl Float for half::bf16 {
    const WIDE: bool = false;
}

/// Small requests are rounded up to this, which is also the alignment that tensor maps need.
const SMALL: usize = 512;
/// Requests above this are rounded up to it: few sizes, much reuse.
const LARGE: usize = 2 << 20;

pub(crate) struct Pool {
    stream: sys::CUstream,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Free blocks by size.
    free: BTreeMap<usize, Vec<sys::CUdeviceptr>>,
    stats: MemoryStats,
    poison: bool,
}

// SAFETY: the stream handle may be used from any thread; the rest is behind a mutex.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

fn rounded(bytes: usize) -> usize {
    let unit = if bytes > LARGE { LARGE } else { SMALL };
    bytes.max(1).next_multiple_of(unit)
}

impl Pool {
    pub(crate) fn new(stream: sys::CUstream) -> Self {
        Pool { stream, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        self.state().stats
    }

    pub(crate) fn reset_peak(&self) {
        let mut state = self.state();
        state.stats.peak = state.stats.in_use;
    }

    pub(crate) fn poison(&self, on: bool) {
        self.state().poison = on;
    }

    pub(crate) fn alloc<T: Element>(pool: &Arc<Pool>, len: usize) -> Result<Buffer<T>> {
        let want = rounded(len * size_of::<T>());
        let (address, bytes) = match pool.take_free(want) {
            Some(block) => block,
            None => (pool.take_fresh(want)?, want),
        };
        let mut state = pool.state();
        state.stats.in_use += bytes;
        state.stats.peak = state.stats.peak.max(state.stats.in_use);
        let poison = state.poison;
        drop(state);
        let buffer = Buffer { address, bytes, len, pool: Arc::clone(pool), element: PhantomData };
        if poison {
            buffer.set_bytes(0xff)?;
        }
        Ok(buffer)
    }

    /// The smallest free block that fits and wastes less than half of itself.
    fn take_free(&self, want: usize) -> Option<(sys::CUdeviceptr, usize)> {
        let mut state = self.state();
        let (&bytes, blocks) = state.free.range_mut(want..=want * 2).next()?;
        let address = blocks.pop()?;
        if blocks.is_empty() {
            state.free.remove(&bytes);
        }
        Some((address, bytes))
    }

    fn take_fresh(&self, bytes: usize) -> Result<sys::CUdeviceptr> {
        // SAFETY: a context is current (`Gpu::alloc` binds it); the block is freed exactly once.
        let mut outcome = unsafe { result::malloc_sync(bytes) };
        if outcome.is_err() {
            self.release_free();
            // SAFETY: as above.
            outcome = unsafe { result::malloc_sync(bytes) };
        }
        let mut state = self.state();
        let reserved = state.stats.reserved;
        let address = outcome.map_err(|e| match e.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => Error::OutOfMemory { bytes, reserved },
            _ => Error::driver("cuMemAlloc", e),
        })?;
        state.stats.reserved += bytes;
        Ok(address)
    }

    /// Gives what is not in use back to the driver.
    pub(crate) fn release_free(&self) {
        let free = std::mem::take(&mut self.state().free);
        for (bytes, blocks) in free {
            for address in blocks {
                self.state().stats.reserved -= bytes;
                // SAFETY: allocated by `take_fresh`, not in use. Freeing waits for the device.
                let _ = unsafe { result::free_sync(address) };
            }
        }
    }
}

/// Device memory for `len` elements. Returns to the pool when dropped.
pub struct Buffer<T> {
    address: sys::CUdeviceptr,
    bytes: usize,
    len: usize,
    pool: Arc<Pool>,
    element: PhantomData<T>,
}

impl<T> Buffer<T> {
    /// Where it lies on the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn set_bytes(&self, value: u8) -> Result<()> {
        // SAFETY: the block has `bytes` bytes and belongs to this buffer.
        unsafe { result::memset_d8_async(self.address, value, self.bytes, self.pool.stream) }
            .map_err(|e| Error::driver("cuMemsetD8Async", e))
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        let mut state = self.pool.state();
        state.stats.in_use -= self.bytes;
        state.free.entry(self.bytes).or_default().push(self.address);
    }
}

impl<T> std::fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} x {} bytes)", self.len, size_of::<T>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_rounded_to_few_classes() {
        assert_eq!(rounded(0), SMALL);
        assert_eq!(rounded(513), 2 * SMALL);
        assert_eq!(rounded(LARGE), LARGE);
        assert_eq!(rounded(LARGE + 1), 2 * LARGE);
    }
}
