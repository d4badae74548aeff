//! Answers that must match a schema, an expression, a choice or a grammar, over HTTP.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::time::{Duration, Instant};

use common::client::{open_json, post};
use common::serve;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

fn schema() -> Value {
    json!({ "type": "object", "required": ["city", "degrees"], "additionalProperties": false,
        "properties": { "city": { "enum": ["Rome", "Oslo"] },
            "degrees": { "type": "integer", "minimum": -9, "maximum": 40 } } })
}

fn assert_valid(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
    assert!(["Rome", "Oslo"].contains(&value["city"].as_str().unwrap()), "{text}");
    // -0 is an integer in JSON, and a float to the parser.
    let degrees = value["degrees"].as_f64().unwrap();
    assert!(degrees.fract() == 0.0 && (-9.0..=40.0).contains(&degrees), "{text}");
    assert_eq!(value.as_object().unwrap().len(), 2, "{text}");
}

fn format() -> Value {
    let schema = json!({ "name": "weather", "strict": true, "schema": schema() });
    json!({ "type": "json_schema", "json_schema": schema })
}

#[test]
fn json_schema_holds_for_every_choice() {
    let server = serve();
    let body = json!({ "messages": [{ "role": "user", "content": "Weather?" }], "n": 40,
        "max_tokens": 200, "response_format": format(), "logprobs": true, "top_logprobs": 1 });
    let answer = post(server.address, CHAT, &body).unwrap();
    assert_eq!(answer.status, 200, "{}", answer.text());
    for choice in answer.json()["choices"].as_array().unwrap() {
        let text = choice["message"]["content"].as_str().unwrap();
        assert_valid(text);
        assert_eq!(choice["finish_reason"], "stop");
        let tokens = choice["logprobs"]["content"].as_array().unwrap();
        assert_eq!(tokens.len(), text.len(), "one token per byte");
    }
    // Streamed, and with a stop string that ends the text early.
    let mut stream = json!({ "messages": body["messages"], "max_tokens": 200, "stream": true,
        "response_format": format() });
    let read = |body: &Value| {
        let mut open = open_json(server.address, CHAT, body).unwrap();
        let mut text = String::new();
        while let Some(event) = open.event().unwrap().filter(|event| event != "[DONE]") {
            let chunk: Value = serde_json::from_str(&event).unwrap();
            text.push_str(chunk["choices"][0]["delta"]["content"].as_str().unwrap_or(""));
        }
        text
    };
    assert_valid(&read(&stream));
    stream["stop"] = json!("degrees");
    let text = read(&stream);
    assert!(text.ends_with('"') && !text.contains("degrees"), "{text}");
}

#[test]
fn every_form_of_constraint_is_followed() {
    let server = serve();
    for (extra, check) in [
        (json!({ "guided_json": schema() }), assert_valid as fn(&str)),
        (json!({ "guided_json": schema().to_string() }), assert_valid),
        (json!({ "structured_outputs": { "json": schema() } }), assert_valid),
        (json!({ "guided_regex": "[a-c]{4}" }), |text| assert_eq!(text.len(), 4)),
        (json!({ "guided_choice": ["left", "right"] }), |text| {
            assert!(["left", "right"].contains(&text));
        }),
        (json!({ "guided_grammar": "start: \"a\" \"b\"" }), |text| assert_eq!(text, "ab")),
        (json!({ "response_format": { "type": "json_object" }, "max_tokens": 3 }), |text| {
            assert!(text.starts_with('{'), "{text}")
        }),
    ] {
        let mut body = json!({ "prompt": ["x", "y"], "max_tokens": 200, "n": 3 });
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        for choice in server.complete(&body)["choices"].as_array().unwrap() {
            check(choice["text"].as_str().unwrap());
        }
    }
}

/// A hostile schema gets 400, and the server stays responsive and within its memory.
#[test]
fn hostile_schemas_are_refused() {
    let server = serve();
    let any_of = |i: u32| json!({ "anyOf": [{ "minLength": i }, { "pattern": format!("a{i}") }] });
    let deep = (0..120).fold(json!({}), |inner, _| json!({ "items": inner }));
    for (schema, status) in [
        (json!({ "allOf": (0..40).map(any_of).collect::<Vec<_>>() }), 400),
        (json!({ "enum": ["x".repeat(70_000)] }), 400),
        (deep, 400),
        (json!({ "$ref": "http://127.0.0.1:9/schema" }), 400),
    ] {
        let start = Instant::now();
        let body = json!({ "prompt": "x", "max_tokens": 20, "guided_json": schema });
        let reply = post(server.address, "/v1/completions", &body).unwrap();
        assert_eq!(reply.status, status, "{}", reply.text());
        assert_eq!(reply.json()["error"]["param"], "guided_json");
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    }
    server.complete(&json!({ "prompt": "x", "max_tokens": 2 }));
}

/// At most 32 grammars are in use at a time; further requests wait and are answered.
#[test]
fn requests_beyond_the_grammar_limit_wait() {
    let server = serve();
    let body = json!({ "prompt": "x", "max_tokens": 40, "guided_regex": "[a-z]{30}" });
    std::thread::scope(|scope| {
        let ask = || post(server.address, "/v1/completions", &body).unwrap();
        let threads: Vec<_> = (0..48).map(|_| scope.spawn(ask)).collect();
        for thread in threads {
            let reply = thread.join().unwrap();
            assert_eq!(reply.status, 200, "{}", reply.text());
            assert_eq!(reply.json()["choices"][0]["text"].as_str().unwrap().len(), 30);
        }
    });
}
