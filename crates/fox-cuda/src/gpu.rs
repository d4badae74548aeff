//! One GPU: its context, its stream, its memory and its compiled kernels.

use std::collections::HashMap;
use std::fmt;
use std::panic::resume_unwind;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use cudarc::driver::{result, sys};

use crate::compile::compile_cached;
use crate::copies::Staging;
use crate::generation::{ComputeCapability, Generation};
use crate::kernel_cache::KernelCache;
use crate::launch::{Kernel, Module};
use crate::pool::{Buffer, Element, Pool};
use crate::source::Source;
use crate::{Error, Result};

pub(crate) type ModuleKey = (Source, Vec<String>);

/// A GPU. All work goes to one stream, in order.
pub struct Gpu {
    name: String,
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    /// Whether this created the stream and destroys it.
    own_stream: bool,
    capability: ComputeCapability,
    processors: u32,
    l2_bytes: usize,
    shared_bytes: usize,
    pool: Arc<Pool>,
    modules: Mutex<HashMap<ModuleKey, Arc<Module>>>,
    kernels: KernelCache,
    pub(crate) staging: Mutex<Staging>,
    pub(crate) attention: crate::attention::LaunchCache,
}

// SAFETY: a CUDA context and its streams may be used from any thread that has made the context current, which every
// method that needs it does; mutable state is behind mutexes.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// Whether the driver library can be loaded.
    pub fn driver_is_present() -> bool {
        // SAFETY: opening a shared library runs its initialisers; the driver's have no requirements.
        unsafe { sys::is_culib_present() }
    }

    /// Opens GPU number `ordinal`.
    pub fn new(ordinal: usize) -> Result<Self> {
        Self::open(ordinal, None)
    }

    /// Opens GPU number `ordinal` on an existing CUDA stream, such as PyTorch's current one; 0 is the default stream.
    ///
    /// # Safety
    /// The stream must belong to the GPU's primary context and outlive this.
    pub unsafe fn on_stream(ordinal: usize, stream: u64) -> Result<Self> {
        Self::open(ordinal, Some(ptr::with_exposed_provenance_mut(stream as usize)))
    }

    /// A buffer over `len` elements of foreign memory.
    ///
    /// # Safety
    /// The elements must lie on this GPU and stay valid while the buffer and the work queued on it live.
    pub unsafe fn borrow<T: Element>(&self, address: u64, len: usize) -> Buffer<T> {
        // SAFETY: the caller's promise.
        unsafe { Buffer::lent(&self.pool, address, len) }
    }

    fn open(ordinal: usize, lent: Option<sys::CUstream>) -> Result<Self> {
        if !Self::driver_is_present() {
            return Err(Error::MissingLibrary {
                library: "libcuda",
                hint: "install the NVIDIA driver, or run on the CPU",
            });
        }
        result::init().map_err(|e| Error::driver("cuInit", e))?;
        let count =
            result::device::get_count().map_err(|e| Error::driver("cuDeviceGetCount", e))?;
        let count = usize::try_from(count).unwrap_or(0);
        if ordinal >= count {
            return Err(Error::NoDevice { ordinal, count });
        }
        let device =
            result::device::get(ordinal as i32).map_err(|e| Error::driver("cuDeviceGet", e))?;
        let name =
            result::device::get_name(device).map_err(|e| Error::driver("cuDeviceGetName", e))?;
        // SAFETY: the device exists; the primary context is released in `drop`.
        let context = unsafe { result::primary_ctx::retain(device) }
            .map_err(|e| Error::driver("cuDevicePrimaryCtxRetain", e))?;
        bind(context)?;
        let stream = match lent {
            Some(stream) => stream,
            None => result::stream::create(result::stream::StreamKind::NonBlocking)
                .map_err(|e| Error::driver("cuStreamCreate", e))?,
        };
        use sys::CUdevice_attribute as A;
        let major = attribute(device, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(device, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let processors = attribute(device, A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let l2 = attribute(device, A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?;
        let shared = attribute(device, A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        Ok(Gpu {
            name,
            device,
            context,
            stream,
            own_stream: lent.is_none(),
            capability: ComputeCapability { major, minor },
            processors: processors.unsigned_abs(),
            l2_bytes: l2.unsigned_abs() as usize,
            shared_bytes: shared.unsigned_abs() as usize,
            pool: Arc::new(Pool::new(stream)),
            modules: Mutex::default(),
            kernels: KernelCache::default(),
            staging: Mutex::default(),
            attention: crate::attention::LaunchCache::default(),
        })
    }

    /// The product name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its generation.
    pub fn generation(&self) -> Generation {
        self.capability.generation()
    }

    /// Shared memory per thread block, in bytes.
    pub(crate) fn shared_bytes(&self) -> usize {
        self.shared_bytes
    }

    /// Number of multiprocessors.
    pub fn processors(&self) -> u32 {
        self.processors
    }

    /// Size of the L2 cache.
    pub(crate) fn l2_bytes(&self) -> usize {
        self.l2_bytes
    }

    /// Memory counters.
    pub fn memory(&self) -> fox_tensor::MemoryStats {
        self.pool.stats()
    }

    /// Free device memory in bytes, as the driver reports it.
    pub fn free_memory(&self) -> Result<usize> {
        self.bind()?;
        result::mem_get_info().map(|(free, _)| free).map_err(|e| Error::driver("cuMemGetInfo", e))
    }

    /// Resets the peak of [`Gpu::memory`] to the current use.
    pub fn reset_peak(&self) {
        self.pool.reset_peak();
    }

    /// Fills every new buffer with NaN bits, so that tests notice reads of uninitialized memory.
    pub fn poison(&self, on: bool) {
        self.pool.poison(on);
    }

    pub(crate) fn stream(&self) -> sys::CUstream {
        self.stream
    }

    pub(crate) fn device(&self) -> sys::CUdevice {
        self.device
    }

    /// Makes this GPU's context current in the calling thread.
    pub(crate) fn bind(&self) -> Result<()> {
        bind(self.context)
    }

    /// Whether a buffer was allocated on this GPU.
    pub(crate) fn owns<T>(&self, buffer: &Buffer<T>) -> bool {
        buffer.is_of(&self.pool)
    }

    /// Memory for `len` elements, contents unspecified.
    pub fn alloc<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        self.bind()?;
        Pool::alloc(&self.pool, len)
    }

    /// Memory for `len` elements, all bits zero.
    pub fn zeros<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        let buffer = self.alloc(len)?;
        self.zero(&buffer)?;
        Ok(buffer)
    }

    /// Clears all bits.
    pub fn zero<T: Element>(&self, buffer: &Buffer<T>) -> Result<()> {
        self.bind()?;
        buffer.set_bytes(0)
    }

    /// Whether the stream is being captured as a graph; true if the driver cannot report it.
    pub(crate) fn is_capturing(&self) -> bool {
        use sys::CUstreamCaptureStatus as Status;
        let mut status = Status::CU_STREAM_CAPTURE_STATUS_ACTIVE;
        // SAFETY: the stream lives as long as `self`, and `status` is valid for writes.
        let outcome = unsafe { sys::cuStreamIsCapturing(self.stream, &mut status) };
        outcome.result().is_err() || status != Status::CU_STREAM_CAPTURE_STATUS_NONE
    }

    /// Waits for all queued work.
    pub fn synchronize(&self) -> Result<()> {
        self.bind()?;
        // SAFETY: the stream lives as long as `self`.
        unsafe { result::stream::synchronize(self.stream) }
            .map_err(|e| Error::driver("cuStreamSynchronize", e))
    }

    /// The function `entry` of `source` for launches on this GPU's stream, from the cache; `defines` are those of the
    /// variant.
    pub(crate) fn cached_kernel<K: PartialEq + Send + Sync + 'static>(
        &self,
        source: Source,
        entry: &'static str,
        variant: K,
        defines: impl FnOnce(&K) -> Vec<String>,
    ) -> Result<Arc<Kernel>> {
        self.bind()?;
        let compile = |variant: &K| self.kernel(source, &defines(variant), entry);
        self.kernels.get(source, entry, variant, compile)
    }

    /// The function `entry` of `source`, compiled with `defines`; compiled and loaded once.
    pub(crate) fn kernel(&self, source: Source, defines: &[String], entry: &str) -> Result<Kernel> {
        self.kernel_on(self.stream, source, defines, entry)
    }

    /// Compiles sources with their defines on all cores and loads them, so that [`Gpu::kernel`] finds them at once.
    pub(crate) fn compile_all(&self, variants: &[ModuleKey]) -> Result<()> {
        self.bind()?;
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let mut missing: Vec<&ModuleKey> = Vec::new();
        for key in variants {
            if !modules.contains_key(key) && !missing.contains(&key) {
                missing.push(key);
            }
        }
        let architecture = self.capability.target();
        let compiled = in_parallel(&missing, |(source, defines)| {
            compile_cached(*source, &architecture, defines)
        });
        for (key, cubin) in missing.into_iter().zip(compiled) {
            let module = Arc::new(Module::load(key.0.name, &cubin?)?);
            modules.insert(key.clone(), module);
        }
        Ok(())
    }

    /// [`Gpu::kernel`] for launches on another stream of this GPU.
    pub(crate) fn kernel_on(
        &self,
        stream: sys::CUstream,
        source: Source,
        defines: &[String],
        entry: &str,
    ) -> Result<Kernel> {
        self.bind()?;
        let key = (source, defines.to_vec());
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let module = match modules.get(&key) {
            Some(module) => Arc::clone(module),
            None => {
                let cubin = compile_cached(source, &self.capability.target(), defines)?;
                let module = Arc::new(Module::load(source.name, &cubin)?);
                modules.insert(key, Arc::clone(&module));
                module
            }
        };
        module.function(entry, stream)
    }
}

/// The results of `work` for all items, in their order, computed on all cores.
fn in_parallel<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut done = Vec::new();
        loop {
            let n = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(n) else { return done };
            done.push((n, work(item)));
        }
    };
    let cores = thread::available_parallelism().map_or(1, usize::from).min(items.len());
    let mut results: Vec<(usize, R)> = thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(worker)).collect();
        let results = threads.into_iter().map(|thread| thread.join());
        results.flat_map(|done| done.unwrap_or_else(|panic| resume_unwind(panic))).collect()
    });
    results.sort_by_key(|(n, _)| *n);
    results.into_iter().map(|(_, result)| result).collect()
}

fn bind(context: sys::CUcontext) -> Result<()> {
    // SAFETY: the context was retained by `Gpu::new` and lives as long as the `Gpu`.
    unsafe { result::ctx::set_current(context) }.map_err(|e| Error::driver("cuCtxSetCurrent", e))
}

fn attribute(device: sys::CUdevice, which: sys::CUdevice_attribute) -> Result<i32> {
    // SAFETY: the device exists.
    unsafe { result::device::get_attribute(device, which) }
        .map_err(|e| Error::driver("cuDeviceGetAttribute", e))
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // Errors in a destructor cannot be reported.
        let _ = self.synchronize();
        self.attention.clear();
        self.kernels.clear();
        if let Ok(mut modules) = self.modules.lock() {
            modules.clear();
        }
        if let Ok(mut staging) = self.staging.lock() {
            *staging = Staging::default();
        }
        self.pool.release_free();
        // SAFETY: created in `open`, not used any more.
        unsafe {
            if self.own_stream {
                let _ = result::stream::destroy(self.stream);
            }
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu({}, {})", self.name, self.capability.target())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parallel_results_are_in_order() {
        let items: Vec<usize> = (0..100).collect();
        let squares: Vec<usize> = items.iter().map(|n| n * n).collect();
        assert_eq!(in_parallel(&items, |n| n * n), squares);
        assert_eq!(in_parallel(&items[..0], |n| n * n), []);
    }

    #[test]
    fn missing_driver_error_names_the_remedy() {
        if Gpu::driver_is_present() {
            return;
        }
        let error = Gpu::new(0).err().map(|e| e.to_string());
        let expected = "libcuda was not found; install the NVIDIA driver, or run on the CPU";
        assert_eq!(error.as_deref(), Some(expected));
    }
}
