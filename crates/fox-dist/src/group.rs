//! A process group and its collectives.

use std::fmt::Display;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use fox_tensor::Device;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::heartbeat::HeartbeatMonitor;
use crate::link::Link;
use crate::rendezvous::{Connections, Rendezvous};
use crate::{Error, Placement, Result};

/// A process group. All ranks call the same collectives in the same order.
#[derive(Debug)]
pub struct Group {
    rank: usize,
    size: usize,
    links: Mutex<Links>,
    heartbeat: Option<HeartbeatMonitor>,
    /// Exchanges tensors with those of the others.
    device: OnceLock<Device>,
}

/// The data links, in the order of the ranks, and the number of the collective under way.
#[derive(Debug, Default)]
struct Links {
    links: Vec<Option<Link>>,
    number: u32,
    /// Numbers of collectives that were begun and not finished: their messages may come before those of later ones.
    begun: Vec<u32>,
    /// Such messages: rank, number, contents.
    early: Vec<(usize, u32, Vec<u8>)>,
}

impl Group {
    /// The group of a single process.
    pub fn alone() -> Group {
        let (links, device) = (Mutex::default(), OnceLock::new());
        Group { rank: 0, size: 1, links, heartbeat: None, device }
    }

    /// Runs the rendezvous with the other ranks.
    ///
    /// # Errors
    /// Ranks that do not come in time, or that run something else; an address that cannot be used.
    pub fn join(placement: &Placement, rendezvous: &Rendezvous) -> Result<Group> {
        let Connections { control, data } = rendezvous.run(placement)?;
        let wrong = |cause| Error::connection("preparing the connections")(cause);
        let mut links = Vec::with_capacity(data.len());
        let mut closers = Vec::with_capacity(data.len());
        for stream in data {
            let link = stream.map(Link::new).transpose().map_err(wrong)?;
            closers.extend(link.as_ref().map(Link::closer).transpose().map_err(wrong)?);
            links.push(link);
        }
        let heartbeat = HeartbeatMonitor::start(placement.rank, control, closers).map_err(wrong)?;
        Ok(Group {
            rank: placement.rank,
            size: placement.size,
            links: Mutex::new(Links { links, ..Links::default() }),
            heartbeat: Some(heartbeat),
            device: OnceLock::new(),
        })
    }

    /// Number of this rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Whether this rank writes files and talks to the user.
    pub fn is_first(&self) -> bool {
        self.rank == 0
    }

    /// Bytes of every rank, in rank order.
    pub fn all_gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.collective(|links| {
            for other in links.others() {
                links.send(other, own);
            }
            (0..self.size)
                .map(|r| if r == self.rank { Ok(own.to_vec()) } else { links.receive(r) })
                .collect()
        })
    }

    /// Bytes of rank `root`.
    pub fn broadcast(&self, root: usize, own: &[u8]) -> Result<Vec<u8>> {
        self.collective(|links| {
            if self.rank != root {
                return links.receive(root);
            }
            for other in links.others() {
                links.send(other, own);
            }
            Ok(own.to_vec())
        })
    }

    /// Sends bytes from one rank to another, where they are returned.
    pub fn transfer(&self, from: usize, to: usize, own: &[u8]) -> Result<Option<Vec<u8>>> {
        self.collective(|links| {
            if from == to {
                return Ok((self.rank == to).then(|| own.to_vec()));
            }
            if self.rank == from {
                links.send(to, own);
            }
            (self.rank == to).then(|| links.receive(from)).transpose()
        })
    }

    /// Broadcasts a value from rank 0 as JSON; `own` of every other rank is ignored.
    pub fn broadcast_value<T: Serialize + DeserializeOwned>(
        &self,
        own: Option<T>,
    ) -> Result<Option<T>> {
        if self.size == 1 {
            return Ok(own);
        }
        let text = serde_json::to_vec(&own).unwrap_or_default();
        Ok(serde_json::from_slice(&self.broadcast(0, &text)?).unwrap_or_default())
    }

    /// Waits until all ranks are here.
    pub fn barrier(&self) -> Result<()> {
        self.all_gather(&[]).map(drop)
    }

    /// Logical or over all ranks.
    pub fn any(&self, own: bool) -> Result<bool> {
        Ok(self.all_gather(&[u8::from(own)])?.iter().any(|answer| answer == &[1]))
    }

    /// Fails on all ranks when one has another value than rank 0, such as other data.
    pub fn check_same(&self, own: &str, what: &str, remedy: &str) -> Result<()> {
        let all = self.all_gather(own.as_bytes())?;
        let Some(rank) = all.iter().position(|other| *other != all[0]) else { return Ok(()) };
        let name = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Err(Error::Refused(format!(
            "rank {rank} has {what} than rank 0 ({} and {}); {remedy}",
            name(&all[rank]),
            name(&all[0])
        )))
    }

    /// All-gather of f64 values, those of rank 0 first.
    pub fn all_numbers(&self, own: &[f64]) -> Result<Vec<f64>> {
        let bytes: Vec<u8> = own.iter().flat_map(|x| x.to_le_bytes()).collect();
        let number = |bytes: &[u8]| f64::from_le_bytes(bytes.try_into().unwrap_or_default());
        let all = self.all_gather(&bytes)?;
        Ok(all.iter().flat_map(|part| part.chunks_exact(8).map(number)).collect())
    }

    /// All-gather of f32 values, those of rank 0 first.
    pub fn all_values(&self, own: &[f32]) -> Result<Vec<f32>> {
        let all = self.all_gather(bytemuck::cast_slice(own))?;
        let value = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap_or_default());
        Ok(all.iter().flat_map(|part| part.chunks_exact(4).map(value)).collect())
    }

    /// Why the group is at an end, if it is because a rank is lost; waits a moment for the reason.
    pub fn loss(&self) -> Option<String> {
        self.heartbeat.as_ref().and_then(HeartbeatMonitor::loss_soon)
    }

    /// Lets `act` run with the reason when a rank is lost, in a separate thread, whatever this rank is doing.
    pub fn on_loss(&self, act: impl FnOnce(&str) + Send + 'static) {
        if let Some(heartbeat) = &self.heartbeat {
            heartbeat.on_loss(Box::new(act));
        }
    }

    /// The device that exchanges tensors with others, once it is connected.
    pub(crate) fn connected(&self) -> Option<&Device> {
        self.device.get()
    }

    pub(crate) fn note_device(&self, device: &Device) {
        // A second connection is refused by the device.
        let _ = self.device.set(device.clone());
    }

    pub(crate) fn abort_on_loss(&self, device: &Device) {
        let device = device.clone();
        self.on_loss(move |_| {
            if let Some(peers) = device.backend().caps().peers {
                peers.abort_collectives();
            }
        });
    }

    /// Reports to all ranks why this one failed, so that they print it too.
    pub fn fail(&self, words: &str) {
        if let Some(heartbeat) = &self.heartbeat {
            heartbeat.fail(words);
        }
    }

    /// Leaves the group after success, and reports the error to the other ranks otherwise.
    pub fn ending_all<T, E: Display + From<Error>>(
        &self,
        outcome: std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        match &outcome {
            Ok(_) => self.leave()?,
            Err(error) => self.fail(&error.to_string()),
        }
        outcome
    }

    /// Leaves the group after a barrier: no rank is reported as lost afterwards.
    pub fn leave(&self) -> Result<()> {
        if let Some(device) = self.connected() {
            self.finish_reduce()?;
            device.backend().synchronize()?;
        }
        self.barrier()?;
        if let Some(heartbeat) = &self.heartbeat {
            heartbeat.leave();
        }
        Ok(())
    }

    /// One collective: every message in it has its number.
    pub(crate) fn collective<T>(
        &self,
        work: impl FnOnce(&mut Collective<'_>) -> Result<T>,
    ) -> Result<T> {
        let mut links = self.lock();
        links.number = links.number.wrapping_add(1);
        drop(links);
        self.resume_collective(work)
    }

    /// The same for a collective that has its number already.
    pub(crate) fn resume_collective<T>(
        &self,
        work: impl FnOnce(&mut Collective<'_>) -> Result<T>,
    ) -> Result<T> {
        let mut links = self.lock();
        let result = work(&mut Collective { group: self, links: &mut links });
        drop(links);
        match (result, &self.heartbeat) {
            // The reason is worth more than the symptom.
            (Err(Error::Connection { action, cause }), Some(heartbeat)) => {
                Err(match heartbeat.failure() {
                    Some(words) => Error::Lost(words),
                    None => Error::Connection { action, cause },
                })
            }
            (result, _) => result,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Links> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The links during one collective.
pub(crate) struct Collective<'a> {
    group: &'a Group,
    links: &'a mut Links,
}

impl Collective<'_> {
    /// All ranks but this one.
    pub fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.group.rank;
        (0..self.group.size).filter(move |&r| r != own)
    }

    pub fn send(&self, to: usize, payload: &[u8]) {
        self.send_numbered(to, self.links.number, payload);
    }

    /// A message of a collective that has begun earlier.
    pub fn send_numbered(&self, to: usize, number: u32, payload: &[u8]) {
        if let Some(link) = self.links.links.get(to).and_then(Option::as_ref) {
            link.send(number, payload);
        }
    }

    pub fn receive(&mut self, from: usize) -> Result<Vec<u8>> {
        self.receive_numbered(from, self.links.number)
    }

    /// The number of this collective, whose messages are received later.
    pub fn begin(&mut self) -> u32 {
        self.links.begun.push(self.links.number);
        self.links.number
    }

    /// One message each of a collective that has begun earlier.
    pub fn finish(
        &mut self,
        from: impl IntoIterator<Item = usize>,
        number: u32,
    ) -> Result<Vec<Vec<u8>>> {
        let all = from.into_iter().map(|from| self.receive_numbered(from, number)).collect();
        self.links.begun.retain(|begun| *begun != number);
        all
    }

    fn receive_numbered(&mut self, from: usize, expected: u32) -> Result<Vec<u8>> {
        let Links { links, begun, early, .. } = &mut *self.links;
        if let Some(at) = early.iter().position(|(r, n, _)| (*r, *n) == (from, expected)) {
            return Ok(early.swap_remove(at).2);
        }
        let rank = self.group.rank;
        let action = || format!("rank {rank} hearing from rank {from}");
        let Some(link) = links.get_mut(from).and_then(Option::as_mut) else {
            return Err(Error::connection(action())(std::io::ErrorKind::NotConnected.into()));
        };
        loop {
            let (found, payload) = link.receive().map_err(|e| Error::connection(action())(e))?;
            if found == expected {
                return Ok(payload);
            }
            if !begun.contains(&found) {
                return Err(Error::OutOfStep { rank, other: from, found, expected });
            }
            early.push((from, found, payload));
        }
    }
}
