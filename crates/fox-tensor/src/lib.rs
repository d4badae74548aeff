//! Tensors, devices, the ops, the tape that gives gradients, and the f64 oracle of every op.
//!
//! A [`Tensor`] is contiguous and row-major: a shape, a [`DType`] and storage that belongs to a [`Device`].
//! There are no strided views and few elementwise ops; a device implements some twenty *fused* ops, each worth a
//! kernel, as `_fwd` / `_bwd` pairs. Each op is one small trait ([`LinearOps`], [`AttentionOps`], ...), and a
//! [`Backend`] is the sum of them, of [`Memory`] and of what the device can do besides ([`Caps`]). A [`Tape`]
//! checks shapes, runs the forward, remembers what the backward needs and walks it back; [`CustomOp`] adds an op
//! from outside. [`naive`] implements every op in f64 with obvious loops: it is documentation and oracle in one.
//!
//! Activations are matrices of `rows` tokens: a batch `[B, T, C]` is passed as `[B*T, C]`, and
//! [`Segments`] says which rows form a sequence. Padding, packed documents and decoding against a
//! cache are all just different segments.

mod activation;
mod backend;
mod caps;
pub mod cases;
mod device;
mod error;
mod memory;
pub mod naive;
mod ops;
mod segments;
mod shape;
pub mod speed;
mod tape;
mod tensor;

pub use activation::Activation;
pub use backend::{Backend, OpTime, Span};
pub use caps::Caps;
pub use device::Device;
pub use error::{Error, Result};
pub use memory::{IdRange, Memory, MemoryStats, Storage};
pub use ops::*;
pub use segments::{Segment, Segments};
pub use shape::{DType, Shape};
pub use tape::{CustomOp, EarlierRows, Gradients, OwnKeys, ParamId, Taker, Tape, Var, WithEarlier};
pub use tensor::Tensor;
