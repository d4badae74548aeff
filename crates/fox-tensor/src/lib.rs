//! Tensors, devices, fused ops, automatic differentiation (the tape), and an f64 oracle for every op.
//!
//! A [`Tensor`] is contiguous and row-major: a shape, a [`DType`] and storage that belongs to a [`Device`].
//! There are no strided views and few elementwise ops; a device implements some twenty *fused* ops as `_fwd` / `_bwd`
//! pairs. Each op is one small trait ([`LinearOps`], [`AttentionOps`], ...), and a [`Backend`] is the sum of these traits,
//! of [`Memory`] and of optional capabilities ([`Caps`]). Every method validates its operands once, so no safe call causes
//! undefined behaviour. A [`Tape`] runs the forward pass, saves what the backward pass needs and runs it in reverse;
//! [`CustomOp`] adds an op outside this crate. [`naive`] implements every op in f64 with plain loops: it is documentation
//! and test oracle.
//!
//! Activations are matrices of `rows` tokens: a batch `[B, T, C]` is passed as `[B*T, C]`, and
//! [`Segments`] says which rows form a sequence: padding, packed documents and decoding against a
//! KV cache differ in their segments only.
//!
//! A product with its gradient, on the oracle:
//!
//! ```
//! use fox_tensor::{Device, Gradients, Tape};
//!
//! let device = Device::naive();
//! let mut tape = Tape::recording(&device);
//! let x = tape.leaf(device.from_f32(&[1.0, 2.0], [1, 2])?);              // [rows, in]
//! let w = tape.leaf(device.from_f32(&[3.0, 4.0, 5.0, 6.0], [2, 2])?);    // [out, in]
//! let y = tape.linear(&x, &w, None)?;                                    // [rows, out]
//! assert_eq!(y.value().to_f32()?, [11.0, 17.0]);
//!
//! let dy = device.from_f32(&[1.0, 0.0], [1, 2])?;
//! let gradients = tape.backward_from(&[(y, dy)], &[x, w], &mut Gradients::default())?;
//! assert_eq!(gradients[0].as_ref().ok_or("no gradient")?.to_f32()?, [3.0, 4.0]);
//! assert_eq!(gradients[1].as_ref().ok_or("no gradient")?.to_f32()?, [1.0, 2.0, 0.0, 0.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `fox-cpu` shows attention with forget gates in the same way.

mod backend;
mod caps;
pub mod cases;
mod check;
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

pub use backend::{Backend, DeviceKind, OpTime, Span};
pub use caps::Caps;
pub use device::Device;
pub use error::{Error, Result};
pub use memory::{
    IdRange, Memory, MemoryStats, Storage, check_add, check_copy_columns, check_copy_rows,
    check_download, check_fill, check_ints,
};
pub use ops::*;
pub use segments::{Segment, Segments};
pub use shape::{DType, Shape};
pub use tape::{
    BucketSink, CustomOp, ExtendedKeys, Gradients, LocalKeys, ParamId, PendingKeys, PrecedingRows,
    Tape, Var,
};
pub use tensor::Tensor;
