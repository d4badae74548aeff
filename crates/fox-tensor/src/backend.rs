//! The interface of a device: memory, ops and optional capabilities.
//!
//! A device implements [`Memory`], the trait of every op in [`ops`](crate::Ops) and the few methods of
//! [`Backend`] itself. All of these are required, so the compiler lists what a new device lacks; a method
//! that is not implemented yet returns [`Error::unsupported`](crate::Error::unsupported), which the self-test
//! reports. Optional capabilities are traits that [`Backend::caps`] returns; callers fall back to plain ops
//! where one is missing.
//!
//! Every method calls its `check_<method>` function first, which validates devices, types, shapes, segments
//! and token ids. `R` is a number of rows, `C` a width.
//!
//! A gradient that can be accumulated takes `acc: Option<Tensor>` and returns the sum, in place when no other
//! tensor shares the storage of `acc`.

use std::fmt::Debug;

use crate::{Caps, Memory, Ops, Result};

/// Device time of one kind of op.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OpTime {
    /// The op and its direction.
    pub op: &'static str,
    /// Number of calls.
    pub calls: usize,
    /// Total time.
    pub seconds: f64,
}

/// Start and end of one op on a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// The CUDA stream that it ran on: `compute` or `exchange`.
    pub queue: &'static str,
    /// The op and its direction.
    pub op: &'static str,
    /// Seconds from the call of [`Backend::profile`] to the start of the op.
    pub begin: f64,
    /// Seconds from the call of [`Backend::profile`] to the end of the op.
    pub end: f64,
}

/// The kind of hardware that a device computes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceKind {
    /// The f64 oracle.
    Naive,
    /// The cores of the host.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
    /// A device that another crate defines.
    Other,
}

/// A device: its memory, its ops and its optional capabilities.
pub trait Backend: Memory + Ops + Send + Sync + Debug {
    /// Short name for messages, e.g. `cpu`.
    fn name(&self) -> &str;
    /// Kind of the hardware: decides defaults such as chunk sizes, never results.
    fn kind(&self) -> DeviceKind {
        DeviceKind::Other
    }
    /// Optional capabilities, the same at every call.
    fn caps(&self) -> Caps<'_>;
    /// Description of the hardware, e.g. the name of the GPU.
    fn description(&self) -> String {
        self.name().to_string()
    }
    /// Waits until all queued work is done. For measurements: transfers to the host wait by themselves.
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
    /// Starts or stops profiling, where the device supports it.
    fn profile(&self, _on: bool) {}
    /// Times since the last call, longest first; empty where the device does not support profiling.
    fn take_profile(&self) -> Result<Vec<OpTime>> {
        Ok(Vec::new())
    }
    /// The same op by op and CUDA stream by CUDA stream, in launch order.
    fn take_timeline(&self) -> Result<Vec<Span>> {
        Ok(Vec::new())
    }
}
