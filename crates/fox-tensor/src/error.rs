//! The engine's error: one enum that carries the op and the shapes.

use crate::{DType, Shape};

/// Errors of tensors, ops and devices.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor's shape does not fit the op.
    #[error("{op}: {what} has shape {got}, expected {expected}")]
    Shape {
        /// The op that was called.
        op: &'static str,
        /// The argument.
        what: &'static str,
        /// Its shape.
        got: Shape,
        /// The expected shape.
        expected: String,
    },
    /// A tensor's element type does not fit the op.
    #[error("{op}: {what} has type {got}, expected {expected}")]
    Type {
        /// The op that was called.
        op: &'static str,
        /// The argument.
        what: &'static str,
        /// Its type.
        got: DType,
        /// The expected type.
        expected: DType,
    },
    /// An operand is on another device than the op.
    #[error("{op}: {what} is on {got}, the other operands are on {expected}")]
    DeviceMismatch {
        /// The op that was called.
        op: &'static str,
        /// The argument.
        what: &'static str,
        /// Its device.
        got: String,
        /// The device that runs the op.
        expected: String,
    },
    /// An argument that is not a tensor is out of range.
    #[error("{op}: {detail}")]
    Argument {
        /// The op that was called.
        op: &'static str,
        /// What is wrong, and the valid values.
        detail: String,
    },
    /// The device has no implementation of these ops.
    #[error("{device} does not support {what}; use the CPU")]
    Unsupported {
        /// The device.
        device: String,
        /// Description of the ops.
        what: &'static str,
    },
    /// The device is out of memory.
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
        /// The message of the driver.
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
