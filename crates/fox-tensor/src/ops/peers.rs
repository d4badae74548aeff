//! Collectives between the devices of several ranks: an optional capability.
//!
//! Collectives run on a separate CUDA stream: after all work that was queued before them, and overlapped with the work
//! that is queued afterwards, until [`PeerOps::finish_collectives`].

use crate::check::Operands;
use crate::{Backend, Error, Result, Tensor};

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

/// Reduce, broadcast, send and receive between the devices of all ranks without the host. All ranks call the same methods
/// in the same order; collectives have tensors of the same shapes.
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

    /// Starts to send tensors to other ranks, and to receive tensors from others into memory of the same shapes and
    /// types. Two ranks list what passes between them in the same order; other ranks need not take part.
    fn begin_exchange(
        &self,
        sent: &[(usize, &Tensor)],
        received: &mut [(usize, &mut Tensor)],
    ) -> Result<()>;

    /// Orders all work queued from now on after the collectives and exchanges. The host does not wait.
    fn finish_collectives(&self) -> Result<()>;

    /// Aborts all collectives, also those that another thread waits for; their results are undefined. All later calls
    /// fail.
    fn abort_collectives(&self);
}

/// Validates the rank of [`PeerOps::join_peers`].
pub fn check_join_peers(place: RankInfo) -> Result<()> {
    let RankInfo { rank, size, .. } = place;
    match rank < size {
        true => Ok(()),
        false => Err(Error::argument("join_peers", format!("rank {rank} of {size} ranks"))),
    }
}

/// Validates the tensors of a collective of `size` ranks.
pub fn check_collective(
    backend: &dyn Backend,
    size: usize,
    tensors: &[OwnedTensor<'_>],
) -> Result<()> {
    let operands = Operands::new("collective", backend);
    for (owner, tensor) in tensors {
        operands.plain("tensor", tensor)?;
        operands.require(*owner < size, || format!("owner {owner} of {size} ranks"))?;
    }
    Ok(())
}

/// Validates the tensors of an exchange of a rank.
pub fn check_exchange<'t>(
    backend: &dyn Backend,
    place: RankInfo,
    tensors: impl IntoIterator<Item = (usize, &'t Tensor)>,
) -> Result<()> {
    let operands = Operands::new("exchange", backend);
    for (other, tensor) in tensors {
        operands.plain("tensor", tensor)?;
        operands.require(other < place.size && other != place.rank, || {
            format!("a tensor for rank {other} of {}, on rank {}", place.size, place.rank)
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Device};

    #[test]
    fn rejects_foreign_tensors_and_ranks() {
        let (device, other) = (Device::naive(), Device::naive());
        let check = |owner: usize, mut tensor: Tensor| {
            check_collective(device.backend(), 2, &[(owner, &mut tensor)])
        };
        let zeros = |device: &Device, dtype| device.zeros([3], dtype).unwrap();
        assert!(check(1, zeros(&device, DType::F32)).is_ok());
        assert!(check(2, zeros(&device, DType::F32)).is_err());
        assert!(check(0, zeros(&device, DType::I32)).is_err());
        assert!(check(0, zeros(&other, DType::F32)).is_err());
        let place = |rank, size| RankInfo { rank, size, shares_device: false, one_machine: true };
        let exchange = |other: usize, tensor: Tensor| {
            check_exchange(device.backend(), place(1, 3), [(other, &tensor)])
        };
        assert!(exchange(2, zeros(&device, DType::F32)).is_ok());
        assert!(exchange(1, zeros(&device, DType::F32)).is_err(), "to itself");
        assert!(exchange(3, zeros(&device, DType::F32)).is_err());
        assert!(exchange(0, zeros(&device, DType::I32)).is_err());
        assert!(check_join_peers(place(1, 2)).is_ok());
        assert!(check_join_peers(place(2, 2)).is_err() && check_join_peers(place(0, 0)).is_err());
    }
}
