//! Collectives between the devices of several ranks: an optional capability.
//!
//! Collectives run on a separate CUDA stream: after all work that was queued before them, and overlapped with the work
//! that is queued afterwards, until [`PeerOps::finish_collectives`].

use crate::{Result, Tensor};

/// Rank of a process, world size, and how the ranks share machines and devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankInfo {
    /// Rank of this process.
    pub rank: usize,
    /// World size.
    pub size: usize,
    /// Whether another rank uses the same device.
    pub shares_device: bool,
    /// Whether all ranks are on one machine.
    pub one_machine: bool,
}

/// The rank that owns a tensor, and this rank's tensor of the same shape and type.
pub type OwnedTensor<'a> = (usize, &'a mut Tensor);

/// Reduce and broadcast between the devices of all ranks without the host. All ranks call the same methods in the same
/// order with tensors of the same shapes.
///
/// Tensors passed to `begin_...` must be neither dropped nor written until [`PeerOps::finish_collectives`].
pub trait PeerOps {
    /// Identifies this device among all devices of all ranks.
    fn peer_identity(&self) -> Result<Vec<u8>>;

    /// The bootstrap id that rank 0, described by `place`, distributes to all ranks.
    fn peer_bootstrap_id(&self, place: RankInfo) -> Result<Vec<u8>>;

    /// Connects this device with those of all ranks; waits for them. Returns a description of the transport.
    fn join_peers(&self, place: RankInfo, invitation: &[u8]) -> Result<String>;

    /// Starts a reduction of every real tensor to its owner: the sum over all ranks in f32, in the order of a binary tree
    /// whose left half is the largest power of two: `(0 + 1) + (2 + 3)`.
    fn begin_reduce(&self, tensors: &mut [OwnedTensor<'_>]) -> Result<()>;

    /// Starts a broadcast of every tensor from its owner. Weights must have the same packing on all ranks.
    fn begin_broadcast(&self, tensors: &mut [OwnedTensor<'_>]) -> Result<()>;

    /// Orders all work queued from now on after the collectives. The host does not wait.
    fn finish_collectives(&self) -> Result<()>;

    /// Aborts all collectives, also those that another thread waits for; their results are undefined. All later calls
    /// fail.
    fn abort_collectives(&self);
}
