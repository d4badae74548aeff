//! What a device is: memory, ops, and what it can do besides.
//!
//! A device implements [`Memory`], the trait of every op in [`ops`](crate::Ops) and the few methods of
//! [`Backend`] itself. All of these are required, so the compiler names what a new device still lacks;
//! one under construction answers [`Error::unsupported`](crate::Error::unsupported), which the self-test
//! lists as such. Whatever a device need not have is an optional trait that it hands out through
//! [`Backend::caps`]: whoever wants it asks there, once, and goes the plain way where it is missing.
//!
//! Backends may assume that shapes, types and segments were checked: the [`Tape`](crate::Tape) does
//! that once for all of them. `R` is a number of rows, `C` a width.
//!
//! A gradient that may add to one that exists already takes `acc: Option<Tensor>` and returns the
//! sum: the backend writes in place when nobody else holds `acc`.

use std::fmt::Debug;

use crate::{Caps, Memory, Ops, Result};

/// The time that a device spent on one kind of op.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OpTime {
    /// The op and its direction.
    pub op: &'static str,
    /// How often it ran.
    pub calls: usize,
    /// In all.
    pub seconds: f64,
}

/// When an op ran on a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// The queue that it ran on: `compute` or `exchange`.
    pub queue: &'static str,
    /// The op and its direction.
    pub op: &'static str,
    /// Seconds from the call of [`Backend::profile`] to its begin.
    pub begin: f64,
    /// And to its end.
    pub end: f64,
}

/// A device: its memory, its ops, and what it can do besides.
pub trait Backend: Memory + Ops + Send + Sync + Debug {
    /// Short name for messages, e.g. `cpu`.
    fn name(&self) -> &str;
    /// What it can do besides its ops. The answer never changes.
    fn caps(&self) -> Caps<'_>;
    /// The machine behind it in words, e.g. the GPU's name.
    fn description(&self) -> String {
        self.name().to_string()
    }
    /// Waits until everything that was asked for is done. For measurements: ops that hand values to the
    /// host wait by themselves.
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
    /// Begins or ends noting the time of every op, where the device can tell.
    fn profile(&self, _on: bool) {}
    /// What was noted since the last call, the longest first; nothing where the device cannot tell.
    fn take_profile(&self) -> Result<Vec<OpTime>> {
        Ok(Vec::new())
    }
    /// The same op by op, queue by queue, in the order in which they were asked for.
    fn take_timeline(&self) -> Result<Vec<Span>> {
        Ok(Vec::new())
    }
}
