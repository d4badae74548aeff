//! Errors of the CUDA backend.

use std::fmt::Display;

/// Errors of the CUDA backend.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A library of the driver or the toolkit cannot be opened.
    #[error("{library} was not found; {hint}")]
    MissingLibrary {
        /// The library's name.
        library: &'static str,
        /// What to do.
        hint: &'static str,
    },
    /// There is no such GPU.
    #[error("there is no GPU number {ordinal}: the driver sees {count}")]
    NoDevice {
        /// The number that was asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// A call of the driver failed.
    #[error("{call} failed: {detail}")]
    Driver {
        /// The call, or the kernel and its shapes.
        call: String,
        /// The driver's message.
        detail: String,
    },
    /// A kernel does not compile: a bug in this crate, or a compiler that is too old.
    #[error("kernel {kernel} does not compile for {architecture}:\n{log}")]
    Compile {
        /// Name of the source file.
        kernel: &'static str,
        /// The architecture, e.g. `sm_90a`.
        architecture: String,
        /// The compiler's log.
        log: String,
    },
    /// The device has not enough memory.
    #[error("out of memory on the GPU: {bytes} bytes were asked for, {reserved} are held already")]
    OutOfMemory {
        /// The size of the request.
        bytes: usize,
        /// What this process holds.
        reserved: usize,
    },
    /// A number that a kernel cannot take: its integers have 32 bits, its grids have limits.
    #[error(
        "kernel {kernel}: {field} is {value}, and it can be at most {most}; give the op less at a time"
    )]
    TooLarge {
        /// The kernel, or the table that kernels read.
        kernel: String,
        /// The parameter.
        field: &'static str,
        /// Its value.
        value: usize,
        /// What it can be.
        most: usize,
    },
    /// The arguments of an op do not fit together, or it cannot do what is asked.
    #[error("{op}: {detail}")]
    Argument {
        /// The op.
        op: &'static str,
        /// What is wrong and what would be right.
        detail: String,
    },
}

impl Error {
    /// Shorthand for [`Error::Argument`].
    pub fn argument(op: &'static str, detail: impl Into<String>) -> Self {
        Error::Argument { op, detail: detail.into() }
    }

    pub(crate) fn driver(call: impl Into<String>, detail: impl Display) -> Self {
        Error::Driver { call: call.into(), detail: detail.to_string() }
    }
}

/// Results of the CUDA backend.
pub type Result<T> = std::result::Result<T, Error>;

impl From<Error> for fox_tensor::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::OutOfMemory { bytes, .. } => {
                fox_tensor::Error::OutOfMemory { device: "cuda".into(), bytes }
            }
            Error::Argument { op, detail } => fox_tensor::Error::Argument { op, detail },
            other => fox_tensor::Error::Device { device: "cuda".into(), detail: other.to_string() },
        }
    }
}
