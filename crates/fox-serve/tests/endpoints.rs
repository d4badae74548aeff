//! Everything that is neither a completion nor the page.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::client::{get, post};
use common::{serve, wait_for};
use serde_json::json;

#[test]
fn model_card_and_tokenizer_info() {
    let server = serve();
    let list = get(server.address, "/v1/models").unwrap().json();
    assert_eq!((&list["object"], &list["data"][0]["id"]), (&json!("list"), &json!("tiny")));
    let card = get(server.address, "/v1/models/tiny").unwrap().json();
    assert_eq!(card, list["data"][0]);
    assert_eq!((&card["max_model_len"], &card["object"]), (&json!(65536), &json!("model")));
    assert_eq!(get(server.address, "/health").unwrap().json(), json!({ "status": "ok" }));
}

#[test]
fn tokenize_round_trips() {
    let server = serve();
    let tokenize = |body| post(server.address, "/tokenize", &body).unwrap().json();
    let answer = tokenize(json!({ "prompt": "fox", "add_special_tokens": false }));
    assert_eq!((&answer["tokens"], &answer["count"]), (&json!([102, 111, 120]), &json!(3)));
    let answer = tokenize(json!({ "prompt": "é", "return_token_strs": true, "model": "tiny" }));
    assert_eq!(answer["tokens"], json!([255, 195, 169]));
    assert_eq!(answer["token_strs"], json!(["token_id:255", "token_id:195", "token_id:169"]));
    let messages = json!([{ "role": "user", "content": "a" }]);
    let answer = tokenize(json!({ "messages": messages }));
    assert_eq!(answer["count"], 1 + "User: a\nAssistant:".len());
    let text = post(server.address, "/detokenize", &json!({ "tokens": [102, 195, 169] })).unwrap();
    assert_eq!(text.json(), json!({ "prompt": "fé" }));
    let info = get(server.address, "/tokenizer_info").unwrap().json();
    assert_eq!((&info["tokenizer_class"], &info["bos_token_id"]), (&json!("bytes"), &json!(255)));
    // Bytes have no text for the marker, but clients know markers by their text.
    let marker = info["eos_token"].clone();
    assert_eq!((&marker, &info["bos_token"]), (&json!("<|endoftext|>"), &marker));
    let plain = tokenize(json!({ "prompt": marker, "add_special_tokens": false }));
    assert_eq!(plain["tokens"], json!([255]));
    let inside = tokenize(json!({ "prompt": "a<|endoftext|>", "add_special_tokens": false }));
    assert_eq!(inside["count"], 14, "inside a text it is text");
}

#[test]
fn metrics_count_requests() {
    let server = serve();
    server.complete(&json!({ "prompt": "abc", "max_tokens": 5, "ignore_eos": true }));
    assert_eq!(post(server.address, "/v1/completions", &json!({})).unwrap().status, 400);
    // The engine updates its statistics after the step that reports the last token.
    wait_for("it is over", || server.engine.stats().finished == 1);
    let reply = get(server.address, "/metrics").unwrap();
    assert_eq!(reply.header("content-type"), Some("text/plain; version=0.0.4"));
    assert_eq!(reply.header("content-length"), Some(reply.body.len().to_string().as_str()));
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
        r#"vllm:num_requests_running{model_name="tiny"} 0"#,
        r#"vllm:num_requests_waiting{model_name="tiny"} 0"#,
        r#"vllm:prompt_tokens_total{model_name="tiny"} 4"#,
        r#"vllm:generation_tokens_total{model_name="tiny"} 5"#,
        r#"vllm:request_success_total{finished_reason="length",model_name="tiny"} 1"#,
        r#"vllm:time_to_first_token_seconds_bucket{model_name="tiny",le="+Inf"} 1"#,
        r#"vllm:inter_token_latency_seconds_count{model_name="tiny"} 4"#,
        r#"vllm:time_per_output_token_seconds_count{model_name="tiny"} 4"#,
        r#"vllm:e2e_request_latency_seconds_count{model_name="tiny"} 1"#,
        "# TYPE vllm:kv_cache_usage_perc gauge",
        "# TYPE fox_request_seconds histogram",
    ] {
        assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
    }
}

#[test]
fn inspect_has_gates_attention_and_pages() {
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
fn inspect_attention_and_offsets_are_exact() {
    let server = serve();
    let text = "é😀 and more text ".repeat(20);
    let look = |body| post(server.address, "/inspect", &body).unwrap();
    let seen = look(json!({ "prompt": text })).json();
    assert_eq!((&seen["text"], &seen["ids"][0]), (&json!(text), &json!(255)));
    // The marker, two bytes of é, four of the emoji, a space: characters before each.
    let offsets: Vec<u64> = seen["text_offset"].as_array().unwrap()[..9]
        .iter()
        .map(|offset| offset.as_u64().unwrap())
        .collect();
    assert_eq!(offsets, [0, 0, 0, 1, 1, 1, 1, 2, 3]);
    let count = seen["ids"].as_array().unwrap().len();
    assert_eq!(seen["pictures"][0]["gates"].as_array().unwrap().len(), count);

    // 441 tokens in at most 256 rows: the picture averages two, the row is of one token.
    let row = look(json!({ "prompt": text, "head": [1, 0], "position": 300 })).json();
    let row: Vec<f64> =
        row["attention"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
    assert_eq!(row.len(), 301);
    assert!((row.iter().sum::<f64>() - 1.0).abs() < 1e-3);
    let short = look(json!({ "prompt": seen["ids"].as_array().unwrap()[..101], "head": [1, 0] }));
    let short = &short.json()["pictures"][0]["attention"][100];
    let row = look(json!({ "prompt": text, "head": [1, 0], "position": 100 })).json();
    for (a, b) in row["attention"].as_array().unwrap().iter().zip(short.as_array().unwrap()) {
        assert!((a.as_f64().unwrap() - b.as_f64().unwrap()).abs() < 1e-4, "{a} {b}");
    }

    for (body, words) in [
        (json!({ "prompt": "ab", "position": 1 }), "position needs head: [LAYER, HEAD]"),
        (
            json!({ "prompt": "ab", "head": [0, 0], "position": 3 }),
            "there is no position 3: the text has 3 tokens",
        ),
        (json!({ "prompt": "ab", "head": [2, 0], "position": 1 }), "there is no head 0 in layer 2"),
    ] {
        let reply = look(body);
        assert_eq!((reply.status, &reply.json()["error"]["message"]), (400, &json!(words)));
    }
}
