//! The engine's contract: tensors, devices, the backend trait, the tape that gives gradients, and
//! the f64 oracle of every op.
//!
//! The design in one paragraph. A [`Tensor`] is contiguous and row-major: a shape, a [`DType`] and
//! storage that belongs to a [`Device`]. There are no strided views and no zoo of elementwise ops;
//! a [`Backend`] implements a few dozen *fused* ops, each worth a kernel, as `_fwd` / `_bwd` pairs.
//! A [`Tape`] checks shapes, runs the forward, remembers what the backward needs and walks it back.
//! [`naive`] implements every op in f64 with obvious loops: it is documentation and oracle in one.
//!
//! Activations are matrices of `rows` tokens: a batch `[B, T, C]` is passed as `[B*T, C]`, and
//! [`Segments`] says which rows form a sequence. Padding, packed documents and decoding against a
//! cache are all just different segments.

mod backend;
mod baseline;
pub mod cases;
mod decode;
mod device;
mod error;
pub mod naive;
mod paged;
mod paged_attention;
mod results;
mod segments;
mod shape;
mod spec;
pub mod speed;
mod tape;
mod tensor;

pub use backend::{Backend, EXACT_ROWS, IGNORE_LABEL, INT8_BLOCK, Storage, WeightFormat};
pub use baseline::{
    BaselineOps, ConvGrads, ConvInputs, ConvSpec, HgrnGates, HgrnGrads, HgrnInputs, L2Norm,
    ScanGrads, ScanInputs, ScanKeep, ScanOut, ScanSpec, TimeStepInputs, Update,
};
pub use decode::{
    DecodeBlock, DecodeKeys, DecodeOut, DecodeProjection, DecodeShape, DecodeStep, LastRows,
};
pub use device::Device;
pub use error::{Error, Result};
pub use paged::{KeyPages, LayerPages, Lease, NewKeys, PAGE, Page, PageMeter, PageTable};
pub use paged_attention::{PagedSpec, gathered_attention};
pub use results::{
    AttentionGrads, AttentionOut, HeadGrads, LossOut, MemoryStats, OpTime, ParamUpdate,
};
pub use segments::{Segment, Segments};
pub use shape::{DType, Shape};
pub use spec::{
    Acp, Activation, AdamW, AttentionInputs, AttentionSpec, AttentionWeights, GatedNormInputs,
    HeadInputs, HeadSpec, LogitBound, Mask, Rope, STICK_USED_UP,
};
pub use tape::{Gradients, ParamId, ScanVars, Tape, Var};
pub use tensor::Tensor;
