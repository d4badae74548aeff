//! How the ranks find and authenticate each other.
//!
//! ```text
//! rank i -> rank 0   connects, gets a challenge, answers with its signed hello; rank 0 admits or refuses it
//! rank 0 -> rank i   the roster, when all are admitted: addresses of the data listeners and a token
//! rank i -> rank j   for all j < i: a data link, with a challenge and a signature made of secret and token
//! ```
//!
//! Connections that do not speak this protocol are ignored. With a [`Secret`], only ranks that know it are heard, so a
//! rank that does not fit ends the start of all with one sentence. Without one, a rank of another world size or a second
//! process with the same rank is refused alone: it may belong to another run.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::handshake::{Acceptor, Arrival, HANDSHAKE, PAUSE, Signed, connect, receive, send};
use crate::heartbeat::gone;
use crate::secret::{Nonce, Secret, nonce};
use crate::{Error, Placement, Result};

/// A value that must be equal on all ranks, such as the version of the program or the recipe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Invariant {
    /// What it is, e.g. `recipe`.
    pub name: String,
    /// Its value, or a hash of it.
    pub value: String,
}

/// The conditions of a rendezvous.
#[derive(Clone, Debug, Default)]
pub struct Rendezvous {
    /// Values that must be equal on all ranks.
    pub invariants: Vec<Invariant>,
    /// Timeout for all ranks to be there.
    pub limit: Duration,
    /// What the ranks authenticate themselves with.
    pub secret: Secret,
}

/// The first message of a rank to rank 0.
#[derive(Serialize, Deserialize)]
struct Hello {
    rank: usize,
    size: usize,
    invariants: Vec<Invariant>,
    /// Port of its data listener.
    port: u16,
    /// Challenge for the answers of rank 0.
    nonce: Nonce,
}

/// An answer of rank 0.
#[derive(Serialize, Deserialize)]
enum Answer {
    /// The roster follows when all ranks are admitted.
    Admitted,
    /// Entry `r` is the address of the data listener of rank `r`; its host is missing for rank 0.
    Roster { token: Nonce, addresses: Vec<(Option<IpAddr>, u16)> },
    /// The reason why the rank, or the whole start, fails.
    Refused(String),
}

/// The first message on a data link.
#[derive(Serialize, Deserialize)]
struct Introduction {
    rank: usize,
}

/// The connections of a rank.
pub(crate) struct Connections {
    /// Rank 0: one to every other rank. Others: one to rank 0.
    pub control: Vec<(usize, TcpStream)>,
    /// One to every other rank.
    pub data: Vec<Option<TcpStream>>,
}

/// A rank that knows the addresses of all.
struct Gathered {
    control: Vec<(usize, TcpStream)>,
    /// Accepts data links.
    acceptor: Acceptor,
    token: Nonce,
    /// Where every rank accepts them.
    addresses: Vec<(Option<IpAddr>, u16)>,
}

/// An admitted rank, as rank 0 sees it.
type Member = (TcpStream, Hello);

/// Why a rank is not admitted.
#[derive(Debug, PartialEq, Eq)]
enum Objection {
    /// It alone is refused.
    Refuse(String),
    /// No rank can start.
    Abort(String),
}

impl Rendezvous {
    pub(crate) fn run(&self, placement: &Placement) -> Result<Connections> {
        let deadline = Instant::now() + self.limit;
        let gathered = match placement.rank {
            0 => self.gather(placement, deadline)?,
            _ => self.join(placement, deadline)?,
        };
        self.link_all(placement, gathered, deadline)
    }

    /// Rank 0: admits all other ranks and sends each the roster.
    fn gather(&self, placement: &Placement, deadline: Instant) -> Result<Gathered> {
        let (address, size) = (placement.address(), placement.size);
        let listening = Acceptor::bind(&address).and_then(|acceptor| {
            let data = Acceptor::bind((acceptor.address()?.ip(), 0))?;
            let port = data.address()?.port();
            Ok((acceptor, data, port))
        });
        let (mut acceptor, data, port) =
            listening.map_err(|cause| Error::Listen { address: address.clone(), cause })?;
        let mut members: Vec<Option<Member>> = (0..size).map(|_| None).collect();
        let mut refused = None;
        while members.iter().flatten().count() + 1 < size {
            let waiting = Error::connection("waiting for the other ranks");
            let arrivals = acceptor.poll().map_err(waiting)?;
            if Instant::now() >= deadline {
                return Err(self.missing(&mut members, address, refused));
            }
            if arrivals.is_empty() {
                std::thread::sleep(PAUSE);
            }
            for Arrival { mut stream, nonce, message } in arrivals {
                match self.admit(&message, &nonce, size, &members) {
                    Ok(hello) => {
                        // A rank that is gone already is noticed when the roster is sent.
                        let _ = self.answer(&mut stream, &hello, &Answer::Admitted);
                        let rank = hello.rank;
                        members[rank] = Some((stream, hello));
                    }
                    Err(Some(Objection::Refuse(words))) => {
                        refuse(&mut stream, &words);
                        refused = Some(words);
                    }
                    Err(Some(Objection::Abort(words))) => {
                        refuse(&mut stream, &words);
                        self.refuse_all(&mut members, &words);
                        return Err(Error::Refused(words));
                    }
                    // Not a hello.
                    Err(None) => {}
                }
            }
        }
        let token = nonce()?;
        let address = |member: &Option<Member>| match member {
            None => (None, port),
            Some((stream, hello)) => (stream.peer_addr().ok().map(|peer| peer.ip()), hello.port),
        };
        let addresses: Vec<_> = members.iter().map(address).collect();
        let mut control = Vec::with_capacity(size - 1);
        for (mut stream, hello) in members.into_iter().flatten() {
            let roster = Answer::Roster { token, addresses: addresses.clone() };
            let action = format!("answering rank {}", hello.rank);
            self.answer(&mut stream, &hello, &roster).map_err(Error::connection(action))?;
            control.push((hello.rank, stream));
        }
        Ok(Gathered { control, acceptor: data, token, addresses })
    }

    /// Checks a first message; `None` for something else than a hello.
    fn admit(
        &self,
        message: &Signed,
        nonce: &Nonce,
        size: usize,
        members: &[Option<Member>],
    ) -> std::result::Result<Hello, Option<Objection>> {
        let Ok(hello) = message.open::<Hello>(&self.secret, nonce) else {
            // The number is not authenticated: it only completes the sentence.
            let claimed = serde_json::from_str::<Hello>(&message.body).map_err(|_| None)?.rank;
            return Err(Some(Objection::Refuse(format!(
                "rank {claimed} has another secret than rank 0; set {} to the same text for all ranks",
                Secret::VARIABLE
            ))));
        };
        let taken = members.get(hello.rank).is_some_and(Option::is_some);
        match self.objection(&hello, size, taken) {
            None => Ok(hello),
            Some(objection) => Err(Some(objection)),
        }
    }

    /// Why an authenticated rank cannot take part.
    fn objection(&self, hello: &Hello, size: usize, taken: bool) -> Option<Objection> {
        let rank = hello.rank;
        // Without a secret it may be a rank of another run.
        let stranger = match self.secret.is_set() {
            true => Objection::Abort,
            false => Objection::Refuse,
        };
        if hello.size != size {
            return Some(stranger(format!(
                "rank {rank} has a world size of {} and rank 0 of {size}; start all ranks by one command",
                hello.size
            )));
        }
        if rank == 0 || rank >= size || taken {
            return Some(stranger(format!(
                "two processes are rank {rank} of {size}; start every rank once"
            )));
        }
        let names = |list: &[Invariant]| list.iter().map(|i| i.name.clone()).collect::<Vec<_>>();
        if names(&hello.invariants) != names(&self.invariants) {
            return Some(stranger(format!(
                "rank {rank} runs another command or version than rank 0; start all ranks by one command"
            )));
        }
        let mut pairs = self.invariants.iter().zip(&hello.invariants);
        let (own, other) = pairs.find(|(own, other)| own != other)?;
        Some(Objection::Abort(format!(
            "rank {rank} has another {} than rank 0 ({} and {}); give all ranks the same",
            own.name, other.value, own.value
        )))
    }

    fn answer(&self, to: &mut TcpStream, hello: &Hello, answer: &Answer) -> io::Result<()> {
        send(to, &Signed::new(&self.secret, &hello.nonce, answer)?)
    }

    fn refuse_all(&self, members: &mut [Option<Member>], words: &str) {
        for (stream, hello) in members.iter_mut().flatten() {
            let _ = self.answer(stream, hello, &Answer::Refused(words.to_string()));
        }
    }

    fn missing(
        &self,
        members: &mut [Option<Member>],
        address: String,
        refused: Option<String>,
    ) -> Error {
        let size = members.len();
        let missing: Vec<usize> = (1..size).filter(|&r| members[r].is_none()).collect();
        let missing = list_ranks(&missing);
        let reason = refused.map_or(String::new(), |words| format!(" (refused: {words})"));
        self.refuse_all(members, &format!("{missing} of {size} did not come{reason}"));
        Error::Missing { address, seconds: self.limit.as_secs(), missing, size, reason }
    }

    /// Every other rank: is admitted by rank 0 and receives the roster.
    fn join(&self, placement: &Placement, deadline: Instant) -> Result<Gathered> {
        let (rank, address) = (placement.rank, placement.address());
        let not_found = |cause: io::Error| Error::NoRankZero {
            rank,
            address: address.clone(),
            seconds: self.limit.as_secs(),
            cause: cause.to_string(),
        };
        let nonce = nonce()?;
        let (mut stream, acceptor) = loop {
            // Until it is admitted, a rank tries again: rank 0 may not run yet, or strangers may have pushed it out.
            match self.knock(placement, nonce, deadline) {
                Ok(Some(admitted)) => break admitted,
                Err(Error::Connection { cause, .. }) if Instant::now() >= deadline => {
                    return Err(not_found(cause));
                }
                Ok(None) | Err(Error::Connection { .. }) => std::thread::sleep(10 * PAUSE),
                Err(error) => return Err(error),
            }
        };
        let zero = stream.peer_addr().map(|peer| peer.ip()).ok();
        match self.hear(&mut stream, &nonce, deadline + HANDSHAKE) {
            Err(Error::Connection { cause, .. }) => Err(not_found(cause)),
            Err(error) => Err(error),
            Ok(Answer::Roster { token, addresses }) => {
                let seen = |(host, port): (Option<IpAddr>, u16)| match (host, zero) {
                    // A rank on the machine of rank 0, which knows it by an address of that machine only.
                    (Some(host), Some(zero)) if host.is_loopback() && !zero.is_loopback() => {
                        (Some(zero), port)
                    }
                    (host, zero) => (host.or(zero), port),
                };
                let addresses = addresses.into_iter().map(seen).collect();
                Ok(Gathered { control: vec![(0, stream)], acceptor, token, addresses })
            }
            Ok(_) => Err(not_found(ErrorKind::InvalidData.into())),
        }
    }

    /// One attempt to be admitted; `None` where rank 0 answers something else.
    fn knock(
        &self,
        placement: &Placement,
        nonce: Nonce,
        deadline: Instant,
    ) -> Result<Option<(TcpStream, Acceptor)>> {
        let attempt = deadline.min(Instant::now() + HANDSHAKE);
        let mut data = None;
        let hello = |stream: &TcpStream| {
            // Only when rank 0 listens: the system could choose rank 0's port, and others would take this rank for it.
            let acceptor = Acceptor::bind((data_host(placement, stream.local_addr()?), 0))?;
            let port = acceptor.address()?.port();
            data = Some(acceptor);
            let (rank, size) = (placement.rank, placement.size);
            Ok(Hello { rank, size, invariants: self.invariants.clone(), port, nonce })
        };
        let stream = connect(placement.address(), attempt, &self.secret, hello);
        let mut stream = stream.map_err(Error::connection("finding rank 0"))?;
        match self.hear(&mut stream, &nonce, attempt)? {
            Answer::Admitted => Ok(data.map(|acceptor| (stream, acceptor))),
            _ => Ok(None),
        }
    }

    /// An answer of rank 0. Refusals need no signature: rank 0 cannot sign for a rank with another secret.
    fn hear(&self, stream: &mut TcpStream, nonce: &Nonce, deadline: Instant) -> Result<Answer> {
        let mut hear = || {
            let signed: Signed = receive(stream, deadline)?;
            match serde_json::from_str(&signed.body)? {
                Answer::Refused(words) => Ok(Answer::Refused(words)),
                _ => signed.open(&self.secret, nonce),
            }
        };
        match hear().map_err(Error::connection("waiting for rank 0"))? {
            Answer::Refused(words) => Err(Error::Refused(words)),
            answer => Ok(answer),
        }
    }

    /// Data links: a rank connects to all before it and accepts all after it.
    fn link_all(
        &self,
        placement: &Placement,
        gathered: Gathered,
        deadline: Instant,
    ) -> Result<Connections> {
        let (rank, size) = (placement.rank, placement.size);
        let Gathered { control, mut acceptor, token, addresses } = gathered;
        let key = self.secret.with(&token);
        let mut data: Vec<Option<TcpStream>> = (0..size).map(|_| None).collect();
        for (other, &(host, port)) in addresses.iter().enumerate().take(rank) {
            let address = SocketAddr::new(host.unwrap_or(Ipv4Addr::LOCALHOST.into()), port);
            let link = connect(address, deadline, &key, |_| Ok(Introduction { rank }));
            data[other] = Some(link.map_err(|cause| {
                let address = address.to_string();
                Error::Unreachable { rank, other, address, cause }
            })?);
        }
        while data.iter().flatten().count() + 1 < size {
            let waiting = Error::connection("waiting for data links");
            let arrivals = acceptor.poll().map_err(waiting)?;
            if arrivals.is_empty() {
                if let Some((rank, _)) = control.iter().find(|(_, stream)| has_hung_up(stream)) {
                    return Err(Error::Lost(gone(*rank)));
                }
                std::thread::sleep(PAUSE);
            }
            if Instant::now() >= deadline {
                let missing = (rank + 1..size).filter(|&r| data[r].is_none()).collect::<Vec<_>>();
                let words =
                    format!("{} did not connect to rank {rank} in time", list_ranks(&missing));
                return Err(Error::Refused(words));
            }
            for Arrival { stream, nonce, message } in arrivals {
                let who = message.open::<Introduction>(&key, &nonce).map(|who| who.rank);
                if let Some(link) = who.ok().filter(|&who| who > rank).and_then(|r| data.get_mut(r))
                {
                    *link = Some(stream);
                }
            }
        }
        Ok(Connections { control, data })
    }
}

/// The address of a data listener: the interface over which this rank reaches rank 0. With an
/// unspecified address of rank 0 it listens at all interfaces.
fn data_host(placement: &Placement, local: SocketAddr) -> IpAddr {
    match placement.host.parse::<IpAddr>() {
        Ok(host) if host.is_unspecified() => host,
        _ => local.ip(),
    }
}

fn refuse(stream: &mut TcpStream, words: &str) {
    let refusal = Answer::Refused(words.to_string());
    let _ = Signed::new(&Secret::default(), &Nonce::default(), &refusal)
        .and_then(|signed| send(stream, &signed));
}

/// `rank 2`, or `ranks 1, 2 and 3`.
fn list_ranks(ranks: &[usize]) -> String {
    match ranks {
        [] => "no rank".into(),
        [one] => format!("rank {one}"),
        [first @ .., last] => {
            let first: Vec<String> = first.iter().map(ToString::to_string).collect();
            format!("ranks {} and {last}", first.join(", "))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::free_port;

    fn rendezvous(secret: &str) -> Rendezvous {
        let invariant = |name: &str| Invariant { name: name.into(), value: "1".into() };
        let secret = Secret::from(secret);
        let invariants = vec![invariant("version"), invariant("recipe")];
        Rendezvous { invariants, limit: Duration::from_secs(30), secret }
    }

    fn hello(rank: usize, size: usize, invariants: Vec<Invariant>) -> Hello {
        Hello { rank, size, invariants, port: 9, nonce: [0; 16] }
    }

    fn placement(rank: usize, port: u16) -> Placement {
        let (host, launcher) = ("127.0.0.1".to_string(), "torchrun");
        Placement { rank, size: 2, local_rank: rank, local_size: 2, host, port, launcher }
    }

    #[test]
    fn rejects_different_invariants() {
        for secret in ["", "set"] {
            let own = rendezvous(secret);
            let mut other = own.invariants.clone();
            assert_eq!(own.objection(&hello(1, 2, other.clone()), 2, false), None);
            let refused = |list: Vec<Invariant>| {
                own.objection(&hello(1, 2, list), 2, false).expect("an objection")
            };
            let stranger = |objection: &Objection| match (objection, secret) {
                (Objection::Refuse(words), "") | (Objection::Abort(words), "set") => words.clone(),
                other => panic!("{other:?}"),
            };
            for list in [vec![], other[..1].to_vec(), [&other[..], &other[..1]].concat()] {
                let words = stranger(&refused(list));
                assert!(words.starts_with("rank 1 runs another command or version"), "{words}");
            }
            other[1].value = "2".into();
            let words = "rank 1 has another recipe than rank 0 (2 and 1); give all ranks the same";
            assert_eq!(refused(other.clone()), Objection::Abort(words.into()));
            for (rank, size, taken) in [(1, 3, false), (0, 2, false), (2, 2, false), (1, 2, true)] {
                let hello = hello(rank, size, own.invariants.clone());
                stranger(&own.objection(&hello, 2, taken).unwrap());
            }
        }
    }

    #[test]
    fn refuses_hello_with_another_secret() {
        let (own, nonce) = (rendezvous("set"), [7; 16]);
        let made = |secret: &Secret, nonce: &Nonce| {
            Signed::new(secret, nonce, &hello(1, 2, own.invariants.clone())).unwrap()
        };
        let members = [None, None];
        assert!(own.admit(&made(&own.secret, &nonce), &nonce, 2, &members).is_ok());
        for message in [made(&Secret::default(), &nonce), made(&own.secret, &[8; 16])] {
            let objection = own.admit(&message, &nonce, 2, &members).err().flatten().unwrap();
            let words = "rank 1 has another secret than rank 0; set FOX_RENDEZVOUS_SECRET to the same text for all ranks";
            assert_eq!(objection, Objection::Refuse(words.into()));
        }
    }

    #[test]
    fn data_listeners_bind_rendezvous_interface() {
        let local = "127.0.0.1:5".parse().unwrap();
        let host = |host: &str| Placement { host: host.into(), ..placement(1, 9) };
        assert!(data_host(&host("127.0.0.1"), local).is_loopback());
        assert!(data_host(&host("node7"), local).is_loopback());
        assert!(data_host(&host("0.0.0.0"), local).is_unspecified());
        let port = free_port().unwrap();
        std::thread::scope(|scope| {
            let deadline = Instant::now() + Duration::from_secs(30);
            let zero = scope.spawn(move || rendezvous("").gather(&placement(0, port), deadline));
            let one = rendezvous("").join(&placement(1, port), deadline).unwrap();
            for gathered in [&one, &zero.join().unwrap().unwrap()] {
                assert!(gathered.acceptor.address().unwrap().ip().is_loopback());
            }
        });
    }

    /// The heartbeats have not started yet.
    #[test]
    fn notices_rank_lost_before_data_links() {
        let port = free_port().unwrap();
        std::thread::scope(|scope| {
            let zero = scope.spawn(move || rendezvous("").run(&placement(0, port)).err());
            let deadline = Instant::now() + Duration::from_secs(30);
            drop(rendezvous("").join(&placement(1, port), deadline).unwrap());
            let error = zero.join().unwrap().unwrap().to_string();
            assert!(error.starts_with("rank 1 is gone (its connection closed)"), "{error}");
        });
    }

    #[test]
    fn names_unreachable_rank() {
        let port = free_port().unwrap();
        std::thread::scope(|scope| {
            let deadline = Instant::now() + Duration::from_secs(30);
            let zero = scope.spawn(move || rendezvous("").gather(&placement(0, port), deadline));
            let one = rendezvous("").join(&placement(1, port), deadline).unwrap();
            // Rank 0 ends after the roster.
            drop(zero.join().unwrap().unwrap());
            let address = format!("127.0.0.1:{}", one.addresses[0].1);
            let error = rendezvous("").link_all(&placement(1, port), one, deadline).err().unwrap();
            let (error, want) =
                (error.to_string(), format!("rank 1 cannot reach rank 0 at {address} ("));
            assert!(error.starts_with(&want), "{error}");
            assert!(
                error.ends_with("); let all ranks connect to each other at any port"),
                "{error}"
            );
        });
    }
}
