//! An NCCL communicator with a CUDA stream for its transfers.
//!
//! No call blocks inside NCCL: calls return at once, under a lock, and waiting threads poll. So another thread can abort
//! at any moment when a rank is lost, and no two threads are in NCCL at the same time.

use std::ffi::c_int;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cudarc::driver::{result, sys};
use fox_tensor::{RankInfo, Tensor};

use super::library::{Comm, Config, IN_PROGRESS, Nccl, UniqueId};
use crate::timer::Event;
use crate::{Buffer, Error, Gpu, Result};

/// Bytes of the receive buffer; tensors are sent in chunks that fit.
const SCRATCH: usize = 64 << 20;
/// Alignment of chunks in values, for vectorized loads.
const ALIGN: usize = 128;
/// NCCL's data type for bytes.
const BYTES: c_int = 1;
/// Polls without a pause before pauses begin.
const EAGER: usize = 4000;
const PAUSE: Duration = Duration::from_micros(20);

/// A send or receive of a range of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Move {
    Send { to: usize, address: u64, bytes: usize },
    Receive { from: usize, address: u64, bytes: usize },
}

/// A chunk of a tensor that is reduced in one round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    /// The rank that gets the sum.
    pub(super) owner: usize,
    pub(super) address: u64,
    /// Number of f32 values.
    pub(super) len: usize,
}

/// The communicator of a rank.
pub(crate) struct Peers {
    pub(super) place: RankInfo,
    nccl: &'static Nccl,
    /// Null after an abort.
    comm: Mutex<Handle>,
    pub(super) stream: sys::CUstream,
    /// Events that order the compute stream and this one.
    before: Event,
    after: Event,
    pub(super) scratch: Mutex<Option<Buffer<f32>>>,
    /// Keeps the tensors of pending transfers alive until the compute stream waits for them.
    pending: Mutex<Vec<Tensor>>,
    // Dropped last.
    gpu: Arc<Gpu>,
}

struct Handle(Comm);

// SAFETY: NCCL's handles may be used from any thread, one at a time, which the mutex ensures.
unsafe impl Send for Handle {}
// SAFETY: streams and events may be used from any thread; the rest is behind mutexes.
unsafe impl Send for Peers {}
// SAFETY: as above.
unsafe impl Sync for Peers {}

/// A new bootstrap id, which rank 0 sends to all ranks.
pub(super) fn bootstrap_id() -> Result<Vec<u8>> {
    let nccl = Nccl::get()?;
    let mut id = UniqueId([0; 128]);
    // SAFETY: `id` is valid for writes.
    nccl.check("ncclGetUniqueId", unsafe { (nccl.get_unique_id)(&mut id) })?;
    Ok(id.0.to_vec())
}

/// The bootstrap id that another rank has sent.
pub(super) fn parse_id(invitation: &[u8]) -> Result<UniqueId> {
    let wrong = |_| Error::argument("peers", "the bootstrap id does not have NCCL's length");
    Ok(UniqueId(invitation.try_into().map_err(wrong)?))
}

/// Checks that NCCL accepts the ranks: those that share a GPU must seem to be on different machines.
pub(super) fn check_environment(place: RankInfo) -> Result<()> {
    if !place.shares_device || std::env::var_os("NCCL_HOSTID").is_some() {
        return Ok(());
    }
    let detail = "ranks share a GPU, which NCCL allows only with a different NCCL_HOSTID for each; set \
        NCCL_HOSTID=rank-$RANK (and NCCL_SOCKET_IFNAME=lo on one machine), or give every rank its own GPU";
    Err(Error::argument("nccl", detail))
}

impl Peers {
    /// A communicator that is not connected yet; see [`Peers::join`].
    pub(super) fn new(gpu: &Arc<Gpu>, place: RankInfo) -> Result<Peers> {
        gpu.bind()?;
        let kind = result::stream::StreamKind::NonBlocking;
        let (_, highest) = result::stream::get_priority_range()
            .map_err(|e| Error::driver("cuCtxGetStreamPriorityRange", e))?;
        // Transfers take priority over the thread blocks of large matmuls.
        let stream = result::stream::create_with_priority(kind, highest)
            .map_err(|e| Error::driver("cuStreamCreateWithPriority", e))?;
        Ok(Peers {
            place,
            nccl: Nccl::get()?,
            comm: Mutex::new(Handle(ptr::null_mut())),
            stream,
            before: Event::record_on(gpu.stream())?,
            after: Event::record_on(stream)?,
            scratch: Mutex::default(),
            pending: Mutex::default(),
            gpu: Arc::clone(gpu),
        })
    }

    /// Connects with all ranks, which call this with the same bootstrap id; the version of NCCL.
    pub(super) fn join(&self, id: UniqueId, over: impl Fn() -> bool) -> Result<String> {
        let (rank, size) = (self.place.rank as c_int, self.place.size as c_int);
        let config = Config::not_blocking();
        let mut comm = self.lock();
        if over() {
            return Err(self.ended());
        }
        // SAFETY: the GPU's context is current, and the configuration outlives the call.
        let code = unsafe { (self.nccl.init_rank)(&mut comm.0, size, id, rank, &config) };
        drop(comm);
        self.nccl.check("ncclCommInitRank", code)?;
        self.settle("connecting the GPUs of all ranks")?;
        self.nccl.version()
    }

    /// Aborts all transfers, from any thread.
    pub(super) fn abort(&self) {
        let mut comm = self.lock();
        let handle = std::mem::replace(&mut comm.0, ptr::null_mut());
        if !handle.is_null() {
            // SAFETY: the handle is live, the lock keeps other threads out, and they find a null handle afterwards.
            let _ = unsafe { (self.nccl.abort)(handle) };
        }
    }

    fn lock(&self) -> MutexGuard<'_, Handle> {
        self.comm.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ended(&self) -> Error {
        Error::driver("communication with other ranks", "aborted because a rank was lost")
    }

    /// Polls until NCCL has enqueued the pending call.
    fn settle(&self, call: &str) -> Result<()> {
        for looks in 0usize.. {
            let mut state = 0;
            let comm = self.lock();
            if comm.0.is_null() {
                return Err(self.ended());
            }
            // SAFETY: the handle is live while the lock is held.
            let code = unsafe { (self.nccl.async_error)(comm.0, &mut state) };
            drop(comm);
            self.nccl.check(call, code)?;
            if state != IN_PROGRESS {
                return self.nccl.check(call, state);
            }
            match looks < EAGER {
                true => std::thread::yield_now(),
                false => std::thread::sleep(PAUSE),
            }
        }
        Ok(())
    }

    /// Enqueues transfers as one group. The other ranks enqueue their counterparts.
    ///
    /// # Safety
    /// The ranges must belong to buffers that stay alive until the stream has passed.
    pub(super) unsafe fn run(&self, moves: &[Move]) -> Result<()> {
        if moves.is_empty() {
            return Ok(());
        }
        self.gpu.bind()?;
        let comm = self.lock();
        if comm.0.is_null() {
            return Err(self.ended());
        }
        let (nccl, stream) = (self.nccl, self.stream);
        // SAFETY: the handle is live while the lock is held; the caller vouches for the ranges. A started group is always
        // ended, which reports its errors.
        unsafe {
            nccl.check("ncclGroupStart", (nccl.group_start)())?;
            let mut outcome = Ok(());
            for &step in moves {
                outcome = outcome.and_then(|()| match step {
                    Move::Send { to, address, bytes } => {
                        let from = ptr::with_exposed_provenance(address as usize);
                        let code = (nccl.send)(from, bytes, BYTES, to as c_int, comm.0, stream);
                        nccl.check("ncclSend", code)
                    }
                    Move::Receive { from, address, bytes } => {
                        let to = ptr::with_exposed_provenance_mut(address as usize);
                        let code = (nccl.recv)(to, bytes, BYTES, from as c_int, comm.0, stream);
                        nccl.check("ncclRecv", code)
                    }
                });
            }
            let end = nccl.check("ncclGroupEnd", (nccl.group_end)());
            outcome.and(end)?;
        }
        drop(comm);
        self.settle("sending tensors to other ranks")
    }

    /// Makes this stream wait for all work queued on the compute stream.
    pub(super) fn follow_ops(&self) -> Result<()> {
        self.gpu.bind()?;
        self.before.rerecord(self.gpu.stream())?;
        self.before.make_wait(self.stream)
    }

    /// Keeps a tensor alive while transfers use its memory.
    pub(super) fn keep(&self, tensor: &Tensor) {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner).push(tensor.clone());
    }

    /// Makes the compute stream wait for all transfers, and releases their tensors.
    pub(super) fn lead_ops(&self) -> Result<()> {
        self.gpu.bind()?;
        self.after.rerecord(self.stream)?;
        self.after.make_wait(self.gpu.stream())?;
        self.pending.lock().unwrap_or_else(PoisonError::into_inner).clear();
        Ok(())
    }

    /// The address of scratch memory for at least `len` values.
    pub(super) fn scratch_for(&self, len: usize) -> Result<u64> {
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(buffer) = scratch.as_ref().filter(|buffer| buffer.len() >= len) {
            return Ok(buffer.address());
        }
        // The old buffer returns to the pool, whose memory is reused in the order of the compute stream.
        self.gpu.bind()?;
        self.after.rerecord(self.stream)?;
        self.after.make_wait(self.gpu.stream())?;
        *scratch = None;
        let buffer = self.gpu.alloc::<f32>(len)?;
        Ok(scratch.insert(buffer).address())
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        let _ = self.gpu.bind();
        // A rank that ends normally has read all results before; otherwise the transfers are lost anyway.
        self.abort();
        // SAFETY: created in `new`, not used any more.
        let _ = unsafe { result::stream::destroy(self.stream) };
    }
}

/// Divides tensors into chunks, and these into rounds whose receive buffers fit. The same on all ranks.
pub(super) fn rounds(tensors: &[Chunk], ranks: usize) -> Vec<Vec<Chunk>> {
    let most = (SCRATCH / size_of::<f32>() / (ranks - 1).max(1) / ALIGN).max(1) * ALIGN;
    let (mut rounds, mut round, mut room) = (Vec::new(), Vec::new(), most);
    for tensor in tensors {
        let mut done = 0;
        while done < tensor.len {
            let len = (tensor.len - done).min(room);
            let address = tensor.address + (done * size_of::<f32>()) as u64;
            round.push(Chunk { address, len, ..*tensor });
            done += len;
            room = room.saturating_sub(len.next_multiple_of(ALIGN));
            if room == 0 {
                rounds.push(std::mem::take(&mut round));
                room = most;
            }
        }
    }
    rounds.extend(Some(round).filter(|round| !round.is_empty()));
    rounds
}

/// Adds ranges as a binary tree in rank order: the additions `y = a + b`, where `y` is `a` or `b` and the last one writes to
/// `own`.
pub(super) fn tree(ranges: &[u64], own: u64, steps: &mut Vec<[u64; 3]>) -> u64 {
    if let [range] = ranges {
        return *range;
    }
    let (left, right) = ranges.split_at(ranges.len().next_power_of_two() / 2);
    let (a, b) = (tree(left, own, steps), tree(right, own, steps));
    let y = if b == own { b } else { a };
    steps.push([y, a, b]);
    y
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reduction_tree_ends_at_the_owner() {
        let mut random = fox_tensor::cases::Rng::new(5);
        for ranks in 1..=9usize {
            // The numbers of cases have so few bits that their sums are exact in any order.
            let values: Vec<f32> = (0..ranks).map(|_| (random.normal() / 3.0) as f32).collect();
            // As fox_dist::tree_sum adds.
            fn want(values: &[f32]) -> f32 {
                match values {
                    [value] => *value,
                    _ => {
                        let (l, r) = values.split_at(values.len().next_power_of_two() / 2);
                        want(l) + want(r)
                    }
                }
            }
            for own in 0..ranks as u64 {
                let mut memory = values.clone();
                let mut steps = Vec::new();
                let places: Vec<u64> = (0..ranks as u64).collect();
                assert_eq!(tree(&places, own, &mut steps), own);
                assert_eq!(steps.len(), ranks - 1);
                for [y, a, b] in steps {
                    memory[y as usize] = memory[a as usize] + memory[b as usize];
                }
                assert_eq!(memory[own as usize].to_bits(), want(&values).to_bits());
            }
        }
    }

    #[test]
    fn rounds_cover_every_value_once() {
        let sizes = [3, 40_000_000, 128, 1, 9_000_000];
        let mut address = 1 << 20;
        let mut tensors = Vec::new();
        for (i, len) in sizes.into_iter().enumerate() {
            tensors.push(Chunk { owner: i % 2, address, len });
            address += (len * 4).next_multiple_of(512) as u64;
        }
        for ranks in [2, 3, 8, 4096] {
            let rounds = rounds(&tensors, ranks);
            for round in &rounds {
                let values: usize = round.iter().map(|p| p.len.next_multiple_of(ALIGN)).sum();
                assert!(values * 4 * (ranks - 1) <= SCRATCH, "{ranks} ranks");
                assert!(round.iter().all(|p| p.address.is_multiple_of(512) && p.len > 0));
            }
            for tensor in &tensors {
                let end = tensor.address + 4 * tensor.len as u64;
                let own = |p: &&Chunk| (tensor.address..end).contains(&p.address);
                let mut at = tensor.address;
                for chunk in rounds.iter().flatten().filter(own) {
                    assert_eq!((chunk.address, chunk.owner), (at, tensor.owner));
                    at += 4 * chunk.len as u64;
                }
                assert_eq!(at, end, "{ranks} ranks");
            }
        }
        assert!(rounds(&[], 2).is_empty());
    }
}
