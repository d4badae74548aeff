//! The engine's errors as Python's exceptions, in the engine's words.

use fox_tensor::Error;
use pyo3::PyErr;
use pyo3::exceptions::{PyMemoryError, PyRuntimeError, PyValueError};

/// A `MemoryError` where memory ran out, a `RuntimeError` where the device failed, a `ValueError` otherwise.
pub fn exception(error: Error) -> PyErr {
    let words = error.to_string();
    match error {
        Error::OutOfMemory { .. } => PyMemoryError::new_err(words),
        Error::Device { .. } => PyRuntimeError::new_err(words),
        _ => PyValueError::new_err(words),
    }
}

/// A `ValueError`.
pub fn value_error(words: impl Into<String>) -> PyErr {
    PyValueError::new_err(words.into())
}
