//! Tensors from device to device between processes: an optional ability.
//!
//! Work of this trait goes to a queue of its own, beside the ops: what is begun runs after everything that was asked
//! for before, and together with what is asked for afterwards, until [`PeerOps::finish_collectives`].

use crate::{Result, Tensor};

/// Where a process stands among its peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankInfo {
    /// Number of this process.
    pub rank: usize,
    /// Number of processes.
    pub size: usize,
    /// Whether another process computes on the same device.
    pub shares_device: bool,
    /// Whether all processes are on one machine.
    pub one_machine: bool,
}

/// A tensor that all processes have in the same shape and type, and the process that it belongs to.
pub type OwnedTensor<'a> = (usize, &'a mut Tensor);

/// Exchange of tensors with other processes without the host. All processes call the same methods in the same order with
/// tensors of the same shapes.
///
/// The memory of tensors that were given to `begin_...` must stay until [`PeerOps::finish_collectives`], and nobody may
/// write to it.
pub trait PeerOps {
    /// What tells this device from all others, the same in every process.
    fn peer_identity(&self) -> Result<Vec<u8>>;

    /// What the first process, whose place this is, gives to all so that they find each other.
    fn peer_bootstrap_id(&self, place: RankInfo) -> Result<Vec<u8>>;

    /// Connects this device with those of all others; waits for them. Returns what carries the tensors, in words.
    fn join_peers(&self, place: RankInfo, invitation: &[u8]) -> Result<String>;

    /// Begins to replace every real tensor, at the process that it belongs to, by the sum over all processes in f32, in
    /// the order of a binary tree whose left half is the largest power of two: `(0 + 1) + (2 + 3)`.
    fn begin_reduce(&self, tensors: &mut [OwnedTensor<'_>]) -> Result<()>;

    /// Begins to replace every tensor by that of the process it belongs to. Weights must be packed in the same way
    /// everywhere.
    fn begin_broadcast(&self, tensors: &mut [OwnedTensor<'_>]) -> Result<()>;

    /// Lets all that is asked for from now on wait for what was begun. The host does not wait.
    fn finish_collectives(&self) -> Result<()>;

    /// Ends every exchange, also of another thread that waits for one; what was begun has no result. All later calls
    /// fail.
    fn abort_collectives(&self);
}
