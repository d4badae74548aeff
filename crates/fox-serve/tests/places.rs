//! Everything that is not a completion.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::client::{get, post};
use common::{serve, wait_for};
use serde_json::json;

#[test]
fn the_model_tells_about_itself() {
    let server = serve();
    let list = get(server.address, "/v1/models").unwrap().json();
    assert_eq!((&list["object"], &list["data"][0]["id"]), (&json!("list"), &json!("tiny")));
    let card = get(server.address, "/v1/models/tiny").unwrap().json();
    assert_eq!(card, list["data"][0]);
    assert_eq!((&card["max_model_len"], &card["object"]), (&json!(65536), &json!("model")));
    assert_eq!(get(server.address, "/health").unwrap().json(), json!({ "status": "ok" }));
}

#[test]
fn text_becomes_ids_and_text_again() {
    let server = serve();
    let tokenize = |body| post(server.address, "/tokenize", &body).unwrap().json();
    let answer = tokenize(json!({ "prompt": "fox", "add_special_tokens": false }));
    assert_eq!((&answer["tokens"], &answer["count"]), (&json!([102, 111, 120]), &json!(3)));
    let answer = tokenize(json!({ "prompt": "é", "return_token_strs": true, "model": "tiny" }));
    assert_eq!(answer["tokens"], json!([255, 195, 169]));
    assert_eq!(answer["token_strs"], json!(["token_id:255", "token_id:195", "token_id:169"]));
    let text = post(server.address, "/detokenize", &json!({ "tokens": [102, 195, 169] })).unwrap();
    assert_eq!(text.json(), json!({ "prompt": "fé" }));
    let info = get(server.address, "/tokenizer_info").unwrap().json();
    assert_eq!((&info["tokenizer_class"], &info["bos_token_id"]), (&json!("bytes"), &json!(255)));
    assert!(info.as_object().unwrap().contains_key("eos_token"));
}

#[test]
fn metrics_count_what_happened() {
    let server = serve();
    server.complete(&json!({ "prompt": "abc", "max_tokens": 5, "ignore_eos": true }));
    assert_eq!(post(server.address, "/v1/completions", &json!({})).unwrap().status, 400);
    // The engine tells its figures after a step, the last token before its end.
    wait_for("it is over", || server.engine.stats().finished == 1);
    let reply = get(server.address, "/metrics").unwrap();
    assert_eq!(reply.header("content-type"), Some("text/plain; version=0.0.4"));
    let text = reply.text();
    for line in [
        r#"fox_http_responses_total{path="/v1/completions",status="200"} 1"#,
        r#"fox_http_responses_total{path="/v1/completions",status="400"} 1"#,
        "fox_prompt_tokens_total 4",
        "fox_generated_tokens_total 5",
        "fox_requests_running 0",
        "fox_request_seconds_count 1",
        r#"fox_first_token_seconds_bucket{le="+Inf"} 1"#,
        r#"fox_inter_token_seconds_bucket{le="300"} 4"#,
        "fox_queue_seconds_count 1",
        "# TYPE fox_request_seconds histogram",
    ] {
        assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
    }
}

#[test]
fn a_look_inside_has_gates_decay_attention_and_pages() {
    let server = serve();
    let text = "a text to look at, ".repeat(8);
    let seen = post(server.address, "/inspect", &json!({ "prompt": text })).unwrap().json();
    let count = text.len() + 1;
    assert_eq!(seen["tokens"].as_array().unwrap().len(), count);
    assert_eq!(seen["heads"].as_array().unwrap().len(), 4);
    assert!(seen["heads"][0]["half_life"]["median"].as_f64().unwrap() > 0.0);
    // Two layers of two heads; 153 tokens in columns of two.
    let gates = seen["gates"].as_array().unwrap();
    assert_eq!((gates.len(), gates[0].as_array().unwrap().len()), (2, 2));
    assert_eq!(seen["tokens_per_column"], 2);
    assert_eq!(gates[0][0].as_array().unwrap().len(), count.div_ceil(2));
    let cache = &seen["cache"];
    assert_eq!(cache["tokens"], count);
    assert_eq!(cache["evicted_pages"].as_array().unwrap().len(), 2);

    let one = json!({ "prompt": "short", "head": [1, 0] });
    let one = post(server.address, "/inspect", &one).unwrap().json();
    let picture = &one["pictures"][0];
    assert_eq!((&picture["layer"], &picture["head"]), (&json!(1), &json!(0)));
    // F is 1 on its diagonal and decays by the gates: F[2, 1] is the gate at 2.
    let forget = &picture["forget"];
    assert_eq!(forget[2].as_array().unwrap().len(), 3);
    assert_eq!(forget[2][2], 1.0);
    assert_eq!(forget[2][1], one["gates"][1][0][2]);
    let row = picture["attention"][3].as_array().unwrap();
    let sum: f64 = row.iter().map(|x| x.as_f64().unwrap()).sum();
    assert!((sum - 1.0).abs() < 1e-3, "{sum}");
}

#[test]
fn the_page_needs_nothing_from_elsewhere() {
    let server = serve();
    for (path, kind) in [
        ("/", "text/html"),
        ("/style.css", "text/css"),
        ("/app.js", "text/javascript"),
        ("/memory.js", "text/javascript"),
        ("/draw.js", "text/javascript"),
    ] {
        let reply = get(server.address, path).unwrap();
        assert_eq!(reply.status, 200);
        assert!(reply.header("content-type").unwrap().starts_with(kind));
        let policy = reply.header("content-security-policy").unwrap();
        assert!(policy.starts_with("default-src 'none'"));
        assert!(!reply.text().contains("http://") && !reply.text().contains("https://"), "{path}");
    }
}
