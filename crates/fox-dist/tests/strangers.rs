//! Attacks on the port of the rendezvous: the ranks start as if they were not there.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
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

/// A text as the protocol frames it.
fn framed(text: &str) -> Vec<u8> {
    [b"fox-dist", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat()
}

/// A message with a signature that is not one.
fn forged(body: &str) -> Vec<u8> {
    framed(&serde_json::json!({ "body": body, "signature": vec![0; 32] }).to_string())
}

/// What a genuine rank with the right secret sends to a listener that challenges it.
fn recorded_handshake() -> Vec<u8> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    scope(|scope| {
        let victim = Rendezvous { limit: Duration::from_millis(200), ..rendezvous("a") };
        scope.spawn(move || drop(Group::join(&placement(1, 2, port), &victim)));
        let (mut stream, _) = listener.accept().unwrap();
        let challenge = serde_json::json!({ "nonce": vec![7; 16] }).to_string();
        stream.write_all(&framed(&challenge)).unwrap();
        let mut header = [0; 12];
        stream.read_exact(&mut header).unwrap();
        let length = u32::from_le_bytes(header[8..].try_into().unwrap()) as usize;
        let mut body = vec![0; length];
        stream.read_exact(&mut body).unwrap();
        // The victim finds nothing at this port any more, and gives up.
        drop((stream, listener));
        [&header[..], &body].concat()
    })
}

/// Starts two ranks while `attack` runs against rank 0 until its flag is set. They must find each other quickly.
fn start_under(kind: &str, secret: &Secret, attack: impl Fn(u16, &AtomicBool) + Sync) {
    let (port, over) = (free_port().unwrap(), AtomicBool::new(false));
    let conditions = || Rendezvous { secret: secret.clone(), ..rendezvous("a") };
    let join = |rank: usize| {
        let group = Group::join(&placement(rank, 2, port), &conditions()).expect(kind);
        let all = group.all_gather(&[rank as u8]).expect(kind);
        group.leave().expect(kind);
        all
    };
    scope(|scope| {
        let zero = scope.spawn(|| join(0));
        let attacker = scope.spawn(|| attack(port, &over));
        // The attack is under way before the second rank comes.
        sleep(Duration::from_millis(300));
        let start = Instant::now();
        assert_eq!(join(1), [[0], [1]], "{kind}");
        assert_eq!(zero.join().unwrap(), [[0], [1]], "{kind}");
        assert!(start.elapsed() < Duration::from_secs(8), "{kind}: {:?}", start.elapsed());
        over.store(true, Ordering::Release);
        attacker.join().unwrap();
    });
}

/// Every kind of stranger comes three times: before the second rank, and while it comes.
const TIMES: usize = 3;

/// A stranger that sends these bytes and closes the connection.
fn sends(bytes: impl Into<Vec<u8>>) -> Attack {
    let bytes = bytes.into();
    Box::new(move |port, _| {
        for _ in 0..TIMES {
            let mut stranger = connect(port);
            let _ = stranger.write_all(&bytes);
            sleep(Duration::from_millis(100));
        }
    })
}

/// A rank that must be refused with a sentence that starts with these words.
fn refused(rank: usize, size: usize, conditions: Rendezvous, words: &'static str) -> Attack {
    Box::new(move |port, _| {
        let error = Group::join(&placement(rank, size, port), &conditions).unwrap_err().to_string();
        assert!(error.starts_with(words) && !error.contains('\n'), "{error}");
    })
}

type Attack = Box<dyn Fn(u16, &AtomicBool) + Send + Sync>;

/// Strangers by kind, at ranks with a secret.
fn strangers() -> Vec<(&'static str, Attack)> {
    let hello = |rank: usize, size: usize| {
        serde_json::json!({
            "rank": rank, "size": size, "invariants": [], "port": 9, "nonce": vec![0; 16],
        })
        .to_string()
    };
    let with = |secret: &str| Rendezvous { secret: secret.into(), ..rendezvous("a") };
    const SECRET: &str = "rank 1 has another secret than rank 0; set FOX_RENDEZVOUS_SECRET to the same text for all ranks";
    let replay = recorded_handshake();
    let truncated = forged(&hello(1, 2))[..40].to_vec();
    let empty_signature =
        framed(&serde_json::json!({ "body": hello(1, 2), "signature": [] }).to_string());
    vec![
        ("garbage", sends(vec![0xa5; 100_000])),
        ("zeros", sends(vec![0; 64])),
        ("one byte", sends([255])),
        ("nothing, closed", sends([])),
        ("HTTP request", sends("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")),
        ("TLS client hello", sends(*b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")),
        ("SSH banner", sends("SSH-2.0-OpenSSH_9.6\r\n")),
        ("Redis command", sends("*1\r\n$4\r\nPING\r\n")),
        ("other magic", sends(*b"fox-dust\x02\x00\x00\x00{}")),
        ("magic only", sends(*b"fox-dist")),
        ("length of 4 GiB", sends([&b"fox-dist"[..], &u32::MAX.to_le_bytes()].concat())),
        ("length of zero", sends(*b"fox-dist\x00\x00\x00\x00")),
        ("truncated message", sends(truncated)),
        ("not JSON", sends(*b"fox-dist\x02\x00\x00\x00xx")),
        ("JSON of another type", sends(framed("null"))),
        ("deeply nested JSON", sends(framed(&"[".repeat(60_000)))),
        ("unsigned hello", sends(empty_signature)),
        ("hello with a wrong signature", sends(forged(&hello(1, 2)))),
        ("wrong world size, not signed", sends(forged(&hello(1, 7)))),
        ("rank out of range, not signed", sends(forged(&hello(usize::MAX, 2)))),
        ("rank 0 again, not signed", sends(forged(&hello(0, 2)))),
        ("signed text that is not a hello", sends(forged(r#"{"rank":1}"#))),
        ("replayed handshake", sends(replay)),
        ("rank without a secret", refused(1, 2, with(""), SECRET)),
        ("rank with another secret", refused(1, 2, with("another"), SECRET)),
        (
            "silent",
            Box::new(|port, over| {
                let held: Vec<TcpStream> = (0..40).map(|_| connect(port)).collect();
                wait(over);
                drop(held);
            }),
        ),
        (
            "a byte at a time",
            Box::new(|port, over| {
                let mut slow: Vec<TcpStream> = (0..10).map(|_| connect(port)).collect();
                for byte in forged("slow") {
                    if over.load(Ordering::Acquire) {
                        break;
                    }
                    slow.iter_mut().for_each(|stream| drop(stream.write_all(&[byte])));
                    sleep(Duration::from_millis(20));
                }
            }),
        ),
        (
            "half-closed",
            Box::new(|port, over| {
                let stranger = connect(port);
                let _ = stranger.shutdown(Shutdown::Write);
                wait(over);
            }),
        ),
        (
            "reset",
            Box::new(|port, _| {
                for _ in 0..TIMES {
                    // Data that were not read: closing resets the connection.
                    let mut stranger = connect(port);
                    let _ = stranger.write_all(b"fox-dist");
                    let _ = stranger.peek(&mut [0; 1]);
                    drop(stranger);
                    sleep(Duration::from_millis(100));
                }
            }),
        ),
        (
            "flood",
            Box::new(|port, over| {
                let mut held = Vec::new();
                while !over.load(Ordering::Acquire) {
                    // The port closes when the ranks have met.
                    let Ok(mut stranger) = TcpStream::connect(("127.0.0.1", port)) else { break };
                    let _ = stranger.write_all(b"fox-dist");
                    held.push(stranger);
                    if held.len() > 200 {
                        held.clear();
                    }
                }
            }),
        ),
    ]
}

/// The same at ranks without a secret, where strangers may be ranks of another run.
fn ranks_of_other_runs() -> Vec<(&'static str, Attack)> {
    let open = || Rendezvous { secret: Secret::default(), ..rendezvous("a") };
    let none = Rendezvous { invariants: Vec::new(), ..open() };
    vec![
        ("other world size", refused(1, 3, open(), "rank 1 has a world size of 3 and rank 0 of 2")),
        ("rank out of range", refused(2, 3, open(), "rank 2 has a world size of 3")),
        ("no invariants", refused(1, 2, none, "rank 1 runs another command or version")),
        ("garbage without a secret", sends(vec![7; 1000])),
    ]
}

fn wait(over: &AtomicBool) {
    while !over.load(Ordering::Acquire) {
        sleep(Duration::from_millis(10));
    }
}

#[test]
fn ignores_every_kind_of_stranger() {
    let (secret, none) = (Secret::from("secret"), Secret::default());
    let kinds = strangers().into_iter().map(|kind| (&secret, kind));
    let kinds: Vec<_> =
        kinds.chain(ranks_of_other_runs().into_iter().map(|kind| (&none, kind))).collect();
    assert!(kinds.len() >= 30);
    for some in kinds.chunks(12) {
        scope(|scope| {
            for (secret, (kind, attack)) in some {
                scope.spawn(move || start_under(kind, secret, attack));
            }
        });
    }
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
