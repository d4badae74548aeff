//! Hybrids in the engine: pages of some layers, recurrent states of others, and eviction that stays exact.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{prompt, read, reference};
use fox_infer::{Engine, EngineOptions, Eviction, Request};
use fox_model::mixers::hybrid::LayerConfigs;
use fox_model::{HybridConfig, LayerKind, Model, ModelConfig};

fn model() -> Model {
    let words = ["fox", "window:50", "gated-delta-net", "mamba2"];
    let pattern = words.map(|word| LayerKind::parse(word).unwrap()).to_vec();
    let mixer = HybridConfig::new(pattern, LayerConfigs::standard(64, 4));
    let config = ModelConfig::with_mixer(64, 4, mixer, 1.0).with_vocab(64);
    let mut model = Model::init(&config, 3, &fox_cpu::device()).unwrap();
    let id = model.params().find("model.layers.0.attn.fgate_proj.bias").unwrap();
    let bias = model.device().from_f32(&[-1.0, 0.0, 1.0, 8.0], [4]).unwrap();
    model.params_mut().set(id, bias).unwrap();
    model
}

#[test]
fn hybrid_layers_evict_pages() {
    let options =
        EngineOptions { eviction: Eviction::Safe, prefill_chunk: 64, ..EngineOptions::default() };
    let engine = Engine::start(model(), options).unwrap();
    let request = Request { echo: true, ..Request::greedy(prompt(4, 500), 40) };
    let (first, then, finished) = read(engine.submit(request.clone()).unwrap());
    let got: Vec<_> = first.into_iter().chain(then).collect();
    let mut ids = request.prompt.clone();
    ids.extend(got[499..].iter().map(|scored| scored.id));
    let want = reference(engine.model(), &ids);
    assert_eq!(got.len(), want.len());
    for (scored, want) in got.iter().zip(want) {
        let error = (f64::from(scored.logprob) - want).abs();
        assert!(error < 1e-4, "{error:e}");
    }
    // 539 tokens lie in 9 pages: heads that forget keep one or two, the last one all; a window of 50 keeps two.
    let dropped = &finished.cache.evicted_pages;
    assert!(dropped[0][..3].iter().all(|pages| *pages >= 6) && dropped[0][3] == 0, "{dropped:?}");
    assert!(dropped[1].iter().all(|pages| *pages == (539 + 1 - 50) / 64), "{dropped:?}");
}
