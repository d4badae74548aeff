//! Conversations, and the options of completions that clients send.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::client::{get, open_json, post};
use common::{serve, serve_model, serve_with};
use fox_infer::EngineOptions;
use fox_serve::{ChatTemplate, ServeOptions};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

fn with(base: &Value, extra: Value) -> Value {
    let mut body = base.clone();
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn templated(source: &str) -> ServeOptions {
    let chat = ChatTemplate { source: Some(source.into()), ..ChatTemplate::default() };
    ServeOptions { chat, ..ServeOptions::default() }
}

#[test]
fn chat_equals_completion_of_its_prompt() {
    let server = serve();
    let options = json!({ "temperature": 0, "max_tokens": 12, "ignore_eos": true });
    let messages =
        json!([{ "role": "system", "content": "Short." }, { "role": "user", "content": "Hi" }]);
    let chat =
        post(server.address, CHAT, &with(&options, json!({ "messages": messages }))).unwrap();
    assert_eq!(chat.status, 200, "{}", chat.text());
    let chat = chat.json();
    assert_eq!(chat["object"], "chat.completion");
    assert!(chat["id"].as_str().unwrap().starts_with("chatcmpl-"));
    let text =
        server.complete(&with(&options, json!({ "prompt": "Short.\nUser: Hi\nAssistant:" })));
    let message = &chat["choices"][0]["message"];
    assert_eq!(
        (&message["role"], &message["content"]),
        (&json!("assistant"), &text["choices"][0]["text"])
    );
    assert_eq!(chat["usage"], text["usage"]);

    // A template writes its own markers.
    let templated = serve_with(
        EngineOptions::default(),
        templated("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"),
    );
    let body = with(&options, json!({ "messages": messages }));
    let chat = post(templated.address, CHAT, &body).unwrap().json();
    let prompt: Vec<u8> = b"<system>Short.<user>Hi<assistant>".to_vec();
    let text = server.complete(&with(&options, json!({ "prompt": prompt })));
    assert_eq!(chat["choices"][0]["message"]["content"], text["choices"][0]["text"]);
    assert_eq!(chat["usage"], text["usage"]);
}

#[test]
fn streamed_chat_adds_up() {
    let server = serve();
    let base = json!({ "messages": [{ "role": "user", "content": "aé" }], "max_tokens": 20, "seed": 4, "n": 2,
        "logprobs": true, "top_logprobs": 2, "ignore_eos": true });
    let whole = post(server.address, CHAT, &base).unwrap().json();
    let streamed =
        with(&base, json!({ "stream": true, "stream_options": { "include_usage": true } }));
    let mut open = open_json(server.address, CHAT, &streamed).unwrap();
    let mut built =
        [(String::new(), Vec::new(), Value::Null), (String::new(), Vec::new(), Value::Null)];
    let (mut usage, mut roles, mut done) = (Value::Null, 0, false);
    while let Some(event) = open.event().unwrap() {
        if event == "[DONE]" {
            done = true;
            continue;
        }
        let chunk: Value = serde_json::from_str(&event).unwrap();
        assert_eq!(chunk["object"], "chat.completion.chunk");
        let Some(part) = chunk["choices"].get(0) else {
            usage = chunk["usage"].clone();
            continue;
        };
        let (text, tokens, finish) = &mut built[part["index"].as_u64().unwrap() as usize];
        roles += usize::from(part["delta"]["role"] == "assistant");
        text.push_str(part["delta"]["content"].as_str().unwrap_or(""));
        tokens.extend(part["logprobs"]["content"].as_array().cloned().unwrap_or_default());
        *finish = part["finish_reason"].clone();
    }
    assert!(done && roles == 2);
    assert_eq!(usage, whole["usage"]);
    for ((text, tokens, finish), choice) in built.iter().zip(whole["choices"].as_array().unwrap()) {
        assert_eq!(choice["message"]["content"], *text);
        assert_eq!(
            (&choice["logprobs"]["content"], &choice["finish_reason"]),
            (&json!(tokens), finish)
        );
        assert_eq!(tokens.len(), 20);
        let first = &tokens[0];
        assert_eq!(first["top_logprobs"].as_array().unwrap().len(), 2);
        assert!(
            first["logprob"].as_f64().unwrap()
                <= first["top_logprobs"][0]["logprob"].as_f64().unwrap()
        );
    }
}

#[test]
fn rejects_invalid_messages() {
    let refuses =
        "{% if messages[0].content == 'no' %}{{ raise_exception('no such role') }}{% endif %}x";
    let server = serve_with(EngineOptions::default(), templated(refuses));
    let user = json!([{ "role": "user", "content": "x" }]);
    for (body, param, words) in [
        (json!({}), "messages", "messages is missing"),
        (json!({ "messages": [] }), "messages", "not empty"),
        (json!({ "messages": [{ "role": "fox", "content": "x" }] }), "messages", "role fox"),
        (json!({ "messages": user, "tools": [{ "type": "function" }] }), "tools", "function.name"),
        (json!({ "messages": user, "tool_choice": "required" }), "tool_choice", "one of the tools"),
        (json!({ "messages": user, "top_logprobs": 2 }), "top_logprobs", "logprobs = true"),
        (
            json!({ "messages": user, "logprobs": true, "top_logprobs": 21 }),
            "top_logprobs",
            "at most 20",
        ),
        (
            json!({ "messages": user, "response_format": { "type": "json_schema" } }),
            "response_format",
            "no json_schema.schema",
        ),
        (json!({ "messages": [{ "role": "user", "content": "no" }] }), "messages", "no such role"),
    ] {
        let reply = post(server.address, CHAT, &body).unwrap();
        let error = &reply.json()["error"];
        assert_eq!((reply.status, error["param"].as_str()), (400, Some(param)), "{body}: {error}");
        assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    }
    let reply = post(server.address, "/v1/embeddings", &json!({ "input": "x" })).unwrap();
    let message = reply.json()["error"]["message"].as_str().unwrap().to_string();
    assert!(reply.status == 501 && message.starts_with("/v1/embeddings"), "{message}");
}

#[test]
fn alias_names_the_model() {
    let options = ServeOptions { aliases: vec!["gpt-4o".into()], ..ServeOptions::default() };
    let server = serve_with(EngineOptions::default(), options);
    let answer = server.complete(&json!({ "prompt": "a", "model": "gpt-4o", "max_tokens": 1 }));
    assert_eq!(answer["model"], "tiny");
    let list = get(server.address, "/v1/models").unwrap().json();
    let names: Vec<&str> =
        list["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    assert_eq!(names, ["tiny", "gpt-4o"]);
    assert_eq!(get(server.address, "/v1/models/gpt-4o").unwrap().json()["id"], "gpt-4o");
    assert_eq!(get(server.address, "/v1/models/gpt-5").unwrap().status, 404);
}

#[test]
fn biases_penalties_and_stops_are_applied() {
    let server = serve();
    let base = json!({ "prompt": "fox", "max_tokens": 24, "temperature": 0, "ignore_eos": true, "logprobs": 0 });
    let ask = |extra: Value| server.complete(&with(&base, extra))["choices"][0].clone();
    let tokens = |choice: &Value| -> Vec<String> {
        let list = choice["logprobs"]["tokens"].as_array().unwrap();
        list.iter().map(|t| t.as_str().unwrap().to_string()).collect()
    };
    let plain = ask(json!({}));
    let most = |tokens: &[String]| {
        tokens.iter().map(|t| tokens.iter().filter(|o| *o == t).count()).max().unwrap_or(0)
    };
    // A bias larger than any difference decides.
    assert_eq!(ask(json!({ "logit_bias": { "97": 100 } }))["text"], "a".repeat(24));
    let first = tokens(&plain)[0].clone();
    let id = first
        .strip_prefix("token_id:")
        .map_or(usize::from(first.as_bytes()[0]), |id| id.parse().unwrap());
    let banned = ask(json!({ "logit_bias": { id.to_string(): -100 } }));
    assert!(!tokens(&banned).contains(&first));
    let repeated = most(&tokens(&ask(json!({ "logit_bias": { "97": 1.0 } }))));
    let varied =
        most(&tokens(&ask(json!({ "logit_bias": { "97": 1.0 }, "frequency_penalty": 2.0 }))));
    assert!(varied < repeated.max(2), "{varied} {repeated}");
    // A stop id ends the answer; before min_tokens it is not chosen.
    let stopped = ask(json!({ "stop_token_ids": [id] }));
    assert_eq!((&stopped["finish_reason"], &stopped["text"]), (&json!("stop"), &json!("")));
    assert_eq!(tokens(&stopped), [first.as_str()]);
    let later = ask(json!({ "stop_token_ids": [id], "min_tokens": 5 }));
    assert!(tokens(&later).len() >= 5 && !tokens(&later)[..5].contains(&first));
}

#[test]
fn default_max_tokens_and_its_new_name() {
    let server = serve();
    let completion = json!({ "prompt": "fox", "temperature": 0, "ignore_eos": true });
    let chat = json!({ "messages": [{ "role": "user", "content": "fox" }], "temperature": 0,
                       "ignore_eos": true });
    let both = json!({ "max_tokens": 3, "max_completion_tokens": 5 });
    for (path, body, want) in [
        ("/v1/completions", completion.clone(), 16),
        (CHAT, chat.clone(), 1024),
        ("/v1/completions", with(&completion, both.clone()), 5),
        (CHAT, with(&chat, both), 5),
    ] {
        let answer = post(server.address, path, &body).unwrap().json();
        assert_eq!(answer["usage"]["completion_tokens"], want, "{body}");
        assert_eq!(answer["choices"][0]["finish_reason"], "length", "{body}");
    }
}

#[test]
fn best_of_returns_the_likeliest() {
    let server = serve();
    let base =
        json!({ "prompt": "fox", "max_tokens": 6, "seed": 3, "logprobs": 0, "ignore_eos": true });
    let mean = |choice: &Value| {
        let list = choice["logprobs"]["token_logprobs"].as_array().unwrap();
        list.iter().map(|x| x.as_f64().unwrap()).sum::<f64>() / list.len() as f64
    };
    let all = server.complete(&with(&base, json!({ "n": 8 })));
    let mut means: Vec<f64> = all["choices"].as_array().unwrap().iter().map(mean).collect();
    means.sort_by(|a, b| b.total_cmp(a));
    let best = server.complete(&with(&base, json!({ "n": 2, "best_of": 8 })));
    let got: Vec<f64> = best["choices"].as_array().unwrap().iter().map(mean).collect();
    assert_eq!(got, means[..2]);
    assert_eq!((&best["choices"][1]["index"], &best["usage"]), (&json!(1), &all["usage"]));
}

#[test]
fn prompt_logprobs_equal_echo() {
    let server = serve();
    let base =
        json!({ "prompt": [1, 2, 3, 4], "max_tokens": 2, "temperature": 0, "ignore_eos": true });
    let echoed = server.complete(&with(&base, json!({ "echo": true, "logprobs": 1 })));
    let asked = server.complete(&with(&base, json!({ "prompt_logprobs": 1, "logprobs": 3 })));
    let list = asked["choices"][0]["prompt_logprobs"].as_array().unwrap();
    assert!(list.len() == 4 && list[0].is_null());
    for (i, id) in [(1, "2"), (2, "3"), (3, "4")] {
        assert_eq!(list[i][id]["logprob"], echoed["choices"][0]["logprobs"]["token_logprobs"][i]);
        let best = list[i].as_object().unwrap().values().find(|t| t["rank"] == 1).unwrap();
        assert!(best["logprob"].as_f64() >= list[i][id]["logprob"].as_f64());
    }
    let logprobs = &asked["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"].as_array().unwrap().len(), 2, "only the answer's");
    assert_eq!(logprobs["top_logprobs"][0].as_object().unwrap().len(), 3);
    let both = server.complete(&with(&base, json!({ "prompt_logprobs": 0, "echo": true })));
    assert_eq!(both["choices"][0]["prompt_logprobs"].as_array().unwrap().len(), 4);
    let text = both["choices"][0]["text"].as_str().unwrap();
    assert_eq!(text.matches('\u{1}').count(), 1, "the prompt is echoed once: {text:?}");
}

/// Every id of `config.json`, `generation_config.json` and the tokenizer ends an answer.
#[test]
fn stops_at_every_end_id() {
    let mut config = fox_model::ModelConfig::fox_pro(32, 2, 2).with_vocab(256);
    config.tokens.eos = vec![3, 4];
    let model = fox_model::Model::init(&config, 7, &fox_cpu::device()).unwrap();
    let options = ServeOptions { end_ids: vec![4, 5], ..ServeOptions::default() };
    let server = serve_model(model, EngineOptions::default(), options);
    let base = json!({ "messages": [{ "role": "user", "content": "x" }], "max_tokens": 4 });
    for (id, reason) in [(3, "stop"), (4, "stop"), (5, "stop"), (255, "stop"), (6, "length")] {
        let body = with(&base, json!({ "logit_bias": { id.to_string(): 100 } }));
        let choice = &post(server.address, CHAT, &body).unwrap().json()["choices"][0];
        assert_eq!(choice["finish_reason"], reason, "{id}");
        assert_eq!(choice["message"]["content"] == "", reason == "stop", "{choice}");
        // An end marker has an entry among the log-probabilities, but it is not counted.
        let body = with(&body, json!({ "logprobs": true }));
        let answer = post(server.address, CHAT, &body).unwrap().json();
        let count = if reason == "stop" { 0 } else { 4 };
        assert_eq!(answer["usage"]["completion_tokens"], count, "{answer}");
    }
}

#[test]
fn sampling_defaults_apply_unless_set() {
    let sampling = fox_infer::Sampling { temperature: 0.0, ..fox_infer::Sampling::default() };
    let options = ServeOptions { sampling, ..ServeOptions::default() };
    let server = serve_with(EngineOptions::default(), options);
    let base = json!({ "prompt": "fox", "max_tokens": 12, "ignore_eos": true });
    let text = |extra: Value| server.complete(&with(&base, extra))["choices"][0]["text"].clone();
    assert_eq!(text(json!({ "seed": 1 })), text(json!({ "seed": 2 })));
    assert_ne!(
        text(json!({ "seed": 1, "temperature": 1.5 })),
        text(json!({ "seed": 2, "temperature": 1.5 }))
    );
}
