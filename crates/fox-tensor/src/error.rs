//! The engine's error: one enum that carries the op and the shapes.

use crate::{DType, Shape};

/// What can go wrong in the engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor's shape does not fit the op.
    #[error("{op}: {what} has shape {got}, expected {expected}")]
    Shape {
        /// The op that was asked for.
        op: &'static str,
        /// Which argument.
        what: &'static str,
        /// Its shape.
        got: Shape,
        /// The shape that would fit, in words or numbers.
        expected: String,
    },
    /// A tensor's element type does not fit the op.
    #[error("{op}: {what} has type {got}, expected {expected}")]
    Type {
        /// The op that was asked for.
        op: &'static str,
        /// Which argument.
        what: &'static str,
        /// Its type.
        got: DType,
        /// The type that would fit.
        expected: DType,
    },
    /// Two tensors of one op live on different devices.
    #[error("{op}: {what} is on {got}, the other operands are on {expected}")]
    DeviceMismatch {
        /// The op that was asked for.
        op: &'static str,
        /// Which argument.
        what: &'static str,
        /// Where it lives.
        got: String,
        /// Where the op runs.
        expected: String,
    },
    /// An argument that is not a tensor is out of range.
    #[error("{op}: {detail}")]
    Argument {
        /// The op that was asked for.
        op: &'static str,
        /// What is wrong and what would be right.
        detail: String,
    },
    /// The device has no implementation of these ops.
    #[error("{device} does not support {what}; use the CPU")]
    Unsupported {
        /// The device.
        device: String,
        /// The ops, in words.
        what: &'static str,
    },
    /// The device has not enough memory.
    #[error("out of memory on {device}: {bytes} bytes were asked for")]
    OutOfMemory {
        /// The device.
        device: String,
        /// The size of the request that failed.
        bytes: usize,
    },
    /// The device itself reported a failure.
    #[error("{device}: {detail}")]
    Device {
        /// The device.
        device: String,
        /// The driver's words.
        detail: String,
    },
}

impl Error {
    /// Shorthand for [`Error::Argument`].
    pub fn argument(op: &'static str, detail: impl Into<String>) -> Self {
        Error::Argument { op, detail: detail.into() }
    }

    /// Shorthand for [`Error::Unsupported`].
    pub fn unsupported(device: &str, what: &'static str) -> Self {
        Error::Unsupported { device: device.to_string(), what }
    }
}

/// Results of the engine.
pub type Result<T> = std::result::Result<T, Error>;
