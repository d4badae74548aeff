//! Signed messages on new connections, and a listener that strangers cannot hold up.
//!
//! Who accepts a connection sends a challenge first: a nonce. Who connects answers with a message that is signed with
//! the secret and this nonce. All connections are served by one thread without blocking: a connection that sends
//! something else, closes, or does not complete its message within [`HANDSHAKE`] is dropped, and so is the oldest one
//! when there are more than [`MAX_PENDING`].

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::secret::{Nonce, Secret, nonce};

/// Start of every message.
const MAGIC: [u8; 8] = *b"fox-dist";
const HEADER: usize = 12;
/// Longest message in bytes to a listener, and to a rank from rank 0.
const LONGEST_ARRIVAL: usize = 1 << 16;
const LONGEST_ANSWER: usize = 1 << 22;
/// Time in which a connection must complete its first message.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(5);
/// Connections that may be in their handshake at a time.
const MAX_PENDING: usize = 256;
/// Pause between two polls.
pub(crate) const PAUSE: Duration = Duration::from_millis(5);

#[derive(Serialize, Deserialize)]
struct Challenge {
    nonce: Nonce,
}

/// A message with its signature.
#[derive(Serialize, Deserialize)]
pub(crate) struct Signed {
    pub body: String,
    signature: Vec<u8>,
}

impl Signed {
    pub fn new(secret: &Secret, nonce: &Nonce, message: &impl Serialize) -> io::Result<Signed> {
        let body = serde_json::to_string(message)?;
        Ok(Signed { signature: secret.sign(nonce, &body), body })
    }

    /// The message, if it is signed with this secret for this nonce.
    pub fn open<T: DeserializeOwned>(&self, secret: &Secret, nonce: &Nonce) -> io::Result<T> {
        match secret.verify(nonce, &self.body, &self.signature) {
            true => Ok(serde_json::from_str(&self.body)?),
            false => Err(ErrorKind::PermissionDenied.into()),
        }
    }
}

pub(crate) fn send(stream: &mut TcpStream, message: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    stream.set_write_timeout(Some(HANDSHAKE))?;
    stream.write_all(&[&MAGIC, &(text.len() as u32).to_le_bytes()[..], &text].concat())
}

/// Reads a message that must be complete at `deadline`.
pub(crate) fn receive<T: DeserializeOwned>(
    stream: &mut TcpStream,
    deadline: Instant,
) -> io::Result<T> {
    let mut read = |bytes: &mut [u8]| {
        let mut done = 0;
        while done < bytes.len() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::Error::from(ErrorKind::TimedOut));
            }
            stream.set_read_timeout(Some(left))?;
            match stream.read(&mut bytes[done..]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => done += count,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    };
    let mut header = [0; HEADER];
    read(&mut header)?;
    let mut text = vec![0; body_length(&header, LONGEST_ANSWER)?.unwrap_or(0)];
    read(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

/// Length of the body of a message of which the first bytes are known; `None` before its header is complete.
fn body_length(received: &[u8], longest: usize) -> io::Result<Option<usize>> {
    let known = received.len().min(MAGIC.len());
    if received[..known] != MAGIC[..known] {
        return Err(ErrorKind::InvalidData.into());
    }
    let Some(length) = received.get(MAGIC.len()..HEADER) else { return Ok(None) };
    let length = u32::from_le_bytes([length[0], length[1], length[2], length[3]]) as usize;
    match length <= longest {
        true => Ok(Some(length)),
        false => Err(ErrorKind::InvalidData.into()),
    }
}

/// Connects, waits for the challenge and answers it. `answer` makes the message once the connection stands.
pub(crate) fn connect<T: Serialize>(
    address: impl ToSocketAddrs,
    deadline: Instant,
    secret: &Secret,
    answer: impl FnOnce(&TcpStream) -> io::Result<T>,
) -> io::Result<TcpStream> {
    let mut stream = open(address, deadline)?;
    let Challenge { nonce } = receive(&mut stream, deadline)?;
    let answer = answer(&stream)?;
    send(&mut stream, &Signed::new(secret, &nonce, &answer)?)?;
    Ok(stream)
}

fn open(address: impl ToSocketAddrs, deadline: Instant) -> io::Result<TcpStream> {
    let left = deadline.saturating_duration_since(Instant::now()).max(PAUSE);
    let mut last = io::Error::from(ErrorKind::AddrNotAvailable);
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, left) {
            // At an unused port of this machine the system may choose that port for this end too: a self-connection.
            Ok(stream) if stream.local_addr()? == address => last = ErrorKind::AddrInUse.into(),
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// A listener with the connections that are in their handshake.
pub(crate) struct Acceptor {
    listener: TcpListener,
    /// The oldest first.
    pending: VecDeque<Pending>,
}

/// A connection that has sent a complete message.
pub(crate) struct Arrival {
    pub stream: TcpStream,
    /// Its challenge.
    pub nonce: Nonce,
    pub message: Signed,
}

struct Pending {
    stream: TcpStream,
    nonce: Nonce,
    received: Vec<u8>,
    expires: Instant,
}

impl Acceptor {
    pub fn bind(address: impl ToSocketAddrs) -> io::Result<Acceptor> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        Ok(Acceptor { listener, pending: VecDeque::new() })
    }

    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Reads what has come so far, and accepts new connections. Never waits.
    pub fn poll(&mut self) -> io::Result<Vec<Arrival>> {
        let mut arrivals = Vec::new();
        // Before new connections push out old ones.
        for mut pending in std::mem::take(&mut self.pending) {
            match pending.read() {
                Ok(None) if Instant::now() < pending.expires => self.pending.push_back(pending),
                Ok(Some(message)) => {
                    let Pending { stream, nonce, .. } = pending;
                    if stream.set_nonblocking(false).is_ok() {
                        arrivals.push(Arrival { stream, nonce, message });
                    }
                }
                _ => {}
            }
        }
        for _ in 0..MAX_PENDING {
            match self.listener.accept() {
                Ok((stream, _)) => self.pending.extend(Pending::challenge(stream)),
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e)
                    if matches!(
                        e.kind(),
                        ErrorKind::Interrupted | ErrorKind::ConnectionAborted
                    ) => {}
                // Out of file descriptors, for instance: strangers hold them.
                Err(error) => match self.pending.pop_front() {
                    Some(_) => {}
                    None => return Err(error),
                },
            }
            if self.pending.len() > MAX_PENDING {
                self.pending.pop_front();
            }
        }
        Ok(arrivals)
    }
}

impl Pending {
    fn challenge(mut stream: TcpStream) -> Option<Pending> {
        let nonce = nonce().ok()?;
        stream.set_nonblocking(true).ok()?;
        // Fits into the empty send buffer of a new connection.
        send(&mut stream, &Challenge { nonce }).ok()?;
        Some(Pending { stream, nonce, received: Vec::new(), expires: Instant::now() + HANDSHAKE })
    }

    /// Reads what has come; the message when it is complete.
    fn read(&mut self) -> io::Result<Option<Signed>> {
        loop {
            let body = body_length(&self.received, LONGEST_ARRIVAL)?;
            let length = HEADER + body.unwrap_or(0);
            if body.is_some() && self.received.len() == length {
                return Ok(Some(serde_json::from_slice(&self.received[HEADER..])?));
            }
            let mut chunk = [0; 4096];
            let wanted = chunk.len().min(length - self.received.len());
            match self.stream.read(&mut chunk[..wanted]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.received.extend(&chunk[..count]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Linux goes through its even ports from 32768 on, one for each attempt, and comes to the one that is called.
    #[cfg(target_os = "linux")]
    #[test]
    fn rejects_self_connections() {
        let free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
        let port = (40_000..).step_by(2).find(free).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let attempt = |_| open(format!("127.0.0.1:{port}"), deadline).unwrap_err().kind();
        let met_itself = (0..200_000).map(attempt).any(|kind| kind == ErrorKind::AddrInUse);
        assert!(met_itself, "the system never chose port {port}: this test shows nothing");
    }

    #[test]
    fn bounds_pending_connections() {
        let mut acceptor = Acceptor::bind("127.0.0.1:0").unwrap();
        let address = acceptor.address().unwrap();
        let mut strangers = Vec::new();
        for _ in 0..MAX_PENDING + 40 {
            strangers.push(TcpStream::connect(address).unwrap());
            assert!(acceptor.poll().unwrap().is_empty());
            assert!(acceptor.pending.len() <= MAX_PENDING);
        }
        let message = |stream: &TcpStream| stream.try_clone().map(|_| "hello");
        let secret = Secret::default();
        std::thread::scope(|scope| {
            let deadline = Instant::now() + Duration::from_secs(20);
            scope.spawn(move || connect(address, deadline, &Secret::default(), message).unwrap());
            let arrival = loop {
                if let Some(arrival) = acceptor.poll().unwrap().pop() {
                    break arrival;
                }
                assert!(Instant::now() < deadline);
            };
            let opened: String = arrival.message.open(&secret, &arrival.nonce).unwrap();
            assert_eq!(opened, "hello");
            assert!(arrival.message.open::<String>(&secret, &[0; 16]).is_err(), "a replay");
        });
    }

    #[test]
    fn drops_garbage_immediately() {
        let mut acceptor = Acceptor::bind("127.0.0.1:0").unwrap();
        let address = acceptor.address().unwrap();
        let too_long = [&MAGIC[..], &u32::MAX.to_le_bytes()].concat();
        let no_json = [&MAGIC[..], &2u32.to_le_bytes(), b"xx"].concat();
        for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 64], b"fox-dust", &too_long, &no_json] {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(bytes).unwrap();
            let start = Instant::now();
            let mut gone = false;
            while !gone && start.elapsed() < HANDSHAKE {
                assert!(acceptor.poll().unwrap().is_empty());
                gone = acceptor.pending.is_empty() && start.elapsed() > Duration::from_millis(50);
            }
            assert!(gone && start.elapsed() < Duration::from_secs(2), "{bytes:?}");
        }
    }
}
