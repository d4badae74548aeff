//! Copies between host and device, and within the device.

use std::ptr;
use std::sync::PoisonError;

use cudarc::driver::result;

use crate::pool::{Buffer, Element};
use crate::{Error, Gpu, Result};

/// Bytes of the page-locked staging buffer; smaller downloads go through it.
const STAGING: usize = 4 << 20;

/// Page-locked memory of the host: the device copies to it without help from the driver.
pub(crate) struct PageLocked {
    start: ptr::NonNull<u8>,
    len: usize,
}

// SAFETY: the memory belongs to the value alone, and may be freed from any thread.
unsafe impl Send for PageLocked {}

impl PageLocked {
    /// `len` bytes of 0; the GPU's context must be current.
    pub(crate) fn new(len: usize) -> Result<Self> {
        // SAFETY: a context is current; freed in `drop`.
        let start = unsafe { result::malloc_host(len, 0) }
            .map_err(|e| Error::driver("cuMemHostAlloc", e))?;
        let start = ptr::NonNull::new(start.cast())
            .ok_or_else(|| Error::driver("cuMemHostAlloc", "no memory"))?;
        // SAFETY: all of it was just allocated.
        unsafe { start.write_bytes(0, len) };
        Ok(PageLocked { start, len })
    }

    /// All of it; the device must not be writing to it.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: allocated and initialised in `new`, and borrowed as long as `self`.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for PageLocked {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`, freed once.
        let _ = unsafe { result::free_host(self.start.as_ptr().cast()) };
    }
}

/// Page-locked memory for downloads, allocated when it is first needed.
#[derive(Default)]
pub(crate) struct Staging(Option<PageLocked>);

impl Staging {
    fn slice(&mut self) -> Result<&mut [u8]> {
        let memory = match self.0.take() {
            Some(memory) => memory,
            None => PageLocked::new(STAGING)?,
        };
        Ok(self.0.insert(memory).bytes())
    }
}

impl Gpu {
    /// Copies host values to a new buffer.
    pub fn upload<T: Element>(&self, values: &[T]) -> Result<Buffer<T>> {
        let buffer = self.alloc(values.len())?;
        if values.is_empty() {
            return Ok(buffer);
        }
        // SAFETY: the buffer has room for all the values; copies from pageable memory return only
        // when the source has been read.
        unsafe { result::memcpy_htod_async(buffer.address(), values, self.stream()) }
            .map_err(|e| Error::driver("cuMemcpyHtoDAsync", e))?;
        Ok(buffer)
    }

    /// Copies host values to a device address.
    ///
    /// # Safety
    /// The range must belong to a live buffer of this GPU.
    pub(crate) unsafe fn write<T: Element>(&self, address: u64, values: &[T]) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller vouches for the range; as in `upload`.
        unsafe { result::memcpy_htod_async(address, values, self.stream()) }
            .map_err(|e| Error::driver("cuMemcpyHtoDAsync", e))
    }

    /// Copies values at a device address to the host; waits for the stream.
    ///
    /// # Safety
    /// The range must belong to a live buffer of this GPU.
    pub(crate) unsafe fn read<T: Element>(&self, address: u64, values: &mut [T]) -> Result<()> {
        self.bind()?;
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let pinned = staging.slice()?;
        for (n, part) in bytemuck::cast_slice_mut::<T, u8>(values).chunks_mut(STAGING).enumerate() {
            let from = address + (n * STAGING) as u64;
            // SAFETY: the caller vouches for the range; the staging memory is locked until the values were taken out.
            unsafe { result::memcpy_dtoh_async(&mut pinned[..part.len()], from, self.stream()) }
                .map_err(|e| Error::driver("cuMemcpyDtoHAsync", e))?;
            self.synchronize()?;
            part.copy_from_slice(&pinned[..part.len()]);
        }
        Ok(())
    }

    /// Copies a buffer to the host; waits for the stream.
    pub fn download<T: Element>(&self, buffer: &Buffer<T>) -> Result<Vec<T>> {
        let mut values = vec![T::zeroed(); buffer.len()];
        self.download_into(buffer, &mut values)?;
        Ok(values)
    }

    /// [`Gpu::download`] into existing memory of the buffer's length.
    pub(crate) fn download_into<T: Element>(
        &self,
        buffer: &Buffer<T>,
        values: &mut [T],
    ) -> Result<()> {
        if values.len() != buffer.len() {
            return Err(Error::argument(
                "download",
                format!("{} values into memory for {}", buffer.len(), values.len()),
            ));
        }
        self.bind()?;
        let bytes = size_of_val(values);
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes > STAGING {
            // SAFETY: source and destination have the same length, and `values` lives until the
            // synchronisation below.
            unsafe { result::memcpy_dtoh_async(values, buffer.address(), self.stream()) }
                .map_err(|e| Error::driver("cuMemcpyDtoHAsync", e))?;
            return self.synchronize();
        }
        let pinned = staging.slice()?;
        // SAFETY: as above; the staging memory is locked until the values were taken out of it.
        unsafe { result::memcpy_dtoh_async(&mut pinned[..bytes], buffer.address(), self.stream()) }
            .map_err(|e| Error::driver("cuMemcpyDtoHAsync", e))?;
        self.synchronize()?;
        bytemuck::cast_slice_mut::<T, u8>(values).copy_from_slice(&pinned[..bytes]);
        Ok(())
    }

    /// Copies `bytes` from one device address to another.
    ///
    /// # Safety
    /// Both ranges must belong to live buffers of this GPU.
    pub(crate) unsafe fn copy(&self, dst: u64, src: u64, bytes: usize) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller vouches for the ranges.
        unsafe { result::memcpy_dtod_async(dst, src, bytes, self.stream()) }
            .map_err(|e| Error::driver("cuMemcpyDtoDAsync", e))
    }

    /// A copy of a buffer.
    pub(crate) fn copy_of<T: Element>(&self, buffer: &Buffer<T>) -> Result<Buffer<T>> {
        let copy = self.alloc(buffer.len())?;
        // SAFETY: both are live and have the same length.
        unsafe { self.copy(copy.address(), buffer.address(), buffer.len() * size_of::<T>()) }?;
        Ok(copy)
    }
}
