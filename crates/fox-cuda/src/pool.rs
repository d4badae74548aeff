//! A caching allocator for device memory.
//!
//! All work goes to one stream, so a dropped buffer may be reused at once: pending work on it comes earlier in the
//! stream.

use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{result, sys};
use fox_tensor::{DType, MemoryStats};

use crate::arena::Arena;
use crate::{Error, Result};

/// Elements of a buffer: plain data for which every bit pattern is valid.
pub trait Element: bytemuck::AnyBitPattern + bytemuck::NoUninit {}
impl<T: bytemuck::AnyBitPattern + bytemuck::NoUninit> Element for T {}

/// Types of activations.
pub trait Float: Element {
    /// Whether it is f32 rather than bf16.
    const WIDE: bool;
    /// The element type of its tensors.
    const DTYPE: DType = if Self::WIDE { DType::F32 } else { DType::Bf16 };
}
impl Float for f32 {
    const WIDE: bool = true;
}
impl Float for half::bf16 {
    const WIDE: bool = false;
}

/// Granularity of requests in bytes, and the alignment that tensor maps need.
const UNIT: usize = 512;
/// Largest small request; small requests have a separate arena, so that they do not fragment the other.
const SMALL: usize = 1 << 20;
/// Granularity of driver allocations.
const PAGE: usize = 2 << 20;
/// Smallest request that gets a dedicated driver allocation.
const LARGE: usize = 32 << 20;
/// Sizes of driver allocations for small and medium requests.
const SMALL_BLOCK: usize = 8 << 20;
const BLOCK: usize = 64 << 20;

pub(crate) struct Pool {
    stream: sys::CUstream,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    small: Arena,
    large: Arena,
    stats: MemoryStats,
    poison: bool,
}

impl State {
    fn arena(&mut self, bytes: usize) -> &mut Arena {
        if bytes <= SMALL { &mut self.small } else { &mut self.large }
    }
}

// SAFETY: the stream handle may be used from any thread; the rest is behind a mutex.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

fn rounded(bytes: usize) -> usize {
    bytes.max(1).next_multiple_of(UNIT)
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
        let bytes = rounded(len * size_of::<T>());
        let address = match pool.take(bytes) {
            Some(address) => address,
            None => pool.take_fresh(bytes)?,
        };
        let mut state = pool.state();
        state.stats.in_use += bytes;
        state.stats.peak = state.stats.peak.max(state.stats.in_use);
        let poison = state.poison;
        drop(state);
        let (pool, element) = (Arc::clone(pool), PhantomData);
        let buffer = Buffer { address, bytes, len, pool, lent: false, element };
        if poison {
            buffer.set_bytes(0xff)?;
        }
        Ok(buffer)
    }

    fn take(&self, bytes: usize) -> Option<sys::CUdeviceptr> {
        self.state().arena(bytes).take(bytes)
    }

    /// A range of a new block.
    fn take_fresh(&self, bytes: usize) -> Result<sys::CUdeviceptr> {
        let block = match bytes {
            _ if bytes <= SMALL => SMALL_BLOCK,
            _ if bytes < LARGE => BLOCK,
            _ => bytes,
        };
        self.take_of_block(bytes, block.next_multiple_of(PAGE)).or_else(|_| {
            // Releases unused blocks and asks for no more than needed.
            self.release_free();
            self.take_of_block(bytes, bytes.next_multiple_of(PAGE))
        })
    }

    fn take_of_block(&self, bytes: usize, block: usize) -> Result<sys::CUdeviceptr> {
        // SAFETY: a context is current (`Gpu::alloc` binds it); the block is freed exactly once.
        let outcome = unsafe { result::malloc_sync(block) };
        let mut state = self.state();
        let reserved = state.stats.reserved;
        let full = Error::OutOfMemory { bytes, reserved };
        let address = match outcome {
            Ok(address) => address,
            Err(e) if e.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => return Err(full),
            Err(e) => return Err(Error::driver("cuMemAlloc", e)),
        };
        state.stats.reserved += block;
        let arena = state.arena(bytes);
        arena.add_block(address, block);
        arena.take(bytes).ok_or(full)
    }

    /// Returns unused blocks to the driver.
    pub(crate) fn release_free(&self) {
        let mut state = self.state();
        let mut unused = state.small.remove_unused();
        unused.extend(state.large.remove_unused());
        for (address, bytes) in unused {
            state.stats.reserved -= bytes;
            // SAFETY: allocated by `take_of_block`, not in use. Freeing waits for the device.
            let _ = unsafe { result::free_sync(address) };
        }
    }
}

/// Device memory for `len` elements. Returns to the pool when dropped.
pub struct Buffer<T> {
    address: sys::CUdeviceptr,
    bytes: usize,
    len: usize,
    pool: Arc<Pool>,
    /// Whether the memory is foreign and not returned to the pool.
    lent: bool,
    element: PhantomData<T>,
}

impl<T> Buffer<T> {
    /// A buffer over `len` elements of foreign memory.
    ///
    /// # Safety
    /// The elements must lie on the pool's GPU and stay valid while the buffer and the work queued on it live.
    pub(crate) unsafe fn lent(pool: &Arc<Pool>, address: u64, len: usize) -> Self {
        let (bytes, pool) = (len * size_of::<T>(), Arc::clone(pool));
        Buffer { address, bytes, len, pool, lent: true, element: PhantomData }
    }

    /// The device address.
    pub fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn is_of(&self, pool: &Arc<Pool>) -> bool {
        Arc::ptr_eq(&self.pool, pool)
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
        if self.lent {
            return;
        }
        let mut state = self.pool.state();
        state.stats.in_use -= self.bytes;
        state.arena(self.bytes).put(self.address, self.bytes);
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
    fn sizes_are_rounded_up() {
        assert_eq!([rounded(0), rounded(512), rounded(513)], [512, 512, 1024]);
    }
}
