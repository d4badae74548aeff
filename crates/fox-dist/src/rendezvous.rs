//! How the ranks find each other.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::heartbeat::gone;
use crate::{Error, Placement, Result};

/// What every message of the rendezvous begins with; a stranger's does not.
const MAGIC: [u8; 8] = *b"fox-dist";
/// No message of the rendezvous is longer.
const LONGEST: u32 = 1 << 20;
/// A connection that says nothing for so long is a stranger's.
const PATIENCE: Duration = Duration::from_secs(5);
/// Pause between two looks for a connection.
const PAUSE: Duration = Duration::from_millis(5);

/// Something that must be the same for all ranks, such as the version of the program or the recipe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Invariant {
    /// What it is, e.g. `recipe`.
    pub name: String,
    /// Its value, or a hash of it.
    pub value: String,
}

/// The conditions of a rendezvous.
#[derive(Clone, Debug)]
pub struct Rendezvous {
    /// What must be the same for all.
    pub invariants: Vec<Invariant>,
    /// How long to wait for the others.
    pub limit: Duration,
}

/// What a rank says to rank 0.
#[derive(Serialize, Deserialize)]
struct Hello {
    rank: usize,
    size: usize,
    invariants: Vec<Invariant>,
    /// Where it takes data links.
    port: u16,
}

/// What rank 0 answers.
#[derive(Serialize, Deserialize)]
enum Answer {
    /// Everybody is there. Entry `r` is where rank `r` takes data links; its host is missing for rank 0.
    Roster { token: u64, places: Vec<(Option<IpAddr>, u16)> },
    /// It is over, for this reason.
    Refused(String),
}

/// What a rank says first on a data link.
#[derive(Serialize, Deserialize)]
struct Introduction {
    token: u64,
    rank: usize,
}

/// The connections of a rank.
pub(crate) struct Connections {
    /// Rank 0: one to every other rank. Others: one to rank 0.
    pub control: Vec<(usize, TcpStream)>,
    /// One to every other rank.
    pub data: Vec<Option<TcpStream>>,
}

impl Rendezvous {
    pub(crate) fn run(&self, placement: &Placement) -> Result<Connections> {
        let deadline = Instant::now() + self.limit;
        let gathered = match placement.rank {
            0 => self.gather(placement, deadline)?,
            _ => self.join(placement, deadline)?,
        };
        let data = link_all(placement, &gathered, deadline)?;
        Ok(Connections { control: gathered.control, data })
    }

    /// Rank 0: waits for all others and tells each where they are.
    fn gather(&self, placement: &Placement, deadline: Instant) -> Result<Gathered> {
        let (address, size) = (placement.address(), placement.size);
        let meeting_place = listen_at(&address)
            .map_err(|cause| Error::Listen { address: address.clone(), cause })?;
        let (listener, port) = listen_anywhere(meeting_place.local_addr())?;
        let mut found: Vec<Option<(TcpStream, Hello)>> = (0..size).map(|_| None).collect();
        while found.iter().flatten().count() + 1 < size {
            let Some(mut stream) = accept(&meeting_place, &[], deadline)? else {
                let missing = (1..size).filter(|&r| found[r].is_none());
                let missing = in_words(&missing.collect::<Vec<_>>());
                let words = format!("{missing} of {size} did not come");
                refuse_all(&mut found, &words);
                return Err(Error::Missing {
                    address,
                    seconds: self.limit.as_secs(),
                    missing,
                    size,
                });
            };
            // A connection that does not say a proper hello is a stranger's, and none of our business.
            let Ok(hello) = hear::<Hello>(&mut stream) else { continue };
            let taken = found.get(hello.rank).is_some_and(Option::is_some);
            if let Some(words) = self.objection(&hello, size, taken) {
                let _ = say(&mut stream, &Answer::Refused(words.clone()));
                refuse_all(&mut found, &words);
                return Err(Error::Refused(words));
            }
            let rank = hello.rank;
            found[rank] = Some((stream, hello));
        }
        let token = token();
        let place = |entry: &Option<(TcpStream, Hello)>| match entry {
            None => (None, port),
            Some((stream, hello)) => (stream.peer_addr().ok().map(|peer| peer.ip()), hello.port),
        };
        let places: Vec<_> = found.iter().map(place).collect();
        let mut control = Vec::with_capacity(size - 1);
        for (rank, entry) in found.into_iter().enumerate() {
            let Some((mut stream, _)) = entry else { continue };
            let roster = Answer::Roster { token, places: places.clone() };
            say(&mut stream, &roster)
                .map_err(Error::connection(format!("answering rank {rank}")))?;
            control.push((rank, stream));
        }
        Ok(Gathered { control, listener, token, places })
    }

    /// Why a rank cannot take part.
    fn objection(&self, hello: &Hello, size: usize, taken: bool) -> Option<String> {
        let rank = hello.rank;
        if hello.size != size {
            return Some(format!(
                "rank {rank} was told of {} ranks and rank 0 of {size}; start all of them by one command",
                hello.size
            ));
        }
        if rank == 0 || rank >= size || taken {
            return Some(format!(
                "two processes say that they are rank {rank} of {size}; start every rank once"
            ));
        }
        let differs =
            self.invariants.iter().zip(&hello.invariants).find(|(own, other)| own != other);
        let (own, other) = differs?;
        Some(format!(
            "rank {rank} has another {} than rank 0 ({} and {}); give all ranks the same",
            own.name, other.value, own.value
        ))
    }

    /// Every other rank: finds rank 0 and hears where the others are.
    fn join(&self, placement: &Placement, deadline: Instant) -> Result<Gathered> {
        let (rank, size, address) = (placement.rank, placement.size, placement.address());
        let nobody = |cause: String| Error::NoRankZero {
            rank,
            address: address.clone(),
            seconds: self.limit.as_secs(),
            cause,
        };
        let mut stream = loop {
            match connect(&address, deadline) {
                Ok(stream) => break stream,
                Err(cause) if Instant::now() >= deadline => return Err(nobody(cause.to_string())),
                Err(_) => std::thread::sleep(10 * PAUSE),
            }
        };
        let (listener, port) = listen_anywhere(stream.local_addr())?;
        let hello = Hello { rank, size, invariants: self.invariants.clone(), port };
        let answer = say(&mut stream, &hello).and_then(|()| {
            // Rank 0 answers when all are there.
            let left = deadline.saturating_duration_since(Instant::now()) + PATIENCE;
            stream.set_read_timeout(Some(left))?;
            hear_now::<Answer>(&mut stream)
        });
        let own_view = stream.peer_addr().map(|peer| peer.ip()).ok();
        match answer.map_err(|cause| nobody(cause.to_string()))? {
            Answer::Refused(words) => Err(Error::Refused(words)),
            Answer::Roster { token, places } => {
                let seen = |(host, port): (Option<IpAddr>, u16)| match (host, own_view) {
                    // A neighbour of rank 0 that it knows under a name of that machine only.
                    (Some(host), Some(zero)) if host.is_loopback() && !zero.is_loopback() => {
                        (Some(zero), port)
                    }
                    (host, zero) => (host.or(zero), port),
                };
                let places = places.into_iter().map(seen).collect();
                Ok(Gathered { control: vec![(0, stream)], listener, token, places })
            }
        }
    }
}

/// Data links: a rank calls all before it and is called by all after it.
fn link_all(
    placement: &Placement,
    gathered: &Gathered,
    deadline: Instant,
) -> Result<Vec<Option<TcpStream>>> {
    let (rank, size) = (placement.rank, placement.size);
    let Gathered { control, listener, token, places } = gathered;
    let mut links: Vec<Option<TcpStream>> = (0..size).map(|_| None).collect();
    for (other, &(host, port)) in places.iter().enumerate().take(rank) {
        let host = host.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let address = SocketAddr::new(host, port).to_string();
        let call = || {
            let mut stream = connect(&address, deadline)?;
            say(&mut stream, &Introduction { token: *token, rank })?;
            Ok(stream)
        };
        let unreachable =
            |cause| Error::Unreachable { rank, other, address: address.clone(), cause };
        links[other] = Some(call().map_err(unreachable)?);
    }
    while links.iter().flatten().count() + 1 < size {
        let Some(mut stream) = accept(listener, control, deadline)? else {
            let missing = (rank + 1..size).filter(|&r| links[r].is_none()).collect::<Vec<_>>();
            let words = format!("{} did not call rank {rank} in time", in_words(&missing));
            return Err(Error::Refused(words));
        };
        match hear::<Introduction>(&mut stream) {
            Ok(who) if who.token == *token && who.rank > rank && who.rank < size => {
                links[who.rank] = Some(stream);
            }
            _ => {} // a stranger
        }
    }
    Ok(links)
}

/// What a rank has when everybody is there.
struct Gathered {
    control: Vec<(usize, TcpStream)>,
    /// Where it takes data links.
    listener: TcpListener,
    token: u64,
    /// Where every rank takes them.
    places: Vec<(Option<IpAddr>, u16)>,
}

fn refuse_all(found: &mut [Option<(TcpStream, Hello)>], words: &str) {
    for (stream, _) in found.iter_mut().flatten() {
        let _ = say(stream, &Answer::Refused(words.to_string()));
    }
}

/// `rank 2`, or `ranks 1, 2 and 3`.
fn in_words(ranks: &[usize]) -> String {
    match ranks {
        [] => "no rank".into(),
        [one] => format!("rank {one}"),
        [first @ .., last] => {
            let first: Vec<String> = first.iter().map(ToString::to_string).collect();
            format!("ranks {} and {last}", first.join(", "))
        }
    }
}

/// Tells this rendezvous from others on the same machines.
fn token() -> u64 {
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    time.as_nanos() as u64 ^ (u64::from(std::process::id()) << 40)
}

fn listen_at(address: impl ToSocketAddrs) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// A listener for data links at a port of the system's choice, for the kind of addresses that the ranks meet at. Only
/// when rank 0 listens: the system could choose rank 0's port, and the others would take this rank for it.
fn listen_anywhere(met_at: io::Result<SocketAddr>) -> Result<(TcpListener, u16)> {
    let listen = || {
        let any = match met_at? {
            SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        };
        let listener = listen_at((any, 0))?;
        let port = listener.local_addr()?.port();
        Ok((listener, port))
    };
    listen().map_err(Error::connection("listening for data links"))
}

/// The next connection; `None` when the time is over. None can be expected when one of these ranks is gone.
fn accept(
    listener: &TcpListener,
    expected: &[(usize, TcpStream)],
    deadline: Instant,
) -> Result<Option<TcpStream>> {
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream
                    .set_nonblocking(false)
                    .map_err(Error::connection("preparing a connection"))?;
                return Ok(Some(stream));
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                if let Some((rank, _)) = expected.iter().find(|(_, stream)| has_hung_up(stream)) {
                    return Err(Error::Lost(gone(*rank)));
                }
                if Instant::now() >= deadline {
                    return Ok(None);
                }
                std::thread::sleep(PAUSE);
            }
            // A caller that has hung up again.
            Err(e) if e.kind() == ErrorKind::ConnectionAborted => {}
            Err(cause) => return Err(Error::connection("waiting for the other ranks")(cause)),
        }
    }
}

fn has_hung_up(stream: &TcpStream) -> bool {
    let peeked = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
    let _ = stream.set_nonblocking(false);
    match peeked {
        Ok(bytes) => bytes == 0,
        Err(e) => !matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
    }
}

fn connect(address: &str, deadline: Instant) -> io::Result<TcpStream> {
    let left = deadline.saturating_duration_since(Instant::now()).max(PAUSE);
    let mut last = io::Error::from(ErrorKind::AddrNotAvailable);
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, left) {
            // Where nobody listens, the system may choose the same port for this end: it is connected to itself.
            Ok(stream) if stream.local_addr()? == address => last = ErrorKind::AddrInUse.into(),
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn say(stream: &mut TcpStream, message: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend((text.len() as u32).to_le_bytes());
    bytes.extend(text);
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(&bytes)
}

fn hear<T: DeserializeOwned>(stream: &mut TcpStream) -> io::Result<T> {
    stream.set_read_timeout(Some(PATIENCE))?;
    hear_now(stream)
}

fn hear_now<T: DeserializeOwned>(stream: &mut TcpStream) -> io::Result<T> {
    let mut header = [0; 12];
    stream.read_exact(&mut header)?;
    let len = u32::from_le_bytes([header[8], header[9], header[10], header[11]]);
    if header[..8] != MAGIC || len > LONGEST {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut text = vec![0; len as usize];
    stream.read_exact(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Linux goes through its even ports from 32768 on, one for each attempt, and comes to the one that is called.
    #[cfg(target_os = "linux")]
    #[test]
    fn nobody_is_connected_to_itself() {
        let free = |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
        let port = (40_000..).step_by(2).find(free).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let attempt = |_| connect(&format!("127.0.0.1:{port}"), deadline).unwrap_err().kind();
        let met_itself = (0..200_000).map(attempt).any(|kind| kind == ErrorKind::AddrInUse);
        assert!(met_itself, "the system never chose port {port}: this test shows nothing");
    }
}
