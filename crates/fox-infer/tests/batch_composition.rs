//! Results are independent of batch composition; what requests share.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{fixture, prompt, read};
use fox_infer::{Engine, EngineOptions, Eviction, Request, Sampling, WeightFormat};

#[rustfmt::skip]
const FIXTURES: [&str; 8] = [
    "fox_pro", "fox_llama", "fox_pro_rope", "transformer_pro", "fla_fox", "delta_net", "hgrn2",
    "mamba2",
];

fn request(seed: usize) -> Request {
    let sampling = Sampling { seed: seed as u64, temperature: 0.9, ..Sampling::default() };
    Request {
        sampling,
        top_logprobs: 3,
        echo: seed.is_multiple_of(3),
        ..Request::greedy(prompt(seed, 3 + 11 * seed % 90), 10 + 7 * seed % 40)
    }
}

#[test]
fn batch_of_sixteen_is_bit_exact() {
    for name in FIXTURES {
        for weights in [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Int8] {
            let options = EngineOptions { prefill_chunk: 20, weights, ..Default::default() };
            let alone = Engine::start(fixture(name), options.clone()).unwrap();
            let batch = Engine::start(fixture(name), options).unwrap();
            let answers: Vec<_> =
                (0..16).map(|seed| batch.submit(request(seed)).unwrap()).collect();
            for (seed, answer) in answers.into_iter().enumerate() {
                let (prompt, tokens, finished) = read(answer);
                let (prompt_alone, tokens_alone, _) = read(alone.submit(request(seed)).unwrap());
                assert_eq!(tokens.len(), finished.usage.generated_tokens);
                assert_eq!(tokens, tokens_alone, "{name}, request {seed}");
                assert_eq!(prompt, prompt_alone, "{name}, request {seed}");
            }
            assert!(batch.stats().steps < alone.stats().steps / 3, "{name}: steps were shared");
        }
    }
}

#[test]
fn shared_prefixes_are_bit_exact() {
    for name in ["fox_pro", "hgrn2"] {
        let options = EngineOptions { prefill_chunk: 16, ..EngineOptions::default() };
        let unshared = EngineOptions { share_prefixes: false, ..options.clone() };
        let (sharing, plain) = (
            Engine::start(fixture(name), options).unwrap(),
            Engine::start(fixture(name), unshared).unwrap(),
        );
        let mut longer = prompt(1, 70);
        longer[60] += 1;
        // The same prompt, one that differs in the fourth chunk, a prefix of it, and one that extends it from where it
        // ended, inside of a chunk.
        let prompts =
            [prompt(1, 70), prompt(1, 70), longer, prompt(1, 48), prompt(1, 70), prompt(1, 90)];
        let shared: Vec<usize> = (0..6)
            .map(|i| {
                let sampling = Sampling { seed: i, ..Sampling::default() };
                let request =
                    Request { sampling, ..Request::greedy(prompts[i as usize].clone(), 9) };
                let (_, tokens, finished) = read(sharing.submit(request.clone()).unwrap());
                assert_eq!(tokens, read(plain.submit(request).unwrap()).1, "{name}");
                finished.usage.shared_tokens
            })
            .collect();
        assert_eq!(shared, [0, 70, 48, 32, 70, 64], "{name}");
        assert_eq!(sharing.stats().shared_tokens, 284);
        // Several at once: one reads, the others wait for it.
        let answers: Vec<_> =
            (0..4).map(|_| sharing.submit(Request::greedy(prompt(9, 64), 5)).unwrap()).collect();
        let shared: usize =
            answers.into_iter().map(|answer| read(answer).2.usage.shared_tokens).sum();
        assert_eq!(shared, 3 * 64, "{name}");
    }
}

#[test]
fn dropped_request_frees_memory_and_slot() {
    let options = EngineOptions {
        max_batch: 1,
        max_queue: 2,
        share_prefixes: false,
        eviction: Eviction::Off,
        ..EngineOptions::default()
    };
    let engine = Engine::start(fixture("fox_pro"), options).unwrap();
    let endless = || Request::greedy(prompt(1, 300), 60_000);
    let mut first = engine.submit(endless()).unwrap();
    assert!(first.next().is_some(), "it runs");
    let second = engine.submit(endless()).unwrap();
    let mut third = engine.submit(endless()).unwrap();
    assert!(engine.submit(endless()).is_err(), "the queue is full");
    assert!(engine.stats().cache_bytes > 0);
    drop(second);
    drop(first);
    assert!(third.next().is_some(), "the third got the place");
    drop(third);
    let (_, tokens, _) = read(engine.submit(Request::greedy(vec![1], 2)).unwrap());
    assert_eq!(tokens.len(), 2);
    engine.drain();
    let stats = engine.stats();
    assert_eq!((stats.cancelled, stats.finished, stats.running, stats.queued), (3, 1, 0, 0));
    assert_eq!(stats.cache_bytes, 0);
}
