//! Device-to-device reduction and broadcast of tensors (NCCL), where the devices support it.

use fox_tensor::{Device, OwnedTensor, PeerOps, RankInfo};

use crate::{Error, Group, Owned, Result};

impl Group {
    /// Connects the devices of all ranks with each other, if they can exchange tensors without the host. Returns how
    /// tensors travel from now on, in words; `None` in a group of one.
    ///
    /// # Errors
    /// A library that is missing, devices of different kinds, the loss of a rank.
    pub fn connect(&self, device: &Device) -> Result<Option<String>> {
        if self.size() == 1 {
            return Ok(None);
        }
        let peers = device.backend().caps().peers;
        let identity = match peers {
            // First of all: a rank that lacks something says so before others rely on it.
            Some(peers) => [&[1], &peers.peer_identity()?[..]].concat(),
            None => vec![0],
        };
        let all = self.all_gather(&identity)?;
        if let Some(other) = all.iter().position(|other| other[..1] != identity[..1]) {
            return Err(Error::Refused(format!(
                "ranks {} and {other} compute on different kinds of devices; give all ranks the same device",
                self.rank()
            )));
        }
        let Some(peers) = peers else { return Ok(self.by_host()) };
        let shares_device = all.iter().filter(|other| **other == identity).count() > 1;
        let machines = self.all_gather(machine().as_bytes())?;
        let one_machine = machines.iter().all(|other| *other == machines[0]);
        let (rank, size) = (self.rank(), self.size());
        let place = RankInfo { rank, size, shares_device, one_machine };
        let invitation = match rank {
            0 => peers.peer_bootstrap_id(place)?,
            _ => Vec::new(),
        };
        let invitation = self.broadcast(0, &invitation)?;
        // From here on a rank that is lost ends the waits of the others on their devices, too.
        self.abort_on_loss(device);
        let words = self.on_device(|| peers.join_peers(place, &invitation))?;
        self.note_device(device);
        Ok(Some(words))
    }

    /// How tensors travel without [`Group::connect`], in words; `None` in a group of one.
    pub fn by_host(&self) -> Option<String> {
        (self.size() > 1).then(|| BY_HOST.into())
    }

    /// Starts to reduce tensors to their owners while the devices do other work, see
    /// [`Group::reduce_to_owners`]. The tensors must stay as they are until [`Group::finish_reduce`].
    pub fn begin_reduce(&self, tensors: &mut [Owned<'_>]) -> Result<()> {
        match self.connected() {
            None => self.reduce_by_host(tensors),
            Some(device) => self.on_peers(device, |peers| peers.begin_reduce(&mut pairs(tensors))),
        }
    }

    /// Lets all later work of the device wait for the sums.
    pub fn finish_reduce(&self) -> Result<()> {
        match self.connected() {
            None => Ok(()),
            Some(device) => self.on_peers(device, |peers| peers.finish_collectives()),
        }
    }

    pub(crate) fn broadcast_by_devices(
        &self,
        device: &Device,
        tensors: &mut [Owned<'_>],
    ) -> Result<()> {
        self.on_peers(device, |peers| {
            peers.begin_broadcast(&mut pairs(tensors))?;
            peers.finish_collectives()
        })
    }

    /// Work with the transfers of a device that has joined the group.
    pub(crate) fn on_peers(
        &self,
        device: &Device,
        work: impl FnOnce(&dyn PeerOps) -> fox_tensor::Result<()>,
    ) -> Result<()> {
        match device.backend().caps().peers {
            None => Err(Error::Refused(
                "these tensors are on a device without transfers to other ranks, unlike the one that joined the group"
                    .into(),
            )),
            Some(peers) => self.on_device(|| work(peers)),
        }
    }

    /// Runs what may fail because a rank is gone: the reason is worth more than the symptom.
    fn on_device<T>(&self, work: impl FnOnce() -> fox_tensor::Result<T>) -> Result<T> {
        work().map_err(|error| match self.loss() {
            Some(words) => Error::Lost(words),
            None => error.into(),
        })
    }
}

/// How tensors travel without such devices.
const BY_HOST: &str = "TCP, sent to the owner and added there";

/// An identity of this machine, different for containers on one machine.
fn machine() -> String {
    let read = |name: &str| {
        std::fs::read_to_string(format!("/proc/sys/kernel/{name}")).unwrap_or_default()
    };
    read("hostname") + &read("random/boot_id")
}

fn pairs<'a>(tensors: &'a mut [Owned<'_>]) -> Vec<OwnedTensor<'a>> {
    tensors.iter_mut().map(|owned| (owned.owner, &mut *owned.tensor)).collect()
}
