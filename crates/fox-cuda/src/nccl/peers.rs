//! A GPU's connection to those of other processes: a communicator, a stream and what runs on it.
//!
//! Nothing here blocks inside of NCCL. Every call returns at once, under a lock; whoever must wait asks again and again
//! and sees when another thread has ended everything. So a rank that is lost can be reported at any moment, and no two
//! threads are in NCCL at once.

use std::ffi::c_int;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cudarc::driver::{result, sys};
use fox_tensor::RankInfo;

use super::library::{Comm, Config, IN_PROGRESS, Nccl, UniqueId};
use crate::timer::Event;
use crate::{Buffer, Error, Gpu, Result};

/// Scratch memory for what comes from others; tensors are sent in as large pieces as fit.
const SCRATCH: usize = 64 << 20;
/// Pieces begin at multiples of this many values, so that kernels can read several at once.
const ALIGN: usize = 128;
/// NCCL's name for bytes: tensors travel as they are.
const BYTES: c_int = 1;
/// Looks at work in progress before a pause between them.
const EAGER: usize = 4000;
const PAUSE: Duration = Duration::from_micros(20);

/// A range of device memory that goes from one rank to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Move {
    Send { to: usize, address: u64, bytes: usize },
    Receive { from: usize, address: u64, bytes: usize },
}

/// Values of a tensor that are summed at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// The rank that gets the sum.
    pub(super) owner: usize,
    pub(super) address: u64,
    /// Values of f32.
    pub(super) len: usize,
}

/// The connection.
pub(crate) struct Peers {
    pub(super) place: RankInfo,
    nccl: &'static Nccl,
    /// Null once it is over.
    comm: Mutex<Handle>,
    pub(super) stream: sys::CUstream,
    /// The last points of the two streams that the other one waited for.
    before: Event,
    after: Event,
    pub(super) scratch: Mutex<Option<Buffer<f32>>>,
    // Dropped last.
    gpu: Arc<Gpu>,
}

struct Handle(Comm);

// SAFETY: NCCL's handles may be used from any thread, one at a time; the mutex sees to that.
unsafe impl Send for Handle {}
// SAFETY: streams and events may be used from any thread; the rest is behind mutexes.
unsafe impl Send for Peers {}
// SAFETY: as above.
unsafe impl Sync for Peers {}

/// The id by which ranks find each other.
pub(super) fn invitation() -> Result<Vec<u8>> {
    let nccl = Nccl::get()?;
    let mut id = UniqueId([0; 128]);
    // SAFETY: `id` is a valid place to write.
    nccl.check("ncclGetUniqueId", unsafe { (nccl.get_unique_id)(&mut id) })?;
    Ok(id.0.to_vec())
}

/// What NCCL must know before it begins: ranks may share a GPU only if they seem to be on different machines. They then
/// exchange over sockets, which need no network.
pub(super) fn prepare_environment(place: RankInfo) {
    let default = |name: &str, value: String| {
        if std::env::var_os(name).is_none() {
            // SAFETY: the process has no other threads that read the environment: those of this program exchange
            // heartbeats or wait, and NCCL's do not exist yet.
            unsafe { std::env::set_var(name, value) };
        }
    };
    if place.shares_device {
        default("NCCL_HOSTID", format!("fox-rank-{}", place.rank));
        if place.one_machine {
            default("NCCL_SOCKET_IFNAME", "lo".into());
            // One socket carries little more than a gigabyte in a second.
            default("NCCL_SOCKET_NTHREADS", "4".into());
            default("NCCL_NSOCKS_PERTHREAD", "2".into());
        }
    }
}

impl Peers {
    /// A connection that is not there yet; see [`Peers::join`].
    pub(super) fn new(gpu: &Arc<Gpu>, place: RankInfo) -> Result<Peers> {
        gpu.bind()?;
        let kind = result::stream::StreamKind::NonBlocking;
        let (_, highest) = result::stream::get_priority_range()
            .map_err(|e| Error::driver("cuCtxGetStreamPriorityRange", e))?;
        // What travels should not wait for the thread blocks of a large product.
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
            gpu: Arc::clone(gpu),
        })
    }

    /// Connects with all others, which do the same with the same invitation. Returns the version of NCCL.
    pub(super) fn join(&self, invitation: &[u8], over: impl Fn() -> bool) -> Result<String> {
        let wrong = |_| Error::argument("peers", "the invitation has another length than NCCL's");
        let id = UniqueId(invitation.try_into().map_err(wrong)?);
        let (rank, size) = (self.place.rank as c_int, self.place.size as c_int);
        let config = Config::not_blocking();
        let mut comm = self.lock();
        if over() {
            return Err(self.ended());
        }
        // SAFETY: the GPU's context is current, and the configuration lives until the call returns.
        let code = unsafe { (self.nccl.init_rank)(&mut comm.0, size, id, rank, &config) };
        drop(comm);
        self.nccl.check("ncclCommInitRank", code)?;
        self.settle("connecting the GPUs of all ranks")?;
        self.nccl.version()
    }

    /// Ends everything, from any thread.
    pub(super) fn abort(&self) {
        let mut comm = self.lock();
        let handle = std::mem::replace(&mut comm.0, ptr::null_mut());
        if !handle.is_null() {
            // SAFETY: the handle is live, nobody else is in NCCL, and nobody finds it any more.
            let _ = unsafe { (self.nccl.abort)(handle) };
        }
    }

    fn lock(&self) -> MutexGuard<'_, Handle> {
        self.comm.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ended(&self) -> Error {
        Error::driver("the exchange with other ranks", "it was ended because a rank is gone")
    }

    /// Waits until NCCL has queued what it was asked for.
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

    /// Queues the moves, all at once. The other ranks queue their counterparts.
    ///
    /// # Safety
    /// The ranges must belong to live buffers, which stay until the stream has passed.
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
        // SAFETY: the handle is live while the lock is held; the caller vouches for the ranges. A group that was begun
        // is ended whatever happened in between, and then reports it.
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

    /// Lets the stream wait for all that the ops have queued.
    pub(super) fn follow_ops(&self) -> Result<()> {
        self.gpu.bind()?;
        self.before.again(self.gpu.stream())?;
        self.before.hold_up(self.stream)
    }

    /// Lets the ops wait for all that is queued here.
    pub(super) fn lead_ops(&self) -> Result<()> {
        self.gpu.bind()?;
        self.after.again(self.stream)?;
        self.after.hold_up(self.gpu.stream())
    }

    /// Scratch memory for `len` values at least, and where it lies.
    pub(super) fn scratch_for(&self, len: usize) -> Result<u64> {
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(buffer) = scratch.as_ref().filter(|buffer| buffer.len() >= len) {
            return Ok(buffer.address());
        }
        // Memory that goes back to the pool belongs to the ops' stream.
        self.lead_ops()?;
        *scratch = None;
        let buffer = self.gpu.alloc::<f32>(len)?;
        Ok(scratch.insert(buffer).address())
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        let _ = self.gpu.bind();
        // All that was asked for is done: whoever leaves in good order has read results since. Others are gone.
        self.abort();
        // SAFETY: created in `new`, not used any more.
        let _ = unsafe { result::stream::destroy(self.stream) };
    }
}

/// Cuts tensors into pieces, and those into rounds whose scratch memory is limited. The same at all ranks.
pub(super) fn rounds(tensors: &[Piece], ranks: usize) -> Vec<Vec<Piece>> {
    let most = (SCRATCH / size_of::<f32>() / (ranks - 1).max(1) / ALIGN).max(1) * ALIGN;
    let (mut rounds, mut round, mut room) = (Vec::new(), Vec::new(), most);
    for tensor in tensors {
        let mut done = 0;
        while done < tensor.len {
            let len = (tensor.len - done).min(room);
            let address = tensor.address + (done * size_of::<f32>()) as u64;
            round.push(Piece { address, len, ..*tensor });
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

/// How a sum of several ranges is made in the order of the ranks: the additions `y = a + b`, `y` being `a` or `b`, such
/// that the last one writes to `own`.
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
    fn sums_are_those_of_a_tree_and_end_at_the_owner() {
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
    fn rounds_cover_every_value_once_within_the_scratch_memory() {
        let sizes = [3, 40_000_000, 128, 1, 9_000_000];
        let mut address = 1 << 20;
        let mut tensors = Vec::new();
        for (i, len) in sizes.into_iter().enumerate() {
            tensors.push(Piece { owner: i % 2, address, len });
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
                let own = |p: &&Piece| (tensor.address..end).contains(&p.address);
                let mut at = tensor.address;
                for piece in rounds.iter().flatten().filter(own) {
                    assert_eq!((piece.address, piece.owner), (at, tensor.owner));
                    at += 4 * piece.len as u64;
                }
                assert_eq!(at, end, "{ranks} ranks");
            }
        }
        assert!(rounds(&[], 2).is_empty());
    }
}
