//! A port for ranks on one machine.

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::SystemTime;

/// Below the ports that systems give to connections by themselves: from 32768 on Linux, from 49152 elsewhere.
const FIRST: u16 = 20_000;
const COUNT: u16 = 12_000;

/// An unused port of this machine, for the rendezvous of ranks that will be started on it.
///
/// A port from the system's own choice (port 0) could be given to another socket before rank 0 listens at it, even to
/// one of the ranks. The system does not hand out those of this range, and a process does not get one twice.
///
/// # Errors
/// The system's answer for the last port, where no port of the range is free.
pub fn free_port() -> io::Result<u16> {
    static START: OnceLock<u16> = OnceLock::new();
    static TAKEN: AtomicU16 = AtomicU16::new(0);
    let start = *START.get_or_init(|| {
        let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let mixed = (u64::from(std::process::id()) << 32 ^ time.as_nanos() as u64)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((mixed >> 32) % u64::from(COUNT)) as u16
    });
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for _ in 0..COUNT {
        let step = TAKEN.fetch_add(1, Ordering::Relaxed) % COUNT;
        let port = FIRST + (start + step) % COUNT;
        match TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
            Ok(_) => return Ok(port),
            Err(cause) => last = cause,
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_differ_and_are_not_ephemeral() {
        let ports: Vec<u16> = (0..100).map(|_| free_port().unwrap()).collect();
        let mut distinct = ports.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), ports.len(), "{ports:?}");
        assert!(ports.iter().all(|port| (FIRST..FIRST + COUNT).contains(port)), "{ports:?}");
    }

    #[test]
    fn skips_taken_ports() {
        let first = free_port().unwrap();
        let next = FIRST + (first - FIRST + 1) % COUNT;
        // Taken by this test or by another process: either way it is not free.
        let _taken = TcpListener::bind((Ipv4Addr::LOCALHOST, next));
        assert!((0..20).all(|_| free_port().unwrap() != next));
    }
}
