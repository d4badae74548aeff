//! Errors in OpenAI's shape.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::client::{self, open, post};
use common::{serve, serve_with};
use fox_infer::EngineOptions;
use fox_serve::ServeOptions;
use serde_json::{Value, json};

/// Body, status, field at fault, part of the message.
const TABLE: &[(&str, u16, Option<&str>, &str)] = &[
    ("{", 400, None, "not JSON"),
    ("[1]", 400, None, "must be a JSON object"),
    ("{}", 400, Some("prompt"), "prompt is missing"),
    (r#"{"prompt": null}"#, 400, Some("prompt"), "prompt is missing"),
    (r#"{"prompt": []}"#, 400, Some("prompt"), "not empty"),
    (r#"{"prompt": {"a": 1}}"#, 400, Some("prompt"), "list of texts"),
    (r#"{"prompt": ["a", [1]]}"#, 400, Some("prompt"), "list of texts"),
    (r#"{"prompt": [1, "a"]}"#, 400, Some("prompt"), "\"a\" at position 1"),
    (r#"{"prompt": [1.5]}"#, 400, Some("prompt"), "1.5 at position 0"),
    (r#"{"prompt": [1, 99999999999]}"#, 400, Some("prompt"), "position 1"),
    (r#"{"prompt": [1, 256]}"#, 400, Some("prompt"), "vocabulary of 256"),
    (r#"{"prompt": [-1]}"#, 400, Some("prompt"), "token -1"),
    (r#"{"prompt": [[]]}"#, 400, Some("prompt"), "empty"),
    (r#"{"prompt": "", "add_special_tokens": false}"#, 400, Some("prompt"), "empty"),
    (r#"{"prompt": "a", "max_tokens": 1000000}"#, 400, Some("prompt"), "context of 65536"),
    (r#"{"prompt": "a", "max_tokens": -1}"#, 400, Some("max_tokens"), "-1"),
    (r#"{"prompt": "a", "max_tokens": "many"}"#, 400, Some("max_tokens"), "many"),
    (r#"{"prompt": "a", "temperature": -0.5}"#, 400, Some("temperature"), "0 or more"),
    (r#"{"prompt": "a", "temperature": "hot"}"#, 400, Some("temperature"), "hot"),
    (r#"{"prompt": "a", "temperature": 1e300}"#, 400, Some("temperature"), "inf"),
    (r#"{"prompt": "a", "top_p": 0}"#, 400, Some("top_p"), "above 0"),
    (r#"{"prompt": "a", "top_p": 1.1}"#, 400, Some("top_p"), "at most 1"),
    (r#"{"prompt": "a", "top_k": -2}"#, 400, Some("top_k"), "0 or more"),
    (r#"{"prompt": "a", "min_p": 2}"#, 400, Some("min_p"), "from 0 to 1"),
    (r#"{"prompt": "a", "repetition_penalty": 0}"#, 400, Some("repetition_penalty"), "above 0"),
    (r#"{"prompt": "a", "seed": "x"}"#, 400, Some("seed"), "seed"),
    (r#"{"prompt": "a", "n": 0}"#, 400, Some("n"), "at least 1"),
    (r#"{"prompt": "a", "n": 1025}"#, 400, Some("n"), "more than 1024"),
    (r#"{"prompt": ["a", "b"], "n": 600}"#, 400, Some("n"), "2 prompts times n = 600"),
    (r#"{"prompt": "a", "best_of": 1025}"#, 400, Some("n"), "more than 1024"),
    (r#"{"prompt": "a", "logprobs": 21}"#, 400, Some("logprobs"), "at most 20"),
    (r#"{"prompt": "a", "logprobs": true}"#, 400, Some("logprobs"), "true"),
    (r#"{"prompt": "a", "stop": 5}"#, 400, Some("stop"), "a text or a list of texts"),
    (r#"{"prompt": "a", "stop": [""]}"#, 400, Some("stop"), "empty"),
    (r#"{"prompt": "a", "stream": 1}"#, 400, Some("stream"), "stream"),
    (r#"{"prompt": "a", "stream_options": 1}"#, 400, Some("stream_options"), "stream_options"),
    (r#"{"prompt": "a", "suffix": "b"}"#, 400, Some("suffix"), "not supported"),
    (
        r#"{"prompt": "a", "response_format": {"type": "yaml"}}"#,
        400,
        Some("response_format"),
        "text, json_object or json_schema",
    ),
    (
        r#"{"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}"#,
        400,
        Some("response_format"),
        "no json_schema.schema",
    ),
    (
        r#"{"prompt": "a", "response_format": {"type": "json_object"}, "guided_regex": "a"}"#,
        400,
        Some("guided_regex"),
        "give one of response_format, guided_regex",
    ),
    (r#"{"prompt": "a", "guided_json": "{"}"#, 400, Some("guided_json"), "not JSON"),
    (r#"{"prompt": "a", "guided_json": {"type": "fox"}}"#, 400, Some("guided_json"), "JSON schema"),
    (r#"{"prompt": "a", "guided_regex": "("}"#, 400, Some("guided_regex"), "regular expression"),
    (r#"{"prompt": "a", "guided_regex": 5}"#, 400, Some("guided_regex"), "guided_regex"),
    (r#"{"prompt": "a", "guided_choice": []}"#, 400, Some("guided_choice"), "at least one text"),
    (r#"{"prompt": "a", "guided_grammar": "x: y"}"#, 400, Some("guided_grammar"), "grammar"),
    (
        r#"{"prompt": "a", "structured_outputs": {"xml": 1}}"#,
        400,
        Some("xml"),
        "unknown field: xml",
    ),
    (r#"{"prompt": "a", "best_of": 2, "n": 3}"#, 400, Some("best_of"), "less than n = 3"),
    (r#"{"prompt": "a", "best_of": 2, "stream": true}"#, 400, Some("best_of"), "stream = false"),
    (
        r#"{"prompt": "a", "frequency_penalty": 2.5}"#,
        400,
        Some("frequency_penalty"),
        "from -2 to 2",
    ),
    (
        r#"{"prompt": "a", "presence_penalty": "x"}"#,
        400,
        Some("presence_penalty"),
        "presence_penalty",
    ),
    (r#"{"prompt": "a", "logit_bias": {"x": 1}}"#, 400, Some("logit_bias"), "1 for x"),
    (r#"{"prompt": "a", "logit_bias": {"5": 101}}"#, 400, Some("logit_bias"), "101 for 5"),
    (r#"{"prompt": "a", "logit_bias": {"256": 1}}"#, 400, Some("logit_bias"), "ids below 256"),
    (r#"{"prompt": "a", "logit_bias": [5]}"#, 400, Some("logit_bias"), "logit_bias"),
    (
        r#"{"prompt": "a", "min_tokens": 9, "max_tokens": 8}"#,
        400,
        Some("min_tokens"),
        "max_tokens = 8",
    ),
    (r#"{"prompt": "a", "stop_token_ids": ["x"]}"#, 400, Some("stop_token_ids"), "stop_token_ids"),
    (r#"{"prompt": "a", "prompt_logprobs": 21}"#, 400, Some("prompt_logprobs"), "at most 20"),
    (
        r#"{"prompt": "a", "prompt_logprobs": 1, "stream": true}"#,
        400,
        Some("prompt_logprobs"),
        "stream = false",
    ),
    (r#"{"prompt": "a", "max_tokens": 2.5}"#, 400, Some("max_tokens"), "2.5"),
    (r#"{"prompt": "a", "model": "gpt-5"}"#, 404, Some("model"), "this server has tiny"),
];

#[test]
fn rejects_malformed_requests() {
    let server = serve();
    let kind = [("content-type", "application/json")];
    for (body, status, param, words) in TABLE {
        let reply = open(server.address, ("POST", "/v1/completions"), &kind, body.as_bytes());
        let reply = reply.unwrap().finish().unwrap();
        let error = &reply.json()["error"];
        assert_eq!(reply.status, *status, "{body}: {error}");
        assert_eq!(error["param"].as_str(), *param, "{body}: {error}");
        assert!(error["message"].as_str().unwrap().contains(words), "{body}: {error}");
        assert_eq!(error["type"], "invalid_request_error");
        assert!(error.as_object().unwrap().contains_key("code"));
    }
    assert_eq!(server.engine.stats().finished, 0, "none of them ran");
}

#[test]
fn accepts_neutral_fields() {
    let server = serve();
    server.complete(
        &json!({ "prompt": "a", "suffix": null, "best_of": 1, "logit_bias": {}, "user": "me",
        "frequency_penalty": 0.0, "presence_penalty": 0, "stream": false, "stop": null, "n": null,
        "model": "tiny", "max_tokens": 1, "logprobs": null, "seed": -5, "metadata": { "a": "b" },
        "store": true, "response_format": { "type": "text" }, "stream_options": { "include_usage": true } }),
    );
    let answer = server
        .complete(&json!({ "prompt": [97.0, 98.0], "max_tokens": 3.0, "n": 2.0, "top_k": 0.0,
        "seed": 7.0, "ignore_eos": true }));
    assert_eq!(answer["usage"]["completion_tokens"], 6);
}

#[test]
fn unknown_fields_warn_or_fail_when_strict() {
    let body = json!({ "prompt": "a", "max_token": 5, "stream_options": { "x": 1 } });
    let server = serve();
    let reply = post(server.address, "/v1/completions", &body).unwrap();
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("x-fox-warning"), Some("ignored unknown fields: x, max_token"));
    let known = post(server.address, "/v1/completions", &json!({ "prompt": "a" })).unwrap();
    assert_eq!(known.header("x-fox-warning"), None);
    let reply = post(server.address, "/tokenize", &json!({ "prompt": "a", "y": 1 })).unwrap();
    assert_eq!(reply.header("x-fox-warning"), Some("ignored unknown fields: y"));
    let options = ServeOptions { strict: true, ..ServeOptions::default() };
    let strict = serve_with(EngineOptions::default(), options);
    for (path, body, name) in [
        ("/v1/completions", json!({ "prompt": "a", "max_token": 5 }), "max_token"),
        ("/v1/completions", body, "x"),
        ("/tokenize", json!({ "prompt": "a", "y": 1 }), "y"),
    ] {
        let reply = post(strict.address, path, &body).unwrap();
        let error = &reply.json()["error"];
        assert_eq!((reply.status, error["param"].as_str()), (400, Some(name)), "{error}");
        assert_eq!(error["message"], format!("unknown field: {name}"));
    }
}

#[test]
fn rejects_wrong_paths_methods_and_bodies() {
    let options = ServeOptions { max_body: 1000, ..ServeOptions::default() };
    let server = serve_with(EngineOptions::default(), options);
    let send = |method, path, headers: &[(&str, &str)], body: &str| {
        open(server.address, (method, path), headers, body.as_bytes()).unwrap().finish().unwrap()
    };
    let json_type = [("content-type", "application/json; charset=utf-8")];
    let missing = send("GET", "/v1/nothing", &[], "");
    assert_eq!(missing.status, 404);
    assert!(missing.json()["error"]["message"].as_str().unwrap().contains("/v1/nothing"));
    assert_eq!(send("GET", "/v1/models/other", &[], "").status, 404);
    let method = send("GET", "/v1/completions", &[], "");
    assert_eq!((method.status, method.header("allow")), (405, Some("POST")));
    assert_eq!(send("DELETE", "/", &[], "").status, 405);
    let form = send("POST", "/v1/completions", &[], r#"{"prompt": "a"}"#);
    assert_eq!(form.status, 415);
    let large = format!(r#"{{"prompt": "{}"}}"#, "a".repeat(1000));
    let reply = send("POST", "/v1/completions", &json_type, &large);
    assert_eq!(reply.status, 413);
    assert!(reply.json()["error"]["message"].as_str().unwrap().contains("1000 bytes"));
    assert_eq!(send("POST", "/tokenize", &json_type, "{}").status, 400);
    assert_eq!(send("POST", "/detokenize", &json_type, r#"{"tokens": [256]}"#).status, 400);
    assert_eq!(
        send("POST", "/inspect", &json_type, r#"{"prompt": "a", "head": [9, 9]}"#).status,
        400
    );
}

#[test]
fn api_key_is_required() {
    let options = ServeOptions { api_key: Some("secret".into()), ..ServeOptions::default() };
    let server = serve_with(EngineOptions::default(), options);
    let status = |path: &str, key: Option<&str>| {
        let header: Vec<(&str, &str)> = key.map(|key| ("authorization", key)).into_iter().collect();
        open(server.address, ("GET", path), &header, b"").unwrap().finish().unwrap().status
    };
    for path in ["/v1/models", "/metrics", "/tokenizer_info"] {
        for wrong in [
            None,
            Some(""),
            Some("Bearer "),
            Some("Bearer secre"),
            Some("Bearer secret2"),
            Some("secret"),
            Some("bearer"),
            Some("Basic secret"),
        ] {
            assert_eq!(status(path, wrong), 401, "{path} {wrong:?}");
        }
        for right in ["Bearer secret", "bearer secret", "BEARER secret"] {
            assert_eq!(status(path, Some(right)), 200);
        }
    }
    assert_eq!((status("/health", None), status("/", None)), (200, 200));
    let reply = post(server.address, "/v1/completions", &json!({ "prompt": "a" })).unwrap();
    assert_eq!((reply.status, reply.header("www-authenticate")), (401, Some("Bearer")));
    assert_eq!(reply.json()["error"]["code"], "invalid_api_key");
}

#[test]
fn full_queue_is_429() {
    let engine = EngineOptions { max_batch: 1, max_queue: 2, ..EngineOptions::default() };
    let server = serve_with(engine, ServeOptions::default());
    let endless =
        json!({ "prompt": "a", "max_tokens": 60_000, "stream": true, "ignore_eos": true });
    let open = |body: &Value| client::open_json(server.address, "/v1/completions", body).unwrap();
    let mut first = open(&endless);
    assert!(first.event().unwrap().is_some(), "it runs");
    let waiting = [open(&endless), open(&endless)];
    let reply = post(server.address, "/v1/completions", &json!({ "prompt": "a" })).unwrap();
    assert_eq!((reply.status, reply.header("retry-after")), (429, Some("1")));
    assert_eq!(reply.json()["error"]["code"], "queue_full");
    drop(waiting);
    drop(first);
    common::wait_for("there is room again", || {
        let stats = server.engine.stats();
        stats.running + stats.queued == 0
    });
    server.complete(&json!({ "prompt": "a" }));
}

/// More prompts than may run and wait: they are asked for one after the other.
#[test]
fn long_prompt_lists_wait_for_the_queue() {
    let engine = EngineOptions { max_batch: 2, max_queue: 2, ..EngineOptions::default() };
    let server = serve_with(engine, ServeOptions::default());
    let prompts: Vec<String> = (0..40).map(|i| format!("prompt {i}")).collect();
    let body = json!({ "prompt": prompts, "max_tokens": 3, "temperature": 0, "ignore_eos": true });
    let clients: Vec<_> = (0..2)
        .map(|_| {
            let (address, body) = (server.address, body.clone());
            std::thread::spawn(move || post(address, "/v1/completions", &body).unwrap().json())
        })
        .collect();
    let answers: Vec<Value> = clients.into_iter().map(|client| client.join().unwrap()).collect();
    assert_eq!(answers[0]["choices"], answers[1]["choices"]);
    assert_eq!(answers[0]["usage"]["completion_tokens"], 120);
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let ends = server
        .stream(&streamed)
        .iter()
        .filter(|c| !c["choices"][0]["finish_reason"].is_null())
        .count();
    assert_eq!(ends, 40);
}

/// A model of NaN answers with an error, whatever is asked: its log-probabilities are not those of unlikely tokens.
#[test]
fn nan_logits_are_an_error() {
    let mut model = common::model();
    let head = model.params().find("lm_head.weight").unwrap();
    let tensor = model.params().value(head).clone();
    let nan = tensor.device().full(tensor.shape(), f32::NAN).unwrap();
    model.params_mut().set(head, nan).unwrap();
    let server = common::serve_model(model, EngineOptions::default(), ServeOptions::default());
    for body in [
        json!({ "prompt": "fox", "max_tokens": 2 }),
        json!({ "prompt": "fox", "max_tokens": 2, "temperature": 0, "logprobs": 1 }),
        json!({ "prompt": "fox", "max_tokens": 0, "echo": true, "logprobs": 1 }),
    ] {
        let reply = post(server.address, "/v1/completions", &body).unwrap();
        assert_eq!(reply.status, 500, "{body}: {}", reply.text());
        assert_eq!(reply.json()["error"]["message"], "the model's logits are not numbers");
    }
}
