//! The body of a completion request: a real server answers it, with a tiny model and small limits.
#![no_main]

use std::sync::LazyLock;

use fox_data::Tokenizer;
use fox_infer::{Engine, EngineOptions};
use fox_model::{Model, ModelConfig};
use fox_serve::{ServeOptions, ServedModel, Server};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

static SERVER: LazyLock<Server> = LazyLock::new(|| {
    let mut config = ModelConfig::fox_pro(8, 1, 1).with_vocab(256).with_mlp_width(8);
    let model = Model::init(&config, 7, &fox_cpu::device()).expect("a small model");
    let limits = EngineOptions { max_context: 48, max_queue: 8, ..EngineOptions::default() };
    let engine = Engine::start(model, limits).expect("an engine");
    let tokenizer = Tokenizer::from_name("bytes").expect("a built-in name");
    let served = ServedModel { name: "tiny".into(), engine, tokenizer };
    let options = ServeOptions {
        address: ([127, 0, 0, 1], 0).into(),
        max_choices: 4,
        ..ServeOptions::default()
    };
    Server::bind(served, options).expect("a free port")
});

fuzz_target!(|body: &[u8]| {
    let (status, answer) = SERVER.complete(body).expect("a thread to run on");
    if answer.starts_with(b"data: ") {
        assert_eq!(status, 200);
        assert!(answer.ends_with(b"data: [DONE]\n\n"));
        return;
    }
    let answer: Value = serde_json::from_slice(&answer).expect("an answer in JSON");
    match status {
        200 => check(&answer),
        // What an earlier input has left behind may still wait to be dropped.
        400 | 404 | 429 => {
            let said = answer["error"]["message"].as_str().expect("a reason");
            assert!(!said.is_empty());
        }
        other => panic!("status {other}: {answer}"),
    }
});

/// Counts fit, and where there are log-probabilities there is one per token, each a number.
fn check(answer: &Value) {
    let choices = answer["choices"].as_array().expect("choices");
    assert!((1..=4).contains(&choices.len()));
    let usage = &answer["usage"];
    let count = |name: &str| usage[name].as_u64().expect("a count");
    assert_eq!(count("total_tokens"), count("prompt_tokens") + count("completion_tokens"));
    for choice in choices {
        assert!(matches!(choice["finish_reason"].as_str(), Some("stop" | "length")), "{answer}");
        let text = choice["text"].as_str().expect("a text");
        let Some(scores) = choice["logprobs"].as_object() else { continue };
        let list = |name: &str| scores[name].as_array().expect("a list");
        let tokens = list("tokens").len();
        assert_eq!(list("token_logprobs").len(), tokens);
        assert_eq!(list("text_offset").len(), tokens);
        for value in list("token_logprobs").iter().filter(|value| !value.is_null()) {
            assert!(value.as_f64().is_some_and(|x| x <= 1e-6), "{answer}");
        }
        let offsets: Vec<u64> = list("text_offset").iter().filter_map(Value::as_u64).collect();
        assert!(offsets.is_sorted(), "{answer}");
        assert!(!text.is_empty() || tokens <= 48);
    }
}
