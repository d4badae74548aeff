//! Sequences in slots of the device give what steps that gather their states give. The oracle has slots, too.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;

use std::path::PathBuf;

use common::{prompt, read};
use fox_infer::{Engine, EngineOptions, Eviction, Request, Sampling, ScoredToken};
use fox_model::Model;
use fox_tensor::Device;

const OPTIONS: [&str; 6] =
    ["fox_pro", "fox_llama", "fox_pro_rope", "transformer_pro", "fla_fox", "fox_pro_shared_qknorm"];

fn model(name: &str) -> Model {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
    Model::from_checkpoint(&root.join(name), &Device::naive()).unwrap()
}

/// A model whose gates forget half of everything at each token, so that pages are dropped.
fn forgetful() -> Model {
    let mut model = model("fox_pro");
    for layer in 0..2 {
        let name = format!("model.layers.{layer}.attn.fgate_proj.bias");
        let id = model.params().find(&name).unwrap();
        let shape = model.params().value(id).shape();
        let bias = model.device().from_f64(&vec![0.0; shape.len()], shape).unwrap();
        model.params_mut().set(id, bias).unwrap();
    }
    model
}

fn options(resident: bool) -> EngineOptions {
    EngineOptions { prefill_chunk: 20, max_context: 1024, resident, ..EngineOptions::default() }
}

/// Prompts that end before, at and behind the end of a page; greedy, sampled and with alternatives.
fn requests() -> Vec<Request> {
    let lengths = [3, 61, 64, 65, 127, 128, 30];
    let request = |(seed, &len): (usize, &usize)| Request {
        sampling: match seed % 3 {
            0 => Sampling { seed: seed as u64, temperature: 0.8, top_k: 40, ..Sampling::default() },
            // Top-p draws other numbers on a device than on the host.
            2 => Sampling { seed: 7, min_p: 0.01, ..Sampling::default() },
            _ => Sampling::greedy(),
        },
        top_logprobs: if seed % 3 == 1 { 2 } else { 0 },
        ..Request::greedy(prompt(seed, len), 40 + 17 * seed % 50)
    };
    lengths.iter().enumerate().map(request).collect()
}

fn assert_close(got: &[ScoredToken], want: &[ScoredToken], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (t, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.id, want.id, "{what}, token {t}");
        assert!((got.logprob - want.logprob).abs() < 1e-5, "{what}, token {t}: {got:?} {want:?}");
        assert_eq!(got.top.len(), want.top.len());
    }
}

#[test]
fn slots_give_what_gathered_steps_give() {
    for name in OPTIONS {
        let (slots, gathered) = (
            Engine::start(model(name), options(true)).unwrap(),
            Engine::start(model(name), options(false)).unwrap(),
        );
        let answers: Vec<_> =
            requests().into_iter().map(|r| (slots.submit(r.clone()).unwrap(), r)).collect();
        for (n, (answer, request)) in answers.into_iter().enumerate() {
            let (_, tokens, finished) = read(answer);
            assert_eq!(tokens.len(), finished.usage.generated_tokens);
            let (_, want, _) = read(gathered.submit(request).unwrap());
            assert_close(&tokens, &want, &format!("{name}, request {n}"));
        }
        assert_eq!((slots.stats().slots, gathered.stats().slots), (32, 0), "{name}");
    }
}

/// Without requests that need logits, every step begins before the one before is finished, also those of sequences that
/// end with it.
#[test]
fn steps_begun_ahead_give_what_gathered_steps_give() {
    let (slots, gathered) = (
        Engine::start(model("fox_pro"), options(true)).unwrap(),
        Engine::start(model("fox_pro"), options(false)).unwrap(),
    );
    let plain = |r: Request| Request { top_logprobs: 0, ..r };
    let mut pairs = Vec::new();
    for (n, request) in requests().into_iter().map(plain).enumerate() {
        let (_, tokens, _) = read(gathered.submit(request.clone()).unwrap());
        // Every other request ends at a token in the middle.
        let stop = tokens[tokens.len() / 2].id;
        let stop_ids = if n % 2 == 0 { vec![stop] } else { Vec::new() };
        let request = Request { stop_ids, ..request };
        let (_, want, _) = read(gathered.submit(request.clone()).unwrap());
        assert_eq!(want.len() < tokens.len(), n % 2 == 0, "request {n}");
        pairs.push((request, want));
    }
    // Sequences enter slots that others have left in the same step.
    let answers: Vec<_> = (0..3)
        .flat_map(|_| &pairs)
        .map(|(request, want)| (slots.submit(request.clone()).unwrap(), want))
        .collect();
    for (n, (answer, want)) in answers.into_iter().enumerate() {
        let (_, tokens, finished) = read(answer);
        assert_eq!(tokens.len(), finished.usage.generated_tokens);
        assert_close(&tokens, want, &format!("request {n}"));
    }
}

#[test]
fn slot_decoding_is_batch_invariant() {
    let engine = || Engine::start(model("fox_pro"), options(true)).unwrap();
    let (alone, batched) = (engine(), engine());
    let answers: Vec<_> =
        requests().into_iter().map(|r| (batched.submit(r.clone()).unwrap(), r)).collect();
    for (answer, request) in answers {
        assert_eq!(read(answer).1, read(alone.submit(request).unwrap()).1);
    }
}

#[test]
fn eviction_at_page_ends_keeps_the_log_probabilities() {
    let run = |eviction: Eviction, resident: bool| {
        let options = EngineOptions { eviction, ..options(resident) };
        let engine = Engine::start(forgetful(), options).unwrap();
        let (_, tokens, finished) =
            read(engine.submit(Request::greedy(prompt(5, 100), 150)).unwrap());
        let dropped: usize = finished.cache.evicted_pages.iter().flatten().sum();
        (tokens, dropped, finished.cache.bytes)
    };
    let (want, kept, all) = run(Eviction::Off, true);
    let (got, dropped, left) = run(Eviction::Safe, true);
    assert_eq!(kept, 0);
    // 250 tokens fill three pages of each of four heads, of which the newest one may still be remembered.
    assert!((8..=12).contains(&dropped), "{dropped}");
    assert!(left < all);
    assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(&want) {
        assert!((got.logprob - want.logprob).abs() < 1e-3, "{got:?} {want:?}");
    }
    let (gathered, _, _) = run(Eviction::Safe, false);
    assert_close(&got, &gathered, "a forgetful model");
}

#[test]
fn preempted_request_resumes_bit_exact() {
    let plenty = Engine::start(model("fox_pro"), options(true)).unwrap();
    let page = plenty.model().device().backend().caps().activation_type.size();
    // Two layers of two heads of width 16 with a gate: keys, values, log gates and sums.
    let page = 2 * 2 * 64 * (2 * 16 * page + 8 + 4);
    let tight = EngineOptions {
        cache_bytes: 7 * page,
        eviction: Eviction::Off,
        share_prefixes: false,
        ..options(true)
    };
    let tight = Engine::start(model("fox_pro"), tight).unwrap();
    let sampled = |seed: usize| Sampling { seed: seed as u64, ..Sampling::default() };
    let request = |seed| Request {
        sampling: if seed > 1 { sampled(seed) } else { Sampling::greedy() },
        ..Request::greedy(prompt(seed, 50), 130)
    };
    // The engine waits in the sink of the first request until all others are there.
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let first = tight.submit_to(Request::greedy(vec![1], 1), move |_| _ = wait.recv()).unwrap();
    let answers: Vec<_> = (0..4).map(|seed| tight.submit(request(seed)).unwrap()).collect();
    drop(go);
    for (seed, answer) in answers.into_iter().enumerate() {
        assert_eq!(read(answer).1, read(plenty.submit(request(seed)).unwrap()).1, "{seed}");
    }
    let stats = tight.stats();
    drop(first);
    assert!(stats.preempted > 0, "there was too little memory for all of them");
    assert!(stats.peak_cache_bytes <= stats.cache_budget, "{stats:?}");
}

#[test]
fn models_without_slots_run_as_before() {
    let engine = Engine::start(model("hgrn2"), options(true)).unwrap();
    assert_eq!(read(engine.submit(Request::greedy(prompt(1, 9), 5)).unwrap()).1.len(), 5);
    assert_eq!(engine.stats().slots, 0);
}

#[test]
fn cancelled_requests_free_their_slots() {
    let options = EngineOptions { max_batch: 2, ..options(true) };
    let engine = Engine::start(model("fox_pro"), options).unwrap();
    for seed in 0..6 {
        let mut answer = engine.submit(Request::greedy(prompt(seed, 10), 900)).unwrap();
        assert!(answer.next().is_some() && answer.next().is_some());
    }
    let (_, tokens, _) = read(engine.submit(Request::greedy(prompt(9, 10), 3)).unwrap());
    assert_eq!(tokens.len(), 3);
}
