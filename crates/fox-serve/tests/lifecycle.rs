//! Clients that disconnect or do not read, and graceful shutdown.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use common::client::{get, open_json};
use common::{model, serve, serve_with, wait_for};
use fox_data::Tokenizer;
use fox_infer::{Engine, EngineOptions};
use fox_serve::{ServeOptions, ServedModel, Server};
use serde_json::{Value, json};

fn endless(stream: bool) -> Value {
    json!({ "prompt": "a", "max_tokens": 60_000, "stream": stream, "ignore_eos": true })
}

#[test]
fn disconnect_cancels_the_request() {
    let server = serve();
    for stream in [true, false] {
        let body = endless(stream).to_string();
        let mut socket = TcpStream::connect(server.address).unwrap();
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        socket.write_all(head.as_bytes()).unwrap();
        wait_for("it runs", || server.engine.stats().running == 1);
        drop(socket);
        let left = Instant::now();
        wait_for("its place is free", || server.engine.stats().running == 0);
        assert!(left.elapsed() < Duration::from_secs(5), "stream = {stream}: {:?}", left.elapsed());
    }
    assert_eq!(server.engine.stats().cancelled, 2);
}

/// More clients connect at once than the standard library's listener holds, before any of them is accepted.
#[test]
fn burst_of_connections_is_held() {
    let engine = Engine::start(model(), EngineOptions::default()).unwrap();
    let tokenizer = Tokenizer::from_name("bytes").unwrap();
    let served = ServedModel { name: "tiny".into(), engine, tokenizer };
    let options = ServeOptions { address: ([127, 0, 0, 1], 0).into(), ..ServeOptions::default() };
    let server = Server::bind(served, options).unwrap();
    let address = server.address().unwrap();
    let mut held = Vec::new();
    for n in 0..300 {
        // An attempt that the system drops is repeated after a second.
        let socket = TcpStream::connect_timeout(&address, Duration::from_millis(900));
        held.push(socket.unwrap_or_else(|error| panic!("connection {n}: {error}")));
    }
}

#[test]
fn stalled_client_is_disconnected() {
    let options =
        ServeOptions { stall_time: Duration::from_millis(300), ..ServeOptions::default() };
    let server = serve_with(EngineOptions::default(), options);
    // Enough to fill the buffers of both sides many times.
    let body = json!({ "prompt": vec!["a"; 32], "max_tokens": 1500, "stream": true, "logprobs": 20,
        "ignore_eos": true });
    let open = open_json(server.address, "/v1/completions", &body).unwrap();
    wait_for("it runs", || server.engine.stats().running > 0);
    wait_for("it is let go", || server.engine.stats().running == 0);
    assert!(server.engine.stats().cancelled > 0, "{:?}", server.engine.stats());
    drop(open);
    server.complete(&json!({ "prompt": "a" }));
}

#[test]
fn incomplete_request_times_out() {
    let options =
        ServeOptions { stall_time: Duration::from_millis(200), ..ServeOptions::default() };
    let server = serve_with(EngineOptions::default(), options);
    for part in [
        "POST /v1/comp",
        "POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{",
    ] {
        let mut socket = TcpStream::connect(server.address).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        socket.write_all(part.as_bytes()).unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).unwrap();
        assert!(answer.is_empty() || answer.contains("408"), "{answer}");
    }
}

#[test]
fn random_bytes_are_rejected() {
    let server = serve();
    for noise in [
        "\0\u{1f98a}\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        "GET  /  /\r\n\r\n",
        "\r\n\r\n\r\nxx\r\n\r\n",
    ] {
        let mut socket = TcpStream::connect(server.address).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        socket.write_all(noise.as_bytes()).unwrap();
        socket.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = Vec::new();
        // A reset is an answer, too.
        drop(socket.read_to_end(&mut answer));
        let answer = String::from_utf8_lossy(&answer);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 400"), "{noise:?}: {answer}");
    }
    assert_eq!(get(server.address, "/health").unwrap().status, 200);
}

#[test]
fn shutdown_drains_requests() {
    let mut server = serve();
    let body = json!({ "prompt": "a", "max_tokens": 300, "stream": true, "ignore_eos": true });
    let mut open = open_json(server.address, "/v1/completions", &body).unwrap();
    assert!(open.event().unwrap().is_some(), "it runs");
    server.stopper.stop();
    wait_for("new connections are refused", || get(server.address, "/health").is_err());
    let mut last = String::new();
    while let Some(event) = open.event().unwrap() {
        last = event;
    }
    assert_eq!(last, "[DONE]");
    server.join();
    assert_eq!((server.engine.stats().finished, server.engine.is_open()), (1, false));
}

#[test]
fn shutdown_respects_drain_time() {
    let options =
        ServeOptions { drain_time: Duration::from_millis(200), ..ServeOptions::default() };
    let mut server = serve_with(EngineOptions::default(), options);
    let mut open = open_json(server.address, "/v1/completions", &endless(true)).unwrap();
    assert!(open.event().unwrap().is_some(), "it runs");
    let start = Instant::now();
    server.stopper.stop();
    server.join();
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    assert_eq!(server.engine.stats().cancelled, 1);
}
