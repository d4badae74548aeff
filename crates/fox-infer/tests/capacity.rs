//! Capacity: more requests than fit without eviction, and preemption.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::sync::mpsc::channel;
use std::sync::{Arc, RwLock};

use common::{prompt, read};
use fox_data::Tokenizer;
use fox_infer::{
    Engine, EngineOptions, Event, FinishReason, GrammarCompiler, GrammarSpec, Refusal, Request,
    Sampling,
};
use fox_model::{Model, ModelConfig};

/// The token that makes a head forget everything before it.
const FORGET: i32 = 0;
/// Bytes of a page over two layers of two heads of width 16 with a gate.
const PAGES: usize = 2 * 2 * 64 * (2 * 16 * 4 + 8);

/// Remembers everything until it reads [`FORGET`].
fn model() -> Model {
    let device = fox_cpu::device();
    let config = ModelConfig::fox_pro(32, 2, 2).with_vocab(64);
    let mut model = Model::init(&config, 3, &device).unwrap();
    // Column 0 of the residual stream distinguishes the token from all others.
    let id = model.params().find("model.embeddings.weight").unwrap();
    let mut values = model.params().value(id).to_f32().unwrap();
    for (token, row) in values.chunks_mut(32).enumerate() {
        row[0] = if token as i32 == FORGET { 100.0 } else { 0.0 };
    }
    let embeddings = device.from_f32(&values, [64, 32]).unwrap();
    model.params_mut().set(id, embeddings).unwrap();
    for layer in 0..2 {
        for (name, values) in [("weight", gate_weights()), ("bias", vec![12.0; 2])] {
            let name = format!("model.layers.{layer}.attn.fgate_proj.{name}");
            let id = model.params().find(&name).unwrap();
            let shape = model.params().value(id).shape();
            model.params_mut().set(id, device.from_f32(&values, shape).unwrap()).unwrap();
        }
    }
    model
}

/// Far below zero for the token, zero for all others.
fn gate_weights() -> Vec<f32> {
    (0..2 * 32).map(|i| if i % 32 == 0 { -30.0 } else { 0.0 }).collect()
}

fn options(pages: usize) -> EngineOptions {
    EngineOptions {
        cache_bytes: pages * PAGES + 4096,
        max_context: 8192,
        ..EngineOptions::default()
    }
}

/// A prompt that is forgotten all the time.
fn forgetful(seed: usize, len: usize) -> Vec<i32> {
    prompt(seed, len)
        .into_iter()
        .enumerate()
        .map(|(i, id)| if i.is_multiple_of(16) { FORGET } else { id.max(1) })
        .collect()
}

/// One that is remembered.
fn memorable(seed: usize, len: usize) -> Vec<i32> {
    prompt(seed, len).into_iter().map(|id| id.max(1)).collect()
}

fn sampled(prompt: Vec<i32>, tokens: usize, seed: u64) -> Request {
    let sampling = Sampling { seed, ..Sampling::default() };
    // Never the token that forgets.
    Request {
        sampling,
        logit_bias: vec![(FORGET, -100.0)],
        top_logprobs: 2,
        ..Request::greedy(prompt, tokens)
    }
}

#[test]
fn eviction_increases_capacity() {
    // Room for two prompts of 2,048 tokens with all their keys.
    let engine = Engine::start(model(), options(2 * 32)).unwrap();
    for i in 0..12 {
        read(engine.submit(Request::greedy(forgetful(i, 1024), 1)).unwrap());
    }
    let answers: Vec<_> = (0..10)
        .map(|i| engine.submit(Request::greedy(forgetful(20 + i, 2048), 64)).unwrap())
        .collect();
    let mut most = 0;
    while engine.stats().finished < 22 {
        most = most.max(engine.stats().running);
        std::thread::yield_now();
    }
    for answer in answers {
        assert_eq!(read(answer).2.reason, FinishReason::Length);
    }
    assert!(most >= 8, "{most} at a time");
    let stats = engine.stats();
    assert!(stats.peak_cache_bytes <= stats.cache_budget, "{stats:?}");
}

#[test]
fn retention_is_learned_from_one_prompt() {
    // Room for one request of 2,048 + 400 tokens with all its keys; nothing has run before.
    let options = EngineOptions { share_prefixes: false, prefill_chunk: 512, ..options(42) };
    let engine = Engine::start(model(), options).unwrap();
    // A step prefills at least one of a prompt's 4 chunks, so the first still decodes when the last is prefilled.
    let request = |i: usize| Request {
        logit_bias: vec![(FORGET, 100.0)],
        ..Request::greedy(forgetful(i, 2048), 400)
    };
    // No token before all have asked.
    let asking = Arc::new(RwLock::new(()));
    let held = asking.write().unwrap();
    let (sender, events) = channel();
    let submit = |i: usize| {
        let (sender, asking) = (sender.clone(), asking.clone());
        let sink = move |event| {
            drop(asking.read());
            if let Event::Finished(finished) = event {
                sender.send(finished.reason).unwrap();
            }
        };
        engine.submit_to(request(i), sink).unwrap()
    };
    let _tickets: Vec<_> = (0..6).map(submit).collect();
    drop(held);
    for _ in 0..6 {
        assert_eq!(events.recv().unwrap(), FinishReason::Length);
    }
    let stats = engine.stats();
    assert_eq!((stats.peak_decoding, stats.preempted), (6, 0), "{stats:?}");
    assert!(stats.peak_cache_bytes <= stats.cache_budget, "{stats:?}");
}

#[test]
fn preempted_requests_give_the_same_bits() {
    let roomy = Engine::start(model(), options(10_000)).unwrap();
    let tight = Engine::start(model(), options(40)).unwrap();
    // It learns that little is kept, which is wrong for what follows.
    for i in 0..20 {
        read(tight.submit(Request::greedy(forgetful(i, 1024), 1)).unwrap());
    }
    // The position in a grammar must survive, too.
    let compiler = GrammarCompiler::new(&Tokenizer::from_name("bytes").unwrap(), 256).unwrap();
    let digits = compiler.compile(&GrammarSpec::Regex("([0-4]{3}[5-9]){100}".into())).unwrap();
    let request = |i: usize| Request {
        echo: i.is_multiple_of(2),
        grammar: (i % 2 == 1).then(|| digits.clone()),
        ..sampled(memorable(i, 700 + 50 * i), 200, i as u64)
    };
    let answers: Vec<_> = (0..5).map(|i| tight.submit(request(i)).unwrap()).collect();
    for (i, answer) in answers.into_iter().enumerate() {
        let (prompt, tokens, finished) = read(answer);
        let (want_prompt, want, _) = read(roomy.submit(request(i)).unwrap());
        assert_eq!(finished.reason, FinishReason::Length, "request {i}");
        if i % 2 == 1 {
            let is_low = |at: usize| (48..53).contains(&tokens[at].id);
            assert!((0..200).all(|at| is_low(at) == (at % 4 < 3)), "request {i}");
        }
        assert_eq!((prompt, tokens), (want_prompt, want), "request {i}");
    }
    let stats = tight.stats();
    assert!(stats.preempted > 0 && stats.peak_cache_bytes <= stats.cache_budget, "{stats:?}");
    assert_eq!(roomy.stats().preempted, 0);
}

/// Requests of equal length that do not fit together: the one that came first is not preempted and ends first.
#[test]
fn youngest_request_is_preempted() {
    let engine = Engine::start(model(), options(40)).unwrap();
    // It learns that little is kept, so that too many are admitted.
    for i in 0..20 {
        read(engine.submit(Request::greedy(forgetful(i, 1024), 1)).unwrap());
    }
    let (sender, ends) = channel();
    let submit = |i: usize| {
        let sender = sender.clone();
        let sink = move |event| {
            if let Event::Finished(finished) = event {
                sender.send((i, finished.reason)).unwrap();
            }
        };
        engine.submit_to(sampled(memorable(i, 800), 200, i as u64), sink).unwrap()
    };
    let _tickets: Vec<_> = (0..5).map(submit).collect();
    assert_eq!(ends.recv().unwrap(), (0, FinishReason::Length));
    assert!(engine.stats().preempted > 0);
}

#[test]
fn request_larger_than_the_cache_fails() {
    let engine = Engine::start(model(), options(10)).unwrap();
    let fits = read(engine.submit(Request::greedy(forgetful(1, 4096), 8)).unwrap()).2;
    assert_eq!(fits.reason, FinishReason::Length);
    let (_, _, finished) = read(engine.submit(sampled(memorable(1, 4096), 8, 1)).unwrap());
    let FinishReason::Failed(words) = finished.reason else { panic!("{:?}", finished.reason) };
    assert!(words.contains("cache_bytes") && words.contains("352256 bytes"), "{words}");
    // What cannot forget is refused at once.
    let config = ModelConfig::transformer_pro(32, 2, 2).with_vocab(64);
    let keeps = Model::init(&config, 5, &fox_cpu::device()).unwrap();
    let engine = Engine::start(keeps, options(10)).unwrap();
    let refusal = engine.submit(Request::greedy(memorable(1, 4096), 8)).unwrap_err();
    assert!(matches!(refusal, Refusal::NeverFits { .. }), "{refusal}");
    assert!(refusal.to_string().contains("cache_bytes"), "{refusal}");
}

#[test]
fn small_request_passes_a_large_one() {
    let config = ModelConfig::transformer_pro(32, 2, 2).with_vocab(64);
    let model = Model::init(&config, 5, &fox_cpu::device()).unwrap();
    let engine =
        Engine::start(model, EngineOptions { share_prefixes: false, ..options(40) }).unwrap();
    // Half of the memory, for long.
    let mut running = engine.submit(Request::greedy(memorable(1, 30), 20 * 64)).unwrap();
    assert!(matches!(running.next(), Some(Event::Token(_))));
    let mut large = engine.submit(Request::greedy(memorable(2, 30), 30 * 64)).unwrap();
    let small = engine.submit(Request::greedy(memorable(3, 30), 5)).unwrap();
    assert_eq!(read(small).1.len(), 5);
    assert!(large.try_next().is_none(), "the small one was first");
    drop(running);
    assert_eq!(read(large).1.len(), 30 * 64);
}
