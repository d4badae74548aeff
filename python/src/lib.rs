//! The library behind the Python package `foxlm`: arrays of NumPy and tensors of PyTorch as addresses, shapes and
//! strides in, results written to arrays that the caller allocated.
//!
//! - `array`: one such array; reading it as a tensor, in place where it lies right, and writing to it.
//! - `runtime`: threads and memory of this process, made anew after a fork.
//! - `attention`: forgetting attention, forward and backward; `transition`: PaTH and Wall attention; `scan`: linear
//!   recurrences.
//! - `cuda`: the same on a GPU, on the caller's stream.
//! - `model`: a language model and its engine; `tokenizer`: text to ids and back.

mod array;
mod attention;
mod cuda;
mod errors;
mod model;
mod runtime;
mod scan;
mod tokenizer;
mod transition;

use pyo3::prelude::*;

#[pymodule]
mod _core {
    #[pymodule_export]
    use super::attention::{attention_backward, attention_forward};
    #[pymodule_export]
    use super::cuda::{
        CudaAttention, cuda_memory, cuda_scan_backward, cuda_scan_forward,
        cuda_transition_backward, cuda_transition_forward,
    };
    #[pymodule_export]
    use super::model::{Model, Tokens};
    #[pymodule_export]
    use super::runtime::{set_threads, threads};
    #[pymodule_export]
    use super::scan::{scan_backward, scan_forward};
    #[pymodule_export]
    use super::tokenizer::Tokenizer;
    #[pymodule_export]
    use super::transition::{transition_backward, transition_forward};

    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
