//! The optional abilities of a device.

use std::fmt;

use crate::{
    BATCH_INVARIANT_ROWS, DType, LinearGroupOps, PackOps, PagedOps, PeerOps, RecomputeOps,
    SlotDecodeOps,
};

/// The optional abilities of a device. The default has none of them and computes in f32.
#[derive(Clone, Copy)]
pub struct Caps<'a> {
    /// The type of activations and of the KV cache.
    pub activation_type: DType,
    /// Largest batch of a decode step that runs op by op.
    pub decode_batch: usize,
    /// Whether the first launch of an op compiles it, so that a warm-up saves time later.
    pub compiles_kernels: bool,
    /// Recomputation of cheap results in the backward pass, on devices that save memory this way.
    pub recompute: Option<&'a dyn RecomputeOps>,
    /// Several narrow linear layers in one launch.
    pub linear_group: Option<&'a dyn LinearGroupOps>,
    /// Quantized weights.
    pub packing: Option<&'a dyn PackOps>,
    /// Attention over pages without gathering them.
    pub paged: Option<&'a dyn PagedOps>,
    /// Decode steps of sequences whose state stays on the device.
    pub slots: Option<&'a dyn SlotDecodeOps>,
    /// Send and receive of tensors between devices of several processes.
    pub peers: Option<&'a dyn PeerOps>,
}

impl Default for Caps<'_> {
    fn default() -> Self {
        Caps {
            activation_type: DType::F32,
            decode_batch: BATCH_INVARIANT_ROWS,
            compiles_kernels: false,
            recompute: None,
            linear_group: None,
            packing: None,
            paged: None,
            slots: None,
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
            .field("compiles_kernels", &self.compiles_kernels)
            .field("recompute", &self.recompute.is_some())
            .field("linear_group", &self.linear_group.is_some())
            .field("packing", &self.packing.is_some())
            .field("paged", &self.paged.is_some())
            .field("slots", &self.slots.is_some())
            .field("peers", &self.peers.is_some())
            .finish()
    }
}
