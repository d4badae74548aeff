//! Completions: batch-invariant log-probabilities, complete and streamed.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{model, model_ending_at, serve, serve_model, serve_with};
use fox_infer::EngineOptions;
use fox_model::{ForwardOptions, Model};
use fox_serve::ServeOptions;
use fox_tensor::{Segments, Tape};
use serde_json::{Value, json};

/// Log-probabilities of all ids after each of `ids`, by one forward pass.
fn reference(model: &Model, ids: &[i32]) -> Vec<Vec<f64>> {
    let device = model.device();
    let tokens = device.from_i32(ids, [ids.len()]).unwrap();
    let mut tape = Tape::inference(device);
    let segments = Segments::uniform(1, ids.len());
    let options = ForwardOptions::default();
    let hidden = model.forward(&mut tape, &tokens, &segments, None, &options).unwrap();
    let logits = model.logits(&mut tape, &hidden.states).unwrap().value().to_f64().unwrap();
    let normalise = |row: &[f64]| {
        let norm = row.iter().map(|x| x.exp()).sum::<f64>().ln();
        row.iter().map(|x| x - norm).collect()
    };
    logits.chunks(model.config().vocab_size).map(normalise).collect()
}

fn prompt(seed: usize, len: usize) -> Vec<i32> {
    (0..len).map(|i| ((i * 31 + seed * 17 + i * i * 7) % 250) as i32).collect()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

/// As lm-evaluation-harness asks: ids, echo, one alternative, and one or no token to generate.
#[test]
fn echoed_logprobs_match_the_training_forward() {
    let (server, model) = (serve(), model());
    for max_tokens in [0, 1] {
        let ids = prompt(3, 300);
        let body = json!({ "prompt": [ids], "echo": true, "logprobs": 1, "max_tokens": max_tokens,
            "temperature": 0, "seed": 1234, "model": "tiny", "ignore_eos": true });
        let answer = server.complete(&body);
        let logprobs = &answer["choices"][0]["logprobs"];
        let count = ids.len() + max_tokens;
        for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            assert_eq!(logprobs[list].as_array().unwrap().len(), count, "{list}");
        }
        assert!(logprobs["token_logprobs"][0].is_null() && logprobs["top_logprobs"][0].is_null());
        let rows = reference(&model, &ids);
        for i in 1..count {
            let own = logprobs["token_logprobs"][i].as_f64().unwrap();
            let top = logprobs["top_logprobs"][i].as_object().unwrap();
            let best = top.values().map(|v| v.as_f64().unwrap()).fold(f64::MIN, f64::max);
            let row = &rows[i - 1];
            let want_best = row.iter().copied().fold(f64::MIN, f64::max);
            assert!((best - want_best).abs() < 1e-5, "{best} {want_best}");
            let greedy = match ids.get(i) {
                Some(&id) => {
                    assert!((own - row[id as usize]).abs() < 1e-5, "{own} at {i}");
                    row[id as usize] == want_best
                }
                None => true,
            };
            // The test that evaluation tools make: equality, not closeness.
            assert_eq!(own == best, greedy, "at {i}");
        }
        assert_eq!(answer["usage"]["total_tokens"], count);
        assert_eq!(answer["choices"][0]["finish_reason"], "length");
    }
}

/// Evaluation tools cut off the last entry as the generated one, so it must be there, also when the model
/// ends the document.
#[test]
fn end_marker_has_a_logprob() {
    let body = json!({ "prompt": "fox", "echo": true, "logprobs": 1, "max_tokens": 3,
        "temperature": 0, "ignore_eos": true });
    let answer = serve().complete(&body);
    let (endless, mut body) = (answer["choices"][0]["logprobs"].clone(), body);
    body["ignore_eos"] = json!(false);
    // The id of the second token that is generated, by its name.
    let name = endless["tokens"][5].as_str().unwrap();
    let id = match name.strip_prefix("token_id:") {
        Some(id) => id.parse().unwrap(),
        None => usize::from(name.as_bytes()[0]),
    };
    let server = serve_model(model_ending_at(Some(id)), Default::default(), Default::default());
    let choice = server.complete(&body)["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "stop");
    let entries = choice["logprobs"]["token_logprobs"].as_array().unwrap();
    let first = endless["tokens"].as_array().unwrap()[4..].iter().position(|t| t == name).unwrap();
    assert_eq!(entries[..], endless["token_logprobs"].as_array().unwrap()[..5 + first]);
    body["logprobs"] = Value::Null;
    body["echo"] = json!(false);
    assert_eq!(server.complete(&body)["usage"]["completion_tokens"], first);
}

#[test]
fn sixteen_prompts_are_bit_exact() {
    let server = serve();
    let ask = |prompts: Vec<Vec<i32>>, seed: usize| {
        let body = json!({ "prompt": prompts, "echo": true, "logprobs": 3, "max_tokens": 24,
            "temperature": 0.9, "seed": seed, "ignore_eos": true });
        server.complete(&body)["choices"].as_array().unwrap().clone()
    };
    let prompts: Vec<Vec<i32>> = (0..16).map(|i| prompt(i, 5 + 37 * i % 300)).collect();
    let together = ask(prompts.clone(), 5);
    assert_eq!(together.len(), 16);
    for (i, prompt) in prompts.into_iter().enumerate() {
        let mut alone = ask(vec![prompt], 5 + i).remove(0);
        alone["index"] = json!(i);
        assert_eq!(alone, together[i]);
    }
}

#[test]
fn streamed_completion_adds_up() {
    let server = serve();
    for extra in [
        json!({}),
        json!({ "echo": true }),
        json!({ "echo": true, "logprobs": 2 }),
        json!({ "logprobs": 0, "n": 3 }),
        json!({ "prompt": ["one", "naïve 😀"], "logprobs": 1 }),
        json!({ "max_tokens": 0, "echo": true, "logprobs": 1 }),
    ] {
        let mut body =
            json!({ "prompt": "aé😀b", "max_tokens": 40, "seed": 3, "ignore_eos": true });
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let whole = server.complete(&body);
        body["stream"] = json!(true);
        body["stream_options"] = json!({ "include_usage": true });
        let mut chunks = server.stream(&body);
        let last = chunks.pop().unwrap();
        assert_eq!((&last["usage"], &last["choices"]), (&whole["usage"], &json!([])));
        let choices = whole["choices"].as_array().unwrap();
        let mut built = vec![(String::new(), Vec::new(), Value::Null); choices.len()];
        for chunk in &chunks {
            assert_eq!(
                (&chunk["object"], &chunk["usage"]),
                (&json!("text_completion"), &Value::Null)
            );
            let part = &chunk["choices"][0];
            let (text, tokens, finish) = &mut built[part["index"].as_u64().unwrap() as usize];
            assert!(finish.is_null(), "nothing follows the end");
            text.push_str(part["text"].as_str().unwrap());
            for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
                if let Some(items) = part["logprobs"][list].as_array() {
                    tokens.extend(items.iter().map(|item| (list, item.clone())));
                }
            }
            *finish = part["finish_reason"].clone();
        }
        for ((text, tokens, finish), choice) in built.iter().zip(choices) {
            assert_eq!(choice["text"], *text);
            assert_eq!(choice["finish_reason"], *finish);
            for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
                let got: Vec<_> = tokens.iter().filter(|t| t.0 == list).map(|t| &t.1).collect();
                let want = choice["logprobs"][list].as_array();
                assert_eq!(got, want.map_or(vec![], |want| want.iter().collect()), "{list}");
            }
        }
    }
}

#[test]
fn prompt_forms_are_equivalent() {
    let server = serve();
    let ask = |prompt: Value| {
        let body = json!({ "prompt": prompt, "max_tokens": 8, "temperature": 0, "echo": true,
            "logprobs": 0 });
        server.complete(&body)["choices"].as_array().unwrap().clone()
    };
    let text = ask(json!("fox"));
    assert_eq!(text[0]["logprobs"]["tokens"][0], "token_id:255", "the start marker");
    assert_eq!(numbers(&text[0]["logprobs"]["text_offset"])[..5], [0.0, 0.0, 1.0, 2.0, 3.0]);
    assert!(text[0]["text"].as_str().unwrap().starts_with("fox"));
    assert_eq!(ask(json!(["fox"])), text);
    assert_eq!(ask(json!([255, 102, 111, 120])), text);
    assert_eq!(ask(json!([[255, 102, 111, 120]])), text);
    assert_eq!(ask(json!(["fox", "fox"]))[1]["logprobs"], text[0]["logprobs"]);
}

#[test]
fn seeds_and_stop_strings() {
    let server = serve();
    let base = json!({ "prompt": "x", "max_tokens": 60, "seed": 11, "ignore_eos": true });
    let with = |extra: Value| {
        let mut body = base.clone();
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        server.complete(&body)
    };
    let text =
        |answer: &Value, i: usize| answer["choices"][i]["text"].as_str().unwrap().to_string();
    let one = with(json!({}));
    assert_eq!(text(&one, 0), text(&with(json!({})), 0));
    let several = with(json!({ "n": 3 }));
    assert_eq!(text(&several, 0), text(&one, 0));
    assert_eq!(text(&several, 2), text(&with(json!({ "seed": 13 })), 0));
    assert_ne!(text(&several, 1), text(&one, 0));
    assert_eq!(
        several["usage"],
        json!({ "prompt_tokens": 2, "completion_tokens": 180, "total_tokens": 182 })
    );

    // Equal prompts of a list are continued differently, with a seed reproducibly.
    let five = json!({ "prompt": ["x", "x", "x", "x", "x"] });
    let texts = |answer: &Value| (0..5).map(|i| text(answer, i)).collect::<Vec<_>>();
    let seeded = texts(&with(five.clone()));
    assert_eq!(seeded, texts(&with(five.clone())));
    let mut body = five;
    body["seed"] = Value::Null;
    let (drawn, again) = (texts(&with(body.clone())), texts(&with(body)));
    for texts in [&seeded, &drawn] {
        let distinct: std::collections::BTreeSet<&String> = texts.iter().collect();
        assert_eq!(distinct.len(), 5, "{texts:?}");
    }
    assert_ne!(drawn, again);

    // Any two characters of the answer may end it; the text before them is all there is.
    let all: Vec<char> = text(&one, 0).chars().collect();
    let stop: String = all[20..22].iter().collect();
    let before = text(&one, 0).split(&stop).next().unwrap().to_string();
    let stopped = with(json!({ "stop": [stop, "never there"], "logprobs": 1 }));
    assert_eq!(text(&stopped, 0), before);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    let offsets = numbers(&stopped["choices"][0]["logprobs"]["text_offset"]);
    assert!(offsets.iter().all(|&at| at < 1.0 + before.chars().count() as f64), "{offsets:?}");
    // A stop string of which only beginnings are there holds text back, and changes nothing.
    let begun = format!("{}\u{1}", all[20]);
    let held = with(json!({ "stop": [begun], "logprobs": 1 }));
    assert_eq!(held["choices"], with(json!({ "logprobs": 1 }))["choices"]);
}

#[test]
fn sampling_parameters_are_applied() {
    let server = serve();
    let ask = |extra: Value| {
        let mut body = json!({ "prompt": "fox", "max_tokens": 30, "seed": 2, "ignore_eos": true });
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        server.complete(&body)["choices"][0]["text"].clone()
    };
    let greedy = ask(json!({ "temperature": 0 }));
    assert_eq!(ask(json!({ "top_k": 1 })), greedy);
    assert_eq!(ask(json!({ "top_p": 1e-6 })), greedy);
    assert_eq!(ask(json!({ "min_p": 1.0 })), greedy);
    assert_eq!(ask(json!({ "top_k": -1 })), ask(json!({})));
    assert_ne!(ask(json!({ "temperature": 0, "repetition_penalty": 50.0 })), greedy);
}

#[test]
fn request_timeout_is_an_error() {
    let options = ServeOptions {
        request_time: std::time::Duration::from_millis(200),
        ..ServeOptions::default()
    };
    let server = serve_with(EngineOptions::default(), options);
    let body = json!({ "prompt": "x", "max_tokens": 60_000, "ignore_eos": true });
    let reply = common::client::post(server.address, "/v1/completions", &body).unwrap();
    assert_eq!((reply.status, reply.json()["error"]["type"].as_str()), (504, Some("timeout")));
    let mut body = body;
    body["stream"] = json!(true);
    let reply = common::client::post(server.address, "/v1/completions", &body).unwrap();
    assert_eq!(reply.status, 200);
    let text = reply.text();
    assert!(text.contains(r#""type":"timeout""#) && !text.contains("[DONE]"));
    common::wait_for("the engine is idle", || server.engine.stats().running == 0);
}
