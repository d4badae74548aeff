//! Heartbeats between ranks, and propagation of failures.
//!
//! Every rank but rank 0 has one control link, to rank 0. Both sides send a heartbeat every second from separate threads,
//! so that a long step does not look like a lost rank. Rank 0 forwards the first failure to all ranks; then every data
//! link is closed, which ends the collectives that wait on it.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A rank that has sent nothing for so long counts as lost.
pub const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(8);
const HEARTBEAT: Duration = Duration::from_secs(1);
/// How long an error of a device waits for a reason that may lie with another rank.
const SOON: Duration = Duration::from_secs(1);
/// How long a broken data link waits for the reason.
const REASON: Duration = Duration::from_secs(10);
/// No reason is longer.
const LONGEST: u32 = 1 << 16;

/// First byte of a message on a control link.
const BEAT: u8 = 0;
const GOODBYE: u8 = 1;
const FAILED: u8 = 2;

/// The heartbeat over the other ranks; it ends with [`HeartbeatMonitor::leave`] or when it is dropped.
#[derive(Debug)]
pub(crate) struct HeartbeatMonitor(Arc<State>);

struct State {
    rank: usize,
    links: Vec<(usize, Mutex<TcpStream>)>,
    /// Handles of the data links.
    data: Vec<TcpStream>,
    failure: Mutex<Option<String>>,
    changed: Condvar,
    leaving: AtomicBool,
    /// To do when a rank is lost.
    actions: Mutex<Vec<Action>>,
}

/// What is done with the reason when a rank is lost.
pub(crate) type Action = Box<dyn FnOnce(&str) + Send>;

impl HeartbeatMonitor {
    pub fn start(
        rank: usize,
        control: Vec<(usize, TcpStream)>,
        data: Vec<TcpStream>,
    ) -> io::Result<HeartbeatMonitor> {
        let mut links = Vec::with_capacity(control.len());
        let mut readers = Vec::with_capacity(control.len());
        for (other, stream) in control {
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(HEARTBEAT_TIMEOUT))?;
            stream.set_write_timeout(Some(HEARTBEAT_TIMEOUT))?;
            readers.push((other, stream.try_clone()?));
            links.push((other, Mutex::new(stream)));
        }
        let (failure, changed) = (Mutex::new(None), Condvar::new());
        let leaving = AtomicBool::new(false);
        let actions = Mutex::default();
        let state = Arc::new(State { rank, links, data, failure, changed, leaving, actions });
        for (other, stream) in readers {
            let state = state.clone();
            spawn("fox-heartbeat", move || state.listen(other, stream))?;
        }
        let beating = state.clone();
        spawn("fox-heartbeat", move || beating.beat())?;
        Ok(HeartbeatMonitor(state))
    }

    /// Why it is over, once a link is known to be broken; waits for the reason.
    pub fn failure(&self) -> Option<String> {
        self.failure_within(REASON)
    }

    /// Why it is over, if it is or soon will be: a device may notice before the heartbeat does.
    pub fn loss_soon(&self) -> Option<String> {
        self.failure_within(SOON)
    }

    /// Does something when a rank is lost; at once if one is.
    pub fn on_loss(&self, action: Action) {
        let failure = lock(&self.0.failure);
        match failure.clone() {
            // Under the lock: a loss that comes now finds it.
            None => lock(&self.0.actions).push(action),
            Some(words) => {
                drop(failure);
                action(&words);
            }
        }
    }

    fn failure_within(&self, limit: Duration) -> Option<String> {
        let deadline = Instant::now() + limit;
        let mut failure = lock(&self.0.failure);
        while failure.is_none() && Instant::now() < deadline {
            let wait = self.0.changed.wait_timeout(failure, Duration::from_millis(50));
            failure = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
        failure.clone()
    }

    /// Reports to the other ranks that this one failed.
    pub fn fail(&self, words: &str) {
        self.0.lost(format!("rank {} failed: {words}", self.0.rank));
    }

    /// Ends the heartbeat in good order.
    pub fn leave(&self) {
        self.0.leaving.store(true, Ordering::SeqCst);
        lock(&self.0.actions).clear();
        self.0.send_all(&[GOODBYE]);
    }
}

impl Drop for HeartbeatMonitor {
    fn drop(&mut self) {
        self.0.leaving.store(true, Ordering::SeqCst);
        for (_, link) in &self.0.links {
            let _ = lock(link).shutdown(Shutdown::Both);
        }
    }
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "State(rank {}, {:?})", self.rank, lock(&self.failure))
    }
}

impl State {
    /// Reads what a rank sends until it leaves or is lost.
    fn listen(&self, other: usize, mut stream: TcpStream) {
        loop {
            let mut kind = [0];
            let words = match stream.read_exact(&mut kind) {
                Ok(()) if kind[0] == BEAT => continue,
                Ok(()) if kind[0] == FAILED => read_words(&mut stream).unwrap_or_default(),
                Ok(()) => return,
                Err(_) if self.leaving.load(Ordering::SeqCst) => return,
                Err(e)
                    if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) =>
                {
                    format!("rank {other} has not answered for {} s", HEARTBEAT_TIMEOUT.as_secs())
                }
                Err(_) => gone(other),
            };
            self.lost(words);
            return;
        }
    }

    fn beat(&self) {
        while !self.leaving.load(Ordering::SeqCst) && lock(&self.failure).is_none() {
            self.send_all(&[BEAT]);
            std::thread::sleep(HEARTBEAT);
        }
    }

    /// Notes the first reason, passes it on, and ends all waits.
    fn lost(&self, words: String) {
        {
            let mut failure = lock(&self.failure);
            if failure.is_some() {
                return;
            }
            *failure = Some(words.clone());
        }
        self.changed.notify_all();
        let mut message = vec![FAILED];
        message.extend((words.len() as u32).to_le_bytes());
        message.extend(words.as_bytes());
        self.send_all(&message);
        for stream in &self.data {
            let _ = stream.shutdown(Shutdown::Both);
        }
        let actions = std::mem::take(&mut *lock(&self.actions));
        for action in actions {
            let words = words.clone();
            // Each in a separate thread: none can delay another one.
            let _ = spawn("fox-loss", move || action(&words));
        }
    }

    fn send_all(&self, message: &[u8]) {
        for (_, link) in &self.links {
            // A link that is gone is the listener's to report.
            let _ = lock(link).write_all(message);
        }
    }
}

/// The reason for a rank whose connection closed without a goodbye.
pub(crate) fn gone(rank: usize) -> String {
    format!("rank {rank} is gone (its connection closed)")
}

fn read_words(stream: &mut TcpStream) -> io::Result<String> {
    let mut len = [0; 4];
    stream.read_exact(&mut len)?;
    let mut words = vec![0; u32::from_le_bytes(len).min(LONGEST) as usize];
    stream.read_exact(&mut words)?;
    Ok(String::from_utf8_lossy(&words).into_owned())
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name(name.into()).spawn(work).map(drop)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Streams and a text are valid whatever a holder did.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
