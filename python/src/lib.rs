//! The library behind the Python package `foxlm`: arrays of NumPy and tensors of PyTorch as addresses, shapes and
//! strides in, results written to arrays that the caller allocated.
//!
//! - `array`: one such array; reading it as a tensor, in place where it lies right, and writing to it.
//! - `runtime`: threads and memory of this process, made anew after a fork.
//! - `attention`: forgetting attention, forward and backward.

mod array;
mod attention;
mod errors;
mod runtime;

use pyo3::prelude::*;

#[pymodule]
mod _core {
    #[pymodule_export]
    use super::attention::{attention_backward, attention_forward};
    #[pymodule_export]
    use super::runtime::{set_threads, threads};

    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
