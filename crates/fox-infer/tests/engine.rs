//! The engine against the training forward.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::sync::Arc;

use common::{fixture, prompt, read, reference};
use fox_infer::{Engine, EngineOptions, FinishReason, Refusal, Request};

#[rustfmt::skip]
const FIXTURES: [&str; 10] = [
    "fox_pro", "fox_llama", "fox_pro_rope", "fox_pro_bias_only", "transformer_pro",
    "transformer_llama_as_fox", "fla_fox", "delta_net", "hgrn2", "mamba2",
];

#[test]
fn logprobs_match_the_training_forward() {
    for name in FIXTURES {
        let options = EngineOptions { prefill_chunk: 16, ..EngineOptions::default() };
        let engine = Engine::start(fixture(name), options).unwrap();
        let request = Request { echo: true, top_logprobs: 2, ..Request::greedy(prompt(1, 41), 30) };
        let (scores, tokens, finished) = read(engine.submit(request.clone()).unwrap());
        assert_eq!(finished.reason, FinishReason::Length);
        let mut ids = request.prompt.clone();
        ids.extend(tokens.iter().map(|t| t.id));
        let want = reference(engine.model(), &ids);
        assert_eq!((scores.len(), tokens.len()), (40, 30));
        for (i, (scored, want)) in scores.iter().chain(&tokens).zip(want).enumerate() {
            assert_eq!(scored.id, ids[i + 1], "{name}");
            let error = (f64::from(scored.logprob) - want).abs();
            assert!(error < 1e-5, "{name}: {error:e} at {i}");
            assert!(scored.top.len() == 2 && scored.top[0].1 >= scored.top[1].1);
        }
        assert!(tokens.iter().all(|t| t.top[0] == (t.id, t.logprob)), "greedy takes the best");
    }
}

#[test]
fn refuses_invalid_requests() {
    let options = EngineOptions { max_context: 64, cache_bytes: 40_000, ..Default::default() };
    let engine = Engine::start(fixture("fox_pro"), options).unwrap();
    let refuse = |request: Request| engine.submit(request).unwrap_err();
    assert_eq!(refuse(Request::greedy(vec![], 1)), Refusal::EmptyPrompt);
    assert!(matches!(
        refuse(Request::greedy(vec![1, 100_000], 1)),
        Refusal::UnknownToken { position: 1, id: 100_000, .. }
    ));
    assert!(matches!(refuse(Request::greedy(vec![-1], 1)), Refusal::UnknownToken { .. }));
    assert!(matches!(refuse(Request::greedy(vec![1; 60], 5)), Refusal::TooLong { .. }));
    let mut bad = Request::greedy(vec![1], 1);
    bad.sampling.top_p = 0.0;
    assert!(refuse(bad).to_string().contains("top_p"));
    let small = EngineOptions { cache_bytes: 100, ..EngineOptions::default() };
    let tiny = Engine::start(fixture("fox_pro"), small).unwrap();
    let refusal = tiny.submit(Request::greedy(vec![1; 60], 5)).unwrap_err();
    assert!(matches!(refusal, Refusal::NeverFits { budget: 100, .. }), "{refusal}");
    engine.drain();
    assert_eq!(engine.submit(Request::greedy(vec![1], 1)).unwrap_err(), Refusal::Closed);
}

#[test]
fn stop_id_ends_the_answer() {
    let engine = Engine::start(fixture("fox_pro"), EngineOptions::default()).unwrap();
    let request = Request::greedy(prompt(2, 9), 20);
    let (_, all, _) = read(engine.submit(request.clone()).unwrap());
    let stop = all[7].id;
    let first = all.iter().position(|t| t.id == stop).unwrap();
    let (_, tokens, finished) =
        read(engine.submit(Request { stop_ids: vec![stop], ..request }).unwrap());
    assert_eq!(finished.reason, FinishReason::Stop);
    assert_eq!(tokens, all[..first]);
    assert_eq!(finished.usage.generated_tokens, first);
}

#[test]
fn dropping_the_last_handle_joins_the_engine() {
    let engine = Engine::start(fixture("fox_pro"), EngineOptions::default()).unwrap();
    let held = Arc::new(());
    let own = held.clone();
    let sink = move |_| assert!(Arc::strong_count(&own) > 1);
    let _ticket = engine.submit_to(Request::greedy(prompt(3, 9), 40), sink).unwrap();
    drop(engine);
    assert_eq!(
        Arc::strong_count(&held),
        1,
        "the engine's thread has ended, and all it held is gone"
    );
}
