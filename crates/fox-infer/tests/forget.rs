//! Eviction: what it changes, what it saves, and the budget it serves.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{fixture, prompt, read, reference};
use fox_base::difference::largest_error;
use fox_infer::{Engine, EngineOptions, Eviction, FinishReason, Request, ScoredToken};
use fox_model::{ForgettingConfig, Model, ModelConfig};
use fox_tensor::Device;
use proptest::prelude::*;

/// Two layers of four heads, of which only the last of each remembers for long.
fn mostly_local(config: ForgettingConfig, device: &Device) -> Model {
    let mut model_config = ModelConfig::fox_pro(64, 2, 4).with_vocab(64);
    model_config.mixer = Box::new(config);
    let mut model = Model::init(&model_config, 3, device).unwrap();
    for layer in 0..2 {
        let name = format!("model.layers.{layer}.attn.fgate_proj.bias");
        let id = model.params().find(&name).unwrap();
        let bias = device.from_f32(&[-1.0, 0.0, 1.0, 8.0], [4]).unwrap();
        model.params_mut().set(id, bias).unwrap();
    }
    model
}

fn scores(engine: &Engine, request: &Request) -> (Vec<ScoredToken>, fox_infer::CacheUsage) {
    let (prompt, tokens, finished) = read(engine.submit(request.clone()).unwrap());
    (prompt.into_iter().chain(tokens).collect(), finished.cache)
}

/// Of the log-probabilities of two answers.
fn largest_difference(a: &[ScoredToken], b: &[ScoredToken]) -> f64 {
    let logprobs = |scores: &[ScoredToken]| scores.iter().map(|s| s.logprob).collect::<Vec<f32>>();
    largest_error(&logprobs(a), &logprobs(b))
}

fn options(eviction: Eviction) -> EngineOptions {
    EngineOptions { eviction, prefill_chunk: 64, max_context: 4096, ..EngineOptions::default() }
}

#[test]
fn local_heads_evict_pages() {
    let device = fox_cpu::device();
    let model = || mostly_local(ForgettingConfig::fox_pro(4), &device);
    let off = Engine::start(model(), options(Eviction::Off)).unwrap();
    let request = Request { echo: true, ..Request::greedy(prompt(4, 900), 300) };
    let (full, used) = scores(&off, &request);
    assert_eq!((used.bytes, used.evicted_fraction()), (used.full_bytes, 0.0));
    let mut evicted = Vec::new();
    for (eviction, most) in [(Eviction::Safe, 1e-4), (Eviction::Tolerance(-3.0), 0.1)] {
        let engine = Engine::start(model(), options(eviction)).unwrap();
        let (pruned, cache) = scores(&engine, &request);
        let same = full.iter().zip(&pruned).take_while(|(a, b)| a.id == b.id).count();
        let worst = largest_difference(&full[..same], &pruned[..same]);
        assert!(same >= 900 && worst < most, "{eviction:?}: {same} tokens, {worst:e}");
        // 1,199 tokens fill 18 pages; three heads of four keep one or two, the last one all.
        for layer in &cache.evicted_pages {
            assert!(layer[..3].iter().all(|pages| *pages >= 16) && layer[3] == 0, "{layer:?}");
        }
        assert!(cache.evicted_fraction() > 0.6);
        evicted.push(cache.evicted_pages.iter().flatten().sum::<usize>());
    }
    assert!(evicted[0] <= evicted[1], "{evicted:?}");
}

#[test]
fn stick_breaking_evicts_by_decay() {
    let device = fox_cpu::device();
    let config = ForgettingConfig::fox_llama(4).stick_breaking();
    let model = || mostly_local(config.clone(), &device);
    let request = Request { echo: true, ..Request::greedy(prompt(4, 900), 20) };
    let engine = |eviction| Engine::start(model(), options(eviction)).unwrap();
    let (full, _) = scores(&engine(Eviction::Off), &request);
    // The first token of a prompt has no score.
    let ids: Vec<i32> =
        request.prompt[..1].iter().copied().chain(full.iter().map(|scored| scored.id)).collect();
    let want = reference(&model(), &ids);
    assert_eq!(full.len(), want.len());
    for (i, (got, want)) in full.iter().zip(&want).enumerate() {
        assert!((f64::from(got.logprob) - want).abs() < 1e-4, "token {i}");
    }
    let (pruned, cache) = scores(&engine(Eviction::Safe), &request);
    assert!(largest_difference(&full, &pruned) < 1e-4);
    for layer in &cache.evicted_pages {
        assert!(layer[..3].iter().all(|pages| *pages >= 12) && layer[3] == 0, "{layer:?}");
    }
}

#[test]
fn bound_from_weights_without_qk_norm() {
    let device = fox_cpu::device();
    let model = || mostly_local(ForgettingConfig::fox_llama(4), &device);
    let off = Engine::start(model(), options(Eviction::Off)).unwrap();
    let safe = Engine::start(model(), options(Eviction::Safe)).unwrap();
    let request = Request { echo: true, ..Request::greedy(prompt(4, 900), 0) };
    let ((full, _), (pruned, cache)) = (scores(&off, &request), scores(&safe, &request));
    let worst = largest_difference(&full, &pruned);
    assert!(worst < 1e-4, "{worst:e}");
    assert!(cache.evicted_pages[0][0] > 0 && cache.evicted_pages[0][3] == 0, "{cache:?}");
}

#[test]
fn window_evicts_and_transformer_does_not() {
    let device = fox_cpu::device();
    let build = |window: Option<usize>| {
        let mut config = ModelConfig::transformer_pro(32, 2, 2).with_vocab(64);
        if let Some(mixer) = config.mixer.forgetting_mut() {
            mixer.window = window;
        }
        Model::init(&config, 5, &device).unwrap()
    };
    for window in [None, Some(50), Some(129)] {
        let engine = Engine::start(build(window), options(Eviction::Safe)).unwrap();
        let request = Request { echo: true, ..Request::greedy(prompt(2, 500), 40) };
        let (got, cache) = scores(&engine, &request);
        let mut ids = request.prompt.clone();
        ids.extend(got[499..].iter().map(|scored| scored.id));
        for (scored, want) in got.iter().zip(reference(engine.model(), &ids)) {
            let error = (f64::from(scored.logprob) - want).abs();
            assert!(error < 1e-5, "{window:?}: {error:e}");
        }
        // 539 tokens lie in 9 pages, of which the next query sees the last `window - 1` keys.
        let dropped = window.map_or(0, |w| (539 + 1 - w) / 64);
        assert!(cache.evicted_pages.iter().flatten().all(|n| *n == dropped), "{cache:?}");
    }
}

#[test]
fn engine_runs_on_the_naive_device() {
    let device = Device::naive();
    let model = mostly_local(ForgettingConfig::fox_pro(4), &device);
    let engine = Engine::start(model, options(Eviction::Off)).unwrap();
    let request = Request { echo: true, ..Request::greedy(prompt(4, 90), 5) };
    let (got, _) = scores(&engine, &request);
    let mut ids = request.prompt.clone();
    ids.extend(got[89..].iter().map(|scored| scored.id));
    for (scored, want) in got.iter().zip(reference(engine.model(), &ids)) {
        assert!((f64::from(scored.logprob) - want).abs() < 1e-6);
    }
}

#[test]
fn eviction_is_independent_of_chunking() {
    // The oracle keeps gates in pages and sums them up at the end of a step, the CPU in every layer.
    let request = Request { echo: true, ..Request::greedy(prompt(4, 300), 20) };
    let run = |device: &Device| {
        let model = mostly_local(ForgettingConfig::fox_pro(4), device);
        // In slots, pages are looked at when one is full.
        let options = EngineOptions { resident: false, ..options(Eviction::Tolerance(-3.0)) };
        scores(&Engine::start(model, options).unwrap(), &request)
    };
    let ((cpu, early), (naive, late)) = (run(&fox_cpu::device()), run(&Device::naive()));
    assert_eq!(early.evicted_pages, late.evicted_pages);
    assert!(early.evicted_pages.iter().all(|heads| heads[0] >= 3), "{early:?}");
    assert!(largest_difference(&cpu, &naive) < 1e-4);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn the_budget_is_never_exceeded(
        requests in prop::collection::vec((1usize..200, 0usize..120, 0usize..3, prop::bool::ANY), 1..24),
        pages in 4usize..14,
        chunk in 8usize..100,
    ) {
        // Fixture pages: two layers, two heads of width 16, one gate: 2 * 2 * 64 * (2 * 16 * 4 + 8).
        let cache_bytes = pages * 34_816 + 4096;
        let options = EngineOptions {
            cache_bytes,
            prefill_chunk: chunk,
            max_batch: 6,
            ..EngineOptions::default()
        };
        let engine = Engine::start(fixture("fox_pro"), options).unwrap();
        let mut answers = Vec::new();
        for (len, tokens, kind, dropped) in requests {
            let request = Request::greedy(prompt(kind, len), tokens);
            match engine.submit(request) {
                Ok(answer) if dropped => drop(answer),
                Ok(answer) => answers.push((answer, tokens)),
                Err(refusal) => {
                    let never = matches!(refusal, fox_infer::Refusal::NeverFits { .. });
                    prop_assert!(never && len + tokens > 64 * (pages - 1), "{}", refusal);
                }
            }
        }
        for (answer, tokens) in answers {
            let (_, got, finished) = read(answer);
            if let FinishReason::Failed(words) = &finished.reason {
                // Nothing was forgotten, and everything was too much.
                let len = finished.usage.prompt_tokens;
                prop_assert!(words.contains("cache_bytes") && len + tokens > 64 * (pages - 1), "{}", words);
                continue;
            }
            prop_assert_eq!(got.len(), tokens);
            prop_assert_eq!(finished.usage.generated_tokens, tokens);
        }
        engine.drain();
        let peak = engine.stats().peak_cache_bytes;
        prop_assert!(peak <= cache_bytes, "{} of {}", peak, cache_bytes);
    }
}
