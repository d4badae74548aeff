//! Attention and scans on a GPU, on the caller's stream and memory.
//!
//! Everything here takes addresses of contiguous tensors. The package makes them so; it copies nothing that lies in
//! order already, whether heads come before time or after.

mod attention;
mod scan;
mod transition;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use fox_cuda::{Cuda, Gpu, Precision};
use fox_tensor::{DType, Device};
use pyo3::exceptions::{PyMemoryError, PyRuntimeError};
use pyo3::prelude::*;

pub use attention::CudaAttention;
pub use scan::{cuda_scan_backward, cuda_scan_forward};
pub use transition::{cuda_transition_backward, cuda_transition_forward};

/// A GPU and one CUDA stream of the caller, which orders kernels and scratch memory.
struct Session {
    gpu: Arc<Gpu>,
    narrow: Device,
    wide: Device,
}

impl Session {
    /// The device that computes in f32 or bf16, and its type.
    fn device(&self, wide: bool) -> (&Device, DType) {
        if wide { (&self.wide, DType::F32) } else { (&self.narrow, DType::Bf16) }
    }
}

/// Ordinal of the GPU, and the handle of its CUDA stream.
type StreamKey = (usize, u64);

static SESSIONS: Mutex<Option<HashMap<StreamKey, Arc<Session>>>> = Mutex::new(None);

fn fail(error: fox_cuda::Error) -> PyErr {
    let words = error.to_string();
    match error {
        fox_cuda::Error::OutOfMemory { .. } => PyMemoryError::new_err(words),
        _ => PyRuntimeError::new_err(words),
    }
}

fn session(key: StreamKey) -> PyResult<Arc<Session>> {
    let mut sessions = SESSIONS.lock().unwrap_or_else(PoisonError::into_inner);
    let sessions = sessions.get_or_insert_default();
    if let Some(session) = sessions.get(&key) {
        return Ok(Arc::clone(session));
    }
    // SAFETY: PyTorch's streams belong to the primary context and are never destroyed.
    let gpu = Arc::new(unsafe { Gpu::on_stream(key.0, key.1) }.map_err(fail)?);
    let device = |precision| -> PyResult<Device> {
        Ok(Device::new(Cuda::new(Arc::clone(&gpu), precision).map_err(fail)?))
    };
    let (narrow, wide) = (device(Precision::Bf16)?, device(Precision::F32)?);
    let session = Arc::new(Session { gpu, narrow, wide });
    sessions.insert(key, Arc::clone(&session));
    Ok(session)
}

/// Bytes of scratch memory of all CUDA streams, not counting PyTorch's allocations.
#[pyfunction]
pub fn cuda_memory() -> usize {
    let sessions = SESSIONS.lock().unwrap_or_else(PoisonError::into_inner);
    let all = sessions.iter().flat_map(HashMap::values);
    all.map(|session| session.gpu.memory().reserved).sum()
}
