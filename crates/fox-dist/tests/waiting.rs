//! A rank that waits for rank 0 does not listen yet: the system could give it the very port of rank 0, and the others
//! would take it for rank 0. Alone in its process, because it looks at all sockets of it.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // helpers of tests

use std::collections::HashSet;
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fox_dist::{Group, Placement, Rendezvous, free_port};

/// Number of sockets of this process that take connections.
fn listening() -> usize {
    let own: HashSet<String> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok()?.to_str().map(String::from))
        .collect();
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let is_own_listener = |line: &&str| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        columns[3] == "0A" && own.contains(&format!("socket:[{}]", columns[9]))
    };
    table.lines().skip(1).filter(is_own_listener).count()
}

#[test]
fn waiting_rank_does_not_listen() {
    let probe = TcpListener::bind("127.0.0.1:0").unwrap();
    assert_eq!(listening(), 1, "the count sees listeners");
    drop(probe);
    let second = Placement {
        rank: 1,
        size: 2,
        local_rank: 1,
        local_size: 2,
        host: "127.0.0.1".into(),
        port: free_port().unwrap(),
        launcher: "torchrun",
    };
    let short = Rendezvous { limit: Duration::from_millis(500), ..Rendezvous::default() };
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert!(Group::join(&second, &short).is_err());
            over.store(true, Ordering::Release);
        });
        while !over.load(Ordering::Acquire) {
            assert_eq!(listening(), 0);
            std::thread::sleep(Duration::from_millis(5));
        }
    });
}
