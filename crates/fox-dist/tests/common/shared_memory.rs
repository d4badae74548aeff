//! Transfers between CPU devices of several threads, in place of NCCL between GPUs.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use fox_dist::tree_sum;
use fox_tensor::{Device, Error, OwnedTensor, PeerOps, RankInfo, Result, Tensor};

/// Tensors in flight, by sender and receiver.
#[derive(Default)]
pub struct SharedMemory {
    queues: Mutex<Vec<VecDeque<Vec<f32>>>>,
    arrived: Condvar,
    /// Values that were sent.
    pub values: AtomicUsize,
}

/// The end of one rank.
struct Peer {
    memory: Arc<SharedMemory>,
    rank: usize,
    size: usize,
}

impl SharedMemory {
    pub fn new(size: usize) -> Arc<SharedMemory> {
        let queues = Mutex::new(vec![VecDeque::new(); size * size]);
        Arc::new(SharedMemory { queues, ..SharedMemory::default() })
    }

    /// A CPU device of a rank, whose tensors do not pass through the group's connections.
    pub fn device(self: &Arc<Self>, rank: usize, size: usize) -> Device {
        let peer = Peer { memory: self.clone(), rank, size };
        Device::new(fox_cpu::Cpu::default().with_peers(Arc::new(peer)))
    }
}

impl Peer {
    fn send(&self, to: usize, tensor: &Tensor) -> Result<()> {
        let values = tensor.to_f32()?;
        self.memory.values.fetch_add(values.len(), Ordering::Relaxed);
        self.memory.queues.lock().unwrap()[self.rank * self.size + to].push_back(values);
        self.memory.arrived.notify_all();
        Ok(())
    }

    fn receive(&self, from: usize) -> Vec<f32> {
        let queues = self.memory.queues.lock().unwrap();
        let at = from * self.size + self.rank;
        let mut queues = self.memory.arrived.wait_while(queues, |all| all[at].is_empty()).unwrap();
        queues[at].pop_front().unwrap()
    }

    fn replace(tensor: &mut Tensor, values: &[f32]) -> Result<()> {
        *tensor = tensor.device().clone().from_f32(values, tensor.shape())?;
        Ok(())
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.rank;
        (0..self.size).filter(move |&rank| rank != own)
    }
}

impl PeerOps for Peer {
    fn peer_identity(&self) -> Result<Vec<u8>> {
        Ok(vec![self.rank as u8])
    }

    fn peer_bootstrap_id(&self, _: RankInfo) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    fn join_peers(&self, place: RankInfo, _: &[u8]) -> Result<String> {
        assert_eq!((place.rank, place.size), (self.rank, self.size));
        Ok("shared memory".into())
    }

    fn begin_reduce(&self, tensors: &mut [OwnedTensor<'_>]) -> Result<()> {
        for (owner, tensor) in tensors.iter_mut() {
            if *owner != self.rank {
                self.send(*owner, tensor)?;
                continue;
            }
            let parts = (0..self.size).map(|rank| match rank == self.rank {
                true => tensor.to_f32(),
                false => Ok(self.receive(rank)),
            });
            let sum = tree_sum(parts.collect::<Result<_>>()?);
            Peer::replace(tensor, &sum)?;
        }
        Ok(())
    }

    fn begin_broadcast(&self, tensors: &mut [OwnedTensor<'_>]) -> Result<()> {
        for (owner, tensor) in tensors.iter_mut() {
            match *owner == self.rank {
                true => self.others().try_for_each(|to| self.send(to, tensor))?,
                false => Peer::replace(tensor, &self.receive(*owner))?,
            }
        }
        Ok(())
    }

    fn begin_exchange(
        &self,
        sent: &[(usize, &Tensor)],
        received: &mut [(usize, &mut Tensor)],
    ) -> Result<()> {
        sent.iter().try_for_each(|(to, tensor)| self.send(*to, tensor))?;
        for (from, tensor) in received {
            let values = self.receive(*from);
            if values.len() != tensor.len() {
                let detail = format!("{} values for {tensor:?}", values.len());
                return Err(Error::Argument { op: "exchange", detail });
            }
            Peer::replace(tensor, &values)?;
        }
        Ok(())
    }

    fn finish_collectives(&self) -> Result<()> {
        Ok(())
    }

    fn abort_collectives(&self) {}
}
