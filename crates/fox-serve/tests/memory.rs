//! Requests that would take more memory than there is, and requests that must not compute anything twice.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use common::client::{get, open, post};
use common::{Running, serve, serve_with, wait_for};
use fox_infer::EngineOptions;
use fox_serve::ServeOptions;
use serde_json::{Value, json};

/// A gauge of `/metrics`.
fn gauge(server: &Running, name: &str) -> u64 {
    let text = get(server.address, "/metrics").unwrap().text();
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} "))).unwrap();
    line.parse().unwrap()
}

#[test]
fn prompt_is_scored_once_for_all_choices() {
    let server = serve();
    let body = |n: usize| {
        json!({ "prompt": "x".repeat(300), "max_tokens": 3, "n": n, "seed": 5,
        "prompt_logprobs": 3, "logprobs": 1, "echo": true, "ignore_eos": true })
    };
    let one = server.complete(&body(1));
    let before = server.engine.stats().prefilled_tokens;
    let all = server.complete(&body(8));
    // The first choice recomputes the prompt, the others find it in the prefix cache.
    assert_eq!(server.engine.stats().prefilled_tokens - before, 301);
    let choices = all["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 8);
    assert_eq!(choices[0], one["choices"][0]);
    for choice in choices {
        assert_eq!(choice["prompt_logprobs"], one["choices"][0]["prompt_logprobs"]);
        assert_eq!(choice["prompt_logprobs"].as_array().unwrap().len(), 301);
        for list in ["tokens", "top_logprobs", "text_offset"] {
            assert_eq!(choice["logprobs"][list].as_array().unwrap().len(), 304, "{list}");
        }
    }
}

/// `logprobs` and `prompt_logprobs` share the engine's list of alternatives, but not its length.
#[test]
fn alternatives_per_token_are_limited() {
    let server = serve();
    let answer = server.complete(&json!({ "prompt": "abc", "max_tokens": 8, "logprobs": 1,
        "prompt_logprobs": 5, "ignore_eos": true }));
    let choice = &answer["choices"][0];
    for top in choice["logprobs"]["top_logprobs"].as_array().unwrap() {
        // The likeliest token and the one that was sampled.
        assert!((1..=2).contains(&top.as_object().unwrap().len()), "{top}");
    }
    for top in &choice["prompt_logprobs"].as_array().unwrap()[1..] {
        assert!((5..=6).contains(&top.as_object().unwrap().len()), "{top}");
    }
}

#[test]
fn stop_string_cancels_its_choice_in_the_engine() {
    let server = serve();
    let body = |stop: Value| {
        json!({ "prompt": ["a", "b"], "max_tokens": 400, "seed": 3,
        "ignore_eos": true, "stop": stop })
    };
    let answer = server.complete(&body(json!([])));
    let text = |i: usize| answer["choices"][i]["text"].as_str().unwrap().to_string();
    let (first, second) = (text(0), text(1));
    // Two characters near the start of the first answer that the second does not have.
    let chars: Vec<char> = first.chars().collect();
    let pairs = chars.windows(2).take(100).map(|pair| pair.iter().collect::<String>());
    let stop = pairs.into_iter().find(|pair| !second.contains(pair.as_str())).unwrap();
    let before = server.engine.stats().generated_tokens;
    let answer = server.complete(&body(json!(stop)));
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["choices"][1]["finish_reason"], "length");
    let generated = server.engine.stats().generated_tokens - before;
    let reported = answer["usage"]["completion_tokens"].as_u64().unwrap();
    // The engine is a few tokens ahead of the text.
    assert!(generated < reported + 200, "{generated} generated, {reported} reported");
    assert!(reported < 600, "{reported}");
}

#[test]
fn streamed_echo_adds_up_for_every_choice() {
    let server = serve();
    for logprobs in [Value::Null, json!(2)] {
        let mut body = json!({ "prompt": ["é".repeat(150), "b".repeat(70)], "max_tokens": 3, "n": 3,
            "seed": 5, "logprobs": logprobs, "echo": true, "ignore_eos": true });
        let full = server.complete(&body);
        body["stream"] = json!(true);
        let chunks = server.stream(&body);
        for index in 0..6 {
            let own: Vec<&Value> =
                chunks.iter().map(|c| &c["choices"][0]).filter(|c| c["index"] == index).collect();
            let text: String = own.iter().filter_map(|c| c["text"].as_str()).collect();
            assert_eq!(full["choices"][index]["text"], text, "choice {index}");
            if logprobs.is_null() {
                continue;
            }
            let lists = own.iter().filter_map(|c| c["logprobs"]["text_offset"].as_array());
            let offsets: Vec<Value> = lists.flatten().cloned().collect();
            assert_eq!(full["choices"][index]["logprobs"]["text_offset"], json!(offsets));
        }
    }
}

#[test]
fn answer_beyond_the_budget_is_413() {
    let options = ServeOptions { answer_bytes: 1 << 20, ..ServeOptions::default() };
    let server = serve_with(EngineOptions::default(), options);
    for (body, stream) in [
        (json!({ "prompt": "a".repeat(500), "n": 64, "prompt_logprobs": 20 }), false),
        (json!({ "prompt": "a".repeat(500), "n": 64, "logprobs": 20, "echo": true }), false),
        (json!({ "prompt": "a".repeat(9000), "n": 1000, "echo": true }), false),
        (json!({ "prompt": "a", "max_tokens": 9000, "logprobs": 20, "ignore_eos": true }), false),
        // Held by a client that does not read.
        (json!({ "prompt": "a", "max_tokens": 60_000, "logprobs": 20, "ignore_eos": true }), true),
    ] {
        let mut body = body;
        body["stream"] = json!(stream);
        body["max_tokens"] = body.get("max_tokens").cloned().unwrap_or(json!(1));
        if stream {
            let kind = [("content-type", "application/json")];
            let path = ("POST", "/v1/completions");
            let before = server.engine.stats().generated_tokens;
            let open = open(server.address, path, &kind, body.to_string().as_bytes()).unwrap();
            wait_for("the answer begins", || server.engine.stats().generated_tokens > before);
            wait_for("the budget is used up", || server.engine.stats().running == 0);
            let reply = open.finish().unwrap().text();
            assert!(reply.contains("memory_limit_exceeded"), "{}", &reply[reply.len() - 300..]);
        } else {
            let reply = post(server.address, "/v1/completions", &body).unwrap();
            let error = &reply.json()["error"];
            assert_eq!((reply.status, &error["code"]), (413, &json!("memory_limit_exceeded")));
            let words = "the request needs more than the 1048576 bytes for answers in flight";
            assert_eq!(error["message"], words);
        }
        wait_for("the memory is returned", || gauge(&server, "fox_answer_bytes") == 0);
        wait_for("the engine is idle", || server.engine.stats().running == 0);
    }
    server.complete(&json!({ "prompt": "a", "logprobs": 5 }));
}

#[test]
fn unfinished_bodies_share_a_budget() {
    let options = ServeOptions { body_bytes: 300 << 10, ..ServeOptions::default() };
    let server = serve_with(EngineOptions::default(), options);
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
                content-length: 1000000\r\n\r\n";
    let half = " ".repeat(200 << 10);
    let sockets: Vec<TcpStream> = (0..8)
        .map(|_| {
            let mut socket = TcpStream::connect(server.address).unwrap();
            socket.write_all(head.as_bytes()).unwrap();
            // The server may close before it has read all.
            drop(socket.write_all(half.as_bytes()));
            socket
        })
        .collect();
    let refused = sockets.iter().filter(|socket| {
        socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        let mut answer = [0; 12];
        (&mut &**socket).read_exact(&mut answer).is_ok() && &answer == b"HTTP/1.1 429"
    });
    assert!(refused.count() >= 4);
    assert!(gauge(&server, "fox_body_bytes") <= 300 << 10);
    server.complete(&json!({ "prompt": "a" }));
    drop(sockets);
    wait_for("the memory is returned", || gauge(&server, "fox_body_bytes") == 0);
}

#[test]
fn rejects_json_bombs() {
    let server = serve();
    let send = |path: &str, body: String| {
        let kind = [("content-type", "application/json")];
        open(server.address, ("POST", path), &kind, body.as_bytes()).unwrap().finish().unwrap()
    };
    let lists = format!("[{}[]]", "[],".repeat(1 << 20));
    for (path, body, status, words) in [
        ("/v1/completions", format!(r#"{{"prompt": {lists}}}"#), 400, "more than 1024 elements"),
        ("/v1/completions", format!(r#"{{"prompt": "a", "x": {lists}}}"#), 200, ""),
        ("/v1/completions", format!(r#"{{"prompt": "a", "stop": {lists}}}"#), 400, "65536 values"),
        ("/v1/chat/completions", format!(r#"{{"messages": {lists}}}"#), 400, "65536 values"),
        ("/detokenize", format!(r#"{{"tokens": {lists}}}"#), 400, "list"),
        ("/v1/completions", "[".repeat(1 << 20), 400, "JSON"),
        ("/v1/completions", format!(r#"{{"prompt": {}"#, "[".repeat(1 << 20)), 400, "JSON"),
    ] {
        let reply = send(path, body);
        assert_eq!(reply.status, status, "{path} {words}: {}", reply.text());
        assert!(reply.text().contains(words), "{words}: {}", reply.text());
    }
}
