//! What a device can do besides its ops, asked for once.

use std::fmt;

use crate::{
    BATCH_INVARIANT_ROWS, DType, DecodeOps, LinearGroupOps, PackOps, PagedOps, PeerOps,
    RecomputeOps, StreamOps,
};

/// What a device can do besides its ops: facts, and optional traits. The default is a device that has
/// none of them and computes in f32.
#[derive(Clone, Copy)]
pub struct Caps<'a> {
    /// The type of activations: what a decode state is kept in.
    pub activation_type: DType,
    /// Sequences that a decode step takes at once, at most.
    pub decode_batch: usize,
    /// Present where memory is worth more than time: the tape then computes cheap results again.
    pub recompute: Option<&'a dyn RecomputeOps>,
    /// Several narrow linear layers at once.
    pub linear_group: Option<&'a dyn LinearGroupOps>,
    /// Weights in formats of the device's own.
    pub packing: Option<&'a dyn PackOps>,
    /// Attention over pages without gathering them.
    pub paged: Option<&'a dyn PagedOps>,
    /// Decode steps of a whole model.
    pub decode: Option<&'a dyn DecodeOps>,
    /// Decode steps of sequences whose state stays on the device.
    pub streams: Option<&'a dyn StreamOps>,
    /// Exchange of tensors with devices of other processes without the host.
    pub peers: Option<&'a dyn PeerOps>,
}

impl Default for Caps<'_> {
    fn default() -> Self {
        Caps {
            activation_type: DType::F32,
            decode_batch: BATCH_INVARIANT_ROWS,
            recompute: None,
            linear_group: None,
            packing: None,
            paged: None,
            decode: None,
            streams: None,
            peers: None,
        }
    }
}

impl Caps<'_> {
    /// Whether pages hold log gates; see [`PagedOps::gates_in_pages`].
    pub fn gates_in_pages(&self) -> bool {
        self.paged.is_some_and(PagedOps::gates_in_pages)
    }
}

impl fmt::Debug for Caps<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Caps")
            .field("activation_type", &self.activation_type)
            .field("decode_batch", &self.decode_batch)
            .field("recompute", &self.recompute.is_some())
            .field("linear_group", &self.linear_group.is_some())
            .field("packing", &self.packing.is_some())
            .field("paged", &self.paged.is_some())
            .field("decode", &self.decode.is_some())
            .field("streams", &self.streams.is_some())
            .field("peers", &self.peers.is_some())
            .finish()
    }
}
