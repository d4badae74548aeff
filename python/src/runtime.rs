//! Threads and memory of this process.
//!
//! A fork copies memory, but only the thread that called it: a thread pool of the parent would never answer in the
//! child, and a lock that another thread held would never open. So everything that threads share hangs on one
//! pointer with the number of the process beside it, and a child makes its own when it first needs it.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use fox_tensor::Device;
use pyo3::prelude::*;

use crate::errors::value_error;

/// What ops need besides their operands.
pub struct Runtime {
    process: u32,
    threads: usize,
    pool: rayon::ThreadPool,
    /// The CPU.
    pub device: Device,
}

static RUNTIME: AtomicPtr<Runtime> = AtomicPtr::new(ptr::null_mut());
/// Threads that were asked for; 0 for all cores.
static THREADS: AtomicUsize = AtomicUsize::new(0);

impl Runtime {
    /// Runs `f` on the threads of this process.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        self.pool.install(f)
    }

    fn new(threads: usize) -> PyResult<Self> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|n| format!("foxlm-{n}"))
            .build()
            .map_err(|error| value_error(format!("cannot start {threads} threads: {error}")))?;
        Ok(Runtime { process: std::process::id(), threads, pool, device: fox_cpu::device() })
    }
}

/// The runtime of this process.
pub fn runtime() -> PyResult<&'static Runtime> {
    let threads = match THREADS.load(Ordering::Relaxed) {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    };
    let current = RUNTIME.load(Ordering::Acquire);
    // SAFETY: what was stored here is never freed; a child of a fork has a copy of it.
    if let Some(found) = unsafe { current.as_ref() }
        && found.process == std::process::id()
        && found.threads == threads
    {
        return Ok(found);
    }
    let fresh = Box::into_raw(Box::new(Runtime::new(threads)?));
    // Another thread may have been faster; either is good, and the one not stored lives on for this call's sake.
    RUNTIME.store(fresh, Ordering::Release);
    // SAFETY: made from a box that is never freed.
    Ok(unsafe { &*fresh })
}

/// Number of threads that ops on the CPU use.
#[pyfunction]
pub fn threads() -> PyResult<usize> {
    Ok(runtime()?.threads)
}

/// Sets the number of threads that ops on the CPU use; 0 for all cores.
#[pyfunction]
pub fn set_threads(count: usize) -> PyResult<()> {
    if count > 4096 {
        return Err(value_error(format!("{count} threads; use at most 4096, or 0 for all cores")));
    }
    THREADS.store(count, Ordering::Relaxed);
    runtime().map(|_| ())
}
