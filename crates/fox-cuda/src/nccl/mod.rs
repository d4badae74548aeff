//! Reduction, broadcast, send and receive of tensors between GPUs of several processes, over NCCL send/recv on a separate
//! CUDA stream.
//!
//! NCCL only copies: every rank sends a tensor to its owner, which adds the copies in rank order. So the bits do not
//! depend on NCCL's algorithms nor, with tree-reduced gradients, on the number of ranks. Each rank sends and receives as
//! many bytes as in a reduce-scatter.

mod library;
mod peers;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::result;
use fox_tensor::{OwnedTensor, PeerOps, RankInfo, Tensor};

use crate::backend::Cuda;
use crate::backend::storage::{Data, memory};
use crate::ops::elementwise;
use crate::ops::packed::Packed;
use crate::{Error, Result};
use peers::{Chunk, Move, Peers, rounds, tree};

/// The connection of a backend to those of other processes, if any.
#[derive(Default)]
pub(crate) struct Connection {
    peers: OnceLock<Peers>,
    aborted: AtomicBool,
}

impl Cuda {
    fn peers(&self) -> Result<&Peers> {
        let missing = || Error::argument("peers", "the GPU is not connected to other ranks yet");
        self.connection.peers.get().ok_or_else(missing)
    }

    fn join_all(&self, place: RankInfo, invitation: &[u8]) -> Result<String> {
        let id = peers::parse_id(invitation)?;
        peers::check_environment(place)?;
        let fresh = Peers::new(&self.gpu, place)?;
        if self.connection.peers.set(fresh).is_err() {
            return Err(Error::argument("peers", "the GPU is already connected to other ranks"));
        }
        let version = self.peers()?.join(id, || self.connection.aborted.load(Ordering::SeqCst))?;
        Ok(format!("NCCL {version}, send/recv to the owner"))
    }

    fn sum_over_peers(&self, tensors: &mut [OwnedTensor<'_>]) -> Result<()> {
        let peers = self.peers()?;
        let RankInfo { rank, size, .. } = peers.place;
        let mut whole = Vec::with_capacity(tensors.len());
        for (owner, tensor) in tensors.iter_mut() {
            if let Data::Bf16(narrow) = &memory(tensor)?.data {
                let wide = Data::F32(self.widen(narrow)?);
                **tensor = self.tensor(wide, tensor.shape(), tensor.device());
            }
            let len = tensor.len();
            let address = self.writable(tensor)?.write().address();
            whole.push(Chunk { owner: *owner, address, len });
            peers.keep(tensor);
        }
        let rounds = rounds(&whole, size);
        // Receive buffers: chunk after chunk, rank after rank.
        let padded = |chunk: &Chunk| chunk.len.next_multiple_of(8);
        let own = |chunk: &&Chunk| chunk.owner == rank;
        let need =
            |round: &Vec<Chunk>| round.iter().filter(own).map(padded).sum::<usize>() * (size - 1);
        let scratch = peers.scratch_for(rounds.iter().map(need).max().unwrap_or(0))?;
        peers.follow_ops()?;
        for round in &rounds {
            let (mut moves, mut sums, mut free) = (Vec::new(), Vec::new(), scratch);
            for chunk in round {
                let (address, bytes) = (chunk.address, chunk.len * size_of::<f32>());
                if chunk.owner != rank {
                    moves.push(Move::Send { to: chunk.owner, address, bytes });
                    continue;
                }
                let mut ranges = Vec::with_capacity(size);
                for from in 0..size {
                    if from == rank {
                        ranges.push(address);
                        continue;
                    }
                    moves.push(Move::Receive { from, address: free, bytes });
                    ranges.push(free);
                    free += (padded(chunk) * size_of::<f32>()) as u64;
                }
                let mut steps = Vec::with_capacity(size - 1);
                tree(&ranges, address, &mut steps);
                sums.extend(steps.into_iter().map(|step| (step, chunk.len)));
            }
            self.timed_on(peers.stream, "sum", || {
                // SAFETY: chunks lie inside their tensors, which `keep` holds, and receive buffers inside the scratch.
                unsafe { peers.run(&moves)? };
                for ([y, a, b], len) in sums {
                    // SAFETY: as above.
                    unsafe { elementwise::add_on(self, peers.stream, [y, a, b], len)? };
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    fn share_with_peers(&self, tensors: &mut [OwnedTensor<'_>]) -> Result<()> {
        let peers = self.peers()?;
        let RankInfo { rank, size, .. } = peers.place;
        let mut moves = Vec::new();
        for (owner, tensor) in tensors.iter_mut() {
            let bytes = tensor.len() * tensor.dtype().size();
            if *owner == rank {
                let data = &memory(tensor)?.data;
                if let Data::Packed(_) = data {
                    return Err(Packed::refusal());
                }
                let address = data.address();
                let others = (0..size).filter(|&other| other != rank);
                moves.extend(others.map(|to| Move::Send { to, address, bytes }));
            } else {
                // In place and in the stored format, which may be two halves.
                let address = self.unshared(tensor)?.write().address();
                moves.push(Move::Receive { from: *owner, address, bytes });
            }
            peers.keep(tensor);
        }
        peers.follow_ops()?;
        // SAFETY: the ranges are those of the tensors, which `keep` holds.
        self.timed_on(peers.stream, "share", || unsafe { peers.run(&moves) })
    }
}

impl Cuda {
    fn exchange_with_peers(
        &self,
        sent: &[(usize, &Tensor)],
        received: &mut [(usize, &mut Tensor)],
    ) -> Result<()> {
        let peers = self.peers()?;
        let mut moves = Vec::with_capacity(sent.len() + received.len());
        for &(to, tensor) in sent {
            let address = memory(tensor)?.data.address();
            moves.push(Move::Send { to, address, bytes: tensor.len() * tensor.dtype().size() });
            peers.keep(tensor);
        }
        for (from, tensor) in received.iter_mut() {
            let bytes = tensor.len() * tensor.dtype().size();
            let address = self.unshared(tensor)?.write().address();
            moves.push(Move::Receive { from: *from, address, bytes });
            peers.keep(tensor);
        }
        peers.follow_ops()?;
        // SAFETY: the ranges are those of the tensors, which `keep` holds.
        self.timed_on(peers.stream, "rows", || unsafe { peers.run(&moves) })
    }
}

impl PeerOps for Cuda {
    fn peer_identity(&self) -> fox_tensor::Result<Vec<u8>> {
        let uuid = result::device::get_uuid(self.gpu.device())
            .map_err(|e| Error::driver("cuDeviceGetUuid", e))?;
        Ok(uuid.bytes.iter().map(|byte| *byte as u8).collect())
    }

    fn peer_bootstrap_id(&self, place: RankInfo) -> fox_tensor::Result<Vec<u8>> {
        self.gpu.bind()?;
        peers::check_environment(place)?;
        Ok(peers::bootstrap_id()?)
    }

    fn join_peers(&self, place: RankInfo, invitation: &[u8]) -> fox_tensor::Result<String> {
        fox_tensor::check_join_peers(place)?;
        Ok(self.join_all(place, invitation)?)
    }

    fn begin_reduce(&self, tensors: &mut [OwnedTensor<'_>]) -> fox_tensor::Result<()> {
        fox_tensor::check_collective(self, self.peers()?.place.size, tensors)?;
        Ok(self.sum_over_peers(tensors)?)
    }

    fn begin_broadcast(&self, tensors: &mut [OwnedTensor<'_>]) -> fox_tensor::Result<()> {
        fox_tensor::check_collective(self, self.peers()?.place.size, tensors)?;
        Ok(self.share_with_peers(tensors)?)
    }

    fn begin_exchange(
        &self,
        sent: &[(usize, &Tensor)],
        received: &mut [(usize, &mut Tensor)],
    ) -> fox_tensor::Result<()> {
        let from = received.iter().map(|(from, tensor)| (*from, &**tensor));
        let all = sent.iter().copied().chain(from);
        fox_tensor::check_exchange(self, self.peers()?.place, all)?;
        Ok(self.exchange_with_peers(sent, received)?)
    }

    fn finish_collectives(&self) -> fox_tensor::Result<()> {
        Ok(self.peers()?.lead_ops()?)
    }

    fn abort_collectives(&self) {
        self.connection.aborted.store(true, Ordering::SeqCst);
        if let Some(peers) = self.connection.peers.get() {
            // The calling thread may never have used the GPU.
            let _ = self.gpu.bind();
            peers.abort();
        }
    }
}
