//! Connection limits, DNS rebinding, long texts, half-closed connections.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use common::client::{get, open, post};
use common::{serve, serve_with, wait_for};
use fox_infer::EngineOptions;
use fox_serve::ServeOptions;
use serde_json::json;

#[test]
fn health_beyond_the_connection_limit() {
    let options = ServeOptions { max_connections: 3, ..ServeOptions::default() };
    let server = serve_with(EngineOptions::default(), options);
    let idle: Vec<TcpStream> =
        (0..3).map(|_| TcpStream::connect(server.address).unwrap()).collect();
    for _ in 0..50 {
        assert_eq!(get(server.address, "/health").unwrap().status, 200);
    }
    let reply = post(server.address, "/v1/completions", &json!({ "prompt": "a" })).unwrap();
    assert_eq!((reply.status, reply.header("retry-after")), (503, Some("1")));
    assert_eq!(reply.json()["error"]["code"], "crowded");
    assert!(get(server.address, "/metrics").unwrap().text().contains("fox_http_responses_total"));
    drop(idle);
    wait_for("there is room again", || {
        post(server.address, "/v1/completions", &json!({ "prompt": "a" })).unwrap().status == 200
    });
}

#[test]
fn long_text_is_refused_without_delay() {
    let server = serve();
    let body = json!({ "prompt": "a long text ".repeat(1_000_000) }).to_string();
    let clients: Vec<_> = (0..3)
        .map(|_| {
            let (address, body) = (server.address, body.clone());
            std::thread::spawn(move || {
                let kind = [("content-type", "application/json")];
                open(address, ("POST", "/v1/completions"), &kind, body.as_bytes())
                    .unwrap()
                    .finish()
                    .unwrap()
            })
        })
        .collect();
    let mut worst = Duration::ZERO;
    while clients.iter().any(|client| !client.is_finished()) {
        let start = Instant::now();
        assert_eq!(get(server.address, "/health").unwrap().status, 200);
        worst = worst.max(start.elapsed());
    }
    // A loose bound: other tests run beside this one.
    assert!(worst < Duration::from_secs(3), "{worst:?}");
    for client in clients {
        let reply = client.join().unwrap();
        let error = &reply.json()["error"];
        assert_eq!(
            (reply.status, &error["code"]),
            (400, &json!("context_length_exceeded")),
            "{error}"
        );
        assert!(error["message"].as_str().unwrap().contains("12000000 bytes"), "{error}");
    }
}

#[test]
fn rejects_dns_rebinding() {
    let options = ServeOptions {
        allow_origins: vec!["https://app.example".into()],
        ..ServeOptions::default()
    };
    let server = serve_with(EngineOptions::default(), options);
    let send = |method: &str, headers: &str| {
        let mut socket = TcpStream::connect(server.address).unwrap();
        let text = format!("{method} /v1/models HTTP/1.1\r\n{headers}connection: close\r\n\r\n");
        socket.write_all(text.as_bytes()).unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).unwrap();
        answer
    };
    let refused = send("GET", "host: evil.example\r\n");
    assert!(
        refused.starts_with("HTTP/1.1 403") && refused.contains("allowed origins"),
        "{refused}"
    );
    assert!(send("GET", "host: localhost:99\r\n").starts_with("HTTP/1.1 200"));
    assert!(send("GET", "host: app.example\r\n").starts_with("HTTP/1.1 200"));
    let asked =
        "host: localhost\r\norigin: https://app.example\r\naccess-control-request-method: POST\r\n";
    let preflight = send("OPTIONS", asked);
    assert!(preflight.starts_with("HTTP/1.1 204"), "{preflight}");
    assert!(preflight.contains("access-control-allow-origin: https://app.example"), "{preflight}");
    assert!(preflight.contains("content-type"), "{preflight}");
    let strange = send("GET", "host: localhost\r\norigin: https://evil.example\r\n");
    assert!(
        strange.starts_with("HTTP/1.1 200") && !strange.contains("access-control"),
        "{strange}"
    );
    assert!(
        send("OPTIONS", "host: localhost\r\norigin: https://evil.example\r\n")
            .starts_with("HTTP/1.1 405")
    );
}

#[test]
fn responses_have_request_ids() {
    let server = serve();
    let own = [("x-request-id", "mine.42")];
    let reply = open(server.address, ("GET", "/health"), &own, b"").unwrap();
    assert_eq!(reply.head.header("x-request-id"), Some("mine.42"));
    let (a, b) =
        (get(server.address, "/nothing").unwrap(), get(server.address, "/health").unwrap());
    assert!(a.header("x-request-id").unwrap().starts_with("req-"));
    assert_ne!(a.header("x-request-id"), b.header("x-request-id"));
}

#[test]
fn half_closed_client_gets_its_answer() {
    let server = serve();
    for (version, stream) in [("1.1", false), ("1.1", true), ("1.0", false), ("1.0", true)] {
        let body =
            json!({ "prompt": "a", "max_tokens": 400, "stream": stream, "ignore_eos": true })
                .to_string();
        let mut socket = TcpStream::connect(server.address).unwrap();
        let head = format!(
            "POST /v1/completions HTTP/{version}\r\nhost: localhost\r\ncontent-type: application/json\r\n\
             connection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        socket.write_all(head.as_bytes()).unwrap();
        socket.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        socket.read_to_string(&mut answer).unwrap();
        let answer = answer.strip_prefix("HTTP/1.1 100 Continue\r\n\r\n").unwrap_or(&answer);
        assert!(answer.starts_with(&format!("HTTP/{version} 200")), "{version} {stream}: {answer}");
        let end = if stream { "[DONE]" } else { "\"completion_tokens\":400" };
        assert!(answer.contains(end), "{version} {stream}: {answer}");
    }
    assert_eq!(server.engine.stats().cancelled, 0);
}
