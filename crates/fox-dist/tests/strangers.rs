//! Attacks on the port of the rendezvous: the ranks start as if they were not there.
#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use common::{placement, rendezvous};
use fox_dist::{Group, Rendezvous, Secret, free_port};

fn connect(port: u16) -> TcpStream {
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => break stream,
            Err(_) => sleep(Duration::from_millis(5)),
        }
    }
}

/// A message as the protocol frames it, with a signature that is not one.
fn forged(body: &str) -> Vec<u8> {
    let text = serde_json::json!({ "body": body, "signature": vec![0; 32] }).to_string();
    [b"fox-dist", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat()
}

/// Starts two ranks while `attack` runs against rank 0 until its flag is set. They must find each other quickly.
fn start_under(attack: impl Fn(u16, &AtomicBool) + Sync) {
    let (port, over) = (free_port().unwrap(), AtomicBool::new(false));
    let join = |rank: usize| {
        let group = Group::join(&placement(rank, 2, port), &rendezvous("a")).unwrap();
        let all = group.all_gather(&[rank as u8]).unwrap();
        group.leave().unwrap();
        all
    };
    scope(|scope| {
        let zero = scope.spawn(|| join(0));
        let attacker = scope.spawn(|| attack(port, &over));
        // The attack is under way before the second rank comes.
        sleep(Duration::from_millis(300));
        let start = Instant::now();
        assert_eq!(join(1), [[0], [1]]);
        assert_eq!(zero.join().unwrap(), [[0], [1]]);
        assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
        over.store(true, Ordering::Release);
        attacker.join().unwrap();
    });
}

#[test]
fn ignores_garbage_http_and_forged_messages() {
    let hello =
        r#"{"rank":1,"size":2,"invariants":[],"port":9,"nonce":[0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0]}"#;
    let wrong_size = hello.replace("\"size\":2", "\"size\":7");
    let huge = [&b"fox-dist"[..], &u32::MAX.to_le_bytes()].concat();
    let messages: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
        b"\x16\x03\x01\x02\x00\x01\x00".to_vec(),
        vec![0; 100_000],
        vec![255; 1],
        b"fox-dist".to_vec(),
        huge,
        b"fox-dist\x02\x00\x00\x00{}".to_vec(),
        b"fox-dist\x04\x00\x00\x00null".to_vec(),
        forged(hello),
        forged(&wrong_size),
        forged(r#"{"rank":1}"#),
        forged(""),
        Vec::new(),
    ];
    start_under(|port, _| {
        for message in &messages {
            let mut stranger = connect(port);
            let _ = stranger.write_all(message);
        }
    });
}

#[test]
fn ignores_silent_and_slow_connections() {
    start_under(|port, over| {
        let silent: Vec<TcpStream> = (0..40).map(|_| connect(port)).collect();
        let mut slow: Vec<TcpStream> = (0..10).map(|_| connect(port)).collect();
        let bytes = forged("a byte at a time");
        for byte in bytes {
            if over.load(Ordering::Acquire) {
                break;
            }
            slow.iter_mut().for_each(|stream| drop(stream.write_all(&[byte])));
            sleep(Duration::from_millis(50));
        }
        drop(silent);
    });
}

#[test]
fn survives_a_flood() {
    start_under(|port, over| {
        let mut held = Vec::new();
        while !over.load(Ordering::Acquire) {
            // The port closes when the ranks have met.
            let Ok(mut stranger) = TcpStream::connect(("127.0.0.1", port)) else { break };
            let _ = stranger.write_all(b"fox-dist");
            held.push(stranger);
            if held.len() > 400 {
                held.clear();
            }
        }
    });
}

#[test]
fn refuses_rank_without_secret() {
    start_under(|port, _| {
        for secret in [Secret::default(), "another".into()] {
            let wrong = Rendezvous { secret, ..rendezvous("a") };
            let error = Group::join(&placement(1, 2, port), &wrong).unwrap_err().to_string();
            assert_eq!(
                error,
                "rank 1 has another secret than rank 0; set FOX_RENDEZVOUS_SECRET to the same text for all ranks"
            );
        }
    });
}

/// Without a secret, ranks of another run may come to the same port.
#[test]
fn refuses_ranks_of_another_run_alone() {
    let port = free_port().unwrap();
    let open = || Rendezvous { secret: Secret::default(), ..rendezvous("a") };
    scope(|scope| {
        let zero = scope.spawn(|| Group::join(&placement(0, 2, port), &open()).unwrap());
        let error = Group::join(&placement(1, 3, port), &open()).unwrap_err().to_string();
        assert!(error.starts_with("rank 1 has a world size of 3 and rank 0 of 2"), "{error}");
        let none = Rendezvous { invariants: Vec::new(), ..open() };
        let error = Group::join(&placement(1, 2, port), &none).unwrap_err().to_string();
        assert!(error.starts_with("rank 1 runs another command or version"), "{error}");
        let one = Group::join(&placement(1, 2, port), &open()).unwrap();
        assert_eq!(zero.join().unwrap().size(), one.size());
    });
}

#[test]
fn names_missing_ranks_and_the_last_refusal() {
    let port = free_port().unwrap();
    let short = Rendezvous { limit: Duration::from_secs(2), ..rendezvous("a") };
    scope(|scope| {
        let zero = scope.spawn(|| Group::join(&placement(0, 4, port), &short).unwrap_err());
        let one =
            scope.spawn(|| Group::join(&placement(1, 4, port), &rendezvous("a")).unwrap_err());
        let wrong = Rendezvous { secret: "another".into(), ..rendezvous("a") };
        Group::join(&placement(2, 4, port), &wrong).unwrap_err();
        for error in [zero.join().unwrap().to_string(), one.join().unwrap().to_string()] {
            let want =
                "ranks 2 and 3 of 4 did not come (refused: rank 2 has another secret than rank 0";
            assert!(error.contains(want), "{error}");
        }
    });
}

/// A connection that is dropped reads the end of the stream: it holds nothing of rank 0.
#[test]
fn drops_incomplete_connections() {
    let port = free_port().unwrap();
    let short = Rendezvous { limit: Duration::from_secs(8), ..rendezvous("a") };
    scope(|scope| {
        scope.spawn(|| Group::join(&placement(0, 2, port), &short).unwrap_err());
        let mut silent = connect(port);
        let start = Instant::now();
        silent.read_to_end(&mut Vec::new()).unwrap();
        assert!(start.elapsed() < Duration::from_secs(7), "{:?}", start.elapsed());
    });
}
