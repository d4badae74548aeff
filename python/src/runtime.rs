//! Threads and memory of this process.
//!
//! A fork copies memory, but only the thread that called it: a thread pool of the parent would never answer in the
//! child, and a lock that another thread held would never open. So everything that threads share hangs on one
//! pointer with the number of the process beside it, and a child makes its own when it first needs it.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use fox_tensor::Device;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::errors::value_error;

/// What ops need besides their operands. Never freed: a call may still be running on it.
pub struct Runtime {
    process: u32,
    threads: usize,
    pool: rayon::ThreadPool,
    /// The CPU.
    pub device: Device,
    /// The previous runtime, reused when its number of threads is requested again.
    before: Option<&'static Runtime>,
}

static RUNTIME: AtomicPtr<Runtime> = AtomicPtr::new(ptr::null_mut());
/// Threads that were asked for; 0 for all cores.
static THREADS: AtomicUsize = AtomicUsize::new(0);

impl Runtime {
    /// Runs `f` on the threads of this process.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        self.pool.install(f)
    }

    fn new(threads: usize, before: Option<&'static Runtime>) -> PyResult<Self> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|n| format!("foxlm-{n}"))
            .build()
            .map_err(|error| value_error(format!("cannot start {threads} threads: {error}")))?;
        Ok(Runtime {
            process: std::process::id(),
            threads,
            pool,
            device: fox_cpu::device(),
            before,
        })
    }
}

/// What threads stand behind, so that only the process that made it can use it, or end it: a fork has a copy without
/// them.
pub struct Home<T> {
    value: Option<T>,
    process: u32,
}

impl<T> Home<T> {
    /// A value of this process.
    pub fn new(value: T) -> Self {
        Home { value: Some(value), process: std::process::id() }
    }

    /// The value, unless this process is a fork of the one that made it.
    pub fn get(&self) -> PyResult<&T> {
        let here = self.process == std::process::id();
        self.value.as_ref().filter(|_| here).ok_or_else(|| {
            let words = "this model was loaded before a fork; load it in the process that uses it, and only there";
            PyRuntimeError::new_err(words)
        })
    }
}

impl<T> Drop for Home<T> {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // Ending it would wait for threads that are not here.
            std::mem::forget(self.value.take());
        }
    }
}

/// The runtime of this process.
pub fn runtime() -> PyResult<&'static Runtime> {
    let threads = match THREADS.load(Ordering::Relaxed) {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    };
    // SAFETY: what was stored here is never freed; a child of a fork has a copy of it.
    let current: Option<&'static Runtime> = unsafe { RUNTIME.load(Ordering::Acquire).as_ref() };
    let fits = |r: &&Runtime| r.process == std::process::id() && r.threads == threads;
    if let Some(found) = std::iter::successors(current, |r| r.before).find(fits) {
        return Ok(found);
    }
    let fresh = Box::into_raw(Box::new(Runtime::new(threads, current)?));
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
pub fn set_threads(count: i64) -> PyResult<()> {
    let Some(count) = usize::try_from(count).ok().filter(|count| *count <= 4096) else {
        return Err(value_error(format!("{count} threads; use 1 to 4096, or 0 for all cores")));
    };
    THREADS.store(count, Ordering::Relaxed);
    runtime().map(|_| ())
}
