//! Eviction at its edge: a model whose logits reach their bounds, decoded with and without it.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use fox_model::{ForgettingConfig, ForwardOptions, Model, ModelConfig, PagePolicy, QkNorm};
use fox_tensor::Device;

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const D: usize = 8;
const WIDTH: usize = HEADS * D;
const VOCAB: usize = 3 + HEADS;

/// A token that remembers all, one that forgets all that is older, and one that asks.
const OLD: i32 = 0;
const FORGETS: i32 = 1;
const ASKS: i32 = 2;

/// Old tokens: whole pages.
const OLD_KEYS: usize = 15 * 64;
const KEYS: usize = OLD_KEYS + 2;
const LOG_TOLERANCE: f32 = -3.0;

/// Norm weights of the query heads and of the key heads, all negative in the model.
const Q: [f64; HEADS] = [0.5, 1.0, 0.75, 0.25];
const K: [f64; KV_HEADS] = [1.0, 3.0];

/// `|q . k| / sqrt(d)` of head `h`, for all pairs.
fn bound(h: usize) -> f64 {
    Q[h] * K[h / (HEADS / KV_HEADS)] * (D as f64).sqrt()
}

/// The decay that the rule asks for in head `h`.
fn asked_for(h: usize) -> f64 {
    2.0 * bound(h) + (KEYS as f64).ln() - f64::from(LOG_TOLERANCE)
}

/// A model of one layer. Every query meets old keys at `+U` and all others at `-U`. Old keys have values of
/// ones, all others of zeros, so that the output of a head is the fraction of the old keys. The forgetting
/// token decays head `h` by `decay[h]`.
fn model(decay: [f64; HEADS], device: &Device) -> Model {
    let mut config = ModelConfig::fox_llama(WIDTH, 1, HEADS).with_vocab(VOCAB);
    config.mixer = Box::new(ForgettingConfig {
        kv_heads: KV_HEADS,
        qk_norm: Some(QkNorm::PerHead),
        ..ForgettingConfig::fox_llama(HEADS)
    });
    let mut model = Model::init(&config, 1, device).unwrap();
    let mut set = |name: &str, cols: usize, value: &dyn Fn(usize, usize) -> f64| {
        let id = model.params().find(name).unwrap_or_else(|| panic!("no {name}"));
        let shape = model.params().value(id).shape();
        let data: Vec<f64> = (0..shape.len()).map(|i| value(i / cols, i % cols)).collect();
        model.params_mut().set(id, device.from_f64(&data, shape).unwrap()).unwrap();
    };
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    // Token `t` is column `t` of the stream, where it is `sqrt(WIDTH)` behind the norm.
    let one = |at: bool, x: f64| if at { x } else { 0.0 };
    set("model.embeddings.weight", WIDTH, &|t, c| one(t == c, 10.0));
    set("lm_head.weight", WIDTH, &|t, c| one(t == c, 1.0));
    set(&layer("mlp.down_proj"), 1, &|_, _| 0.0);
    set(&layer("attn.q_proj"), WIDTH, &|_, c| one(c < 3, -1.0));
    set(&layer("attn.k_proj"), WIDTH, &|_, c| [-1.0, 1.0, 1.0].get(c).copied().unwrap_or(0.0));
    set(&layer("attn.v_proj"), WIDTH, &|_, c| one(c == 0, 1.0 / (WIDTH as f64).sqrt()));
    set(&layer("attn.q_norm"), D, &|h, _| -Q[h]);
    set(&layer("attn.k_norm"), D, &|h, _| -K[h]);
    // Head `h` to column `3 + h`, by its first element.
    set(&layer("attn.o_proj"), WIDTH, &|row, c| one(c % D == 0 && row == 3 + c / D, 1.0));
    // A logit of 40 is a gate of 1, one of -x a log gate of -x.
    set("model.layers.0.attn.fgate_proj.bias", 1, &|_, _| 40.0);
    let step = |h: usize| one(decay[h] > 0.0, -(40.0 + decay[h]) / (WIDTH as f64).sqrt());
    set(&layer("attn.fgate_proj"), WIDTH, &|h, c| one(c == FORGETS as usize, step(h)));
    model
}

/// Per head, the attention mass of the old keys for the asking token, with this policy.
fn fractions(model: &Model, policy: &PagePolicy) -> Vec<f64> {
    let mut cache = model.new_paged_cache(policy).unwrap();
    let mut prompt = vec![OLD; OLD_KEYS];
    prompt.push(FORGETS);
    let options = ForwardOptions::default();
    model.decode(&[&prompt], &mut cache, &options).unwrap();
    let logits = model.decode(&[&[ASKS]], &mut cache, &options).unwrap().to_f64().unwrap();
    // The stream is 10 in the column of the token; the last norm scales all columns alike.
    (0..HEADS).map(|h| 10.0 * logits[3 + h] / logits[ASKS as usize]).collect()
}

/// With nothing dropped and with eviction.
fn with_and_without(decay: [f64; HEADS], device: &Device) -> [Vec<f64>; 2] {
    let model = model(decay, device);
    let policy = model.page_policy(Some(LOG_TOLERANCE), KEYS).unwrap();
    [fractions(&model, &PagePolicy::keep_all()), fractions(&model, &policy)]
}

fn devices() -> [Device; 2] {
    [Device::naive(), fox_cpu::device()]
}

#[test]
fn eviction_bound_is_tight() {
    let allowed = f64::from(LOG_TOLERANCE).exp();
    for device in devices() {
        let run =
            |beyond: f64| with_and_without(std::array::from_fn(|h| asked_for(h) + beyond), &device);
        // The forgetting and the asking token have the other half.
        let [full, evicted] = run(0.05);
        for (full, evicted) in full.iter().zip(&evicted) {
            assert!(evicted.abs() < 1e-6, "the pages are still there: {evicted}");
            assert!(*full > 0.44 * allowed && *full <= allowed, "{full} {allowed}");
        }
        let [full, evicted] = run(-0.95);
        for (full, evicted) in full.iter().zip(&evicted) {
            assert!(*full > 1.15 * allowed, "dropping it would break no promise: {full}");
            assert!((full - evicted).abs() < 1e-5, "{full} {evicted}");
        }
    }
}

#[test]
fn group_keeps_pages_for_its_longest_head() {
    for device in devices() {
        for remembers in 0..HEADS {
            let decay = std::array::from_fn(|h| match h == remembers {
                true => 0.0,
                false => asked_for(h) + 0.05,
            });
            let [full, evicted] = with_and_without(decay, &device);
            assert!(full[remembers] > 0.9, "{full:?}");
            for h in 0..HEADS {
                let kept = h / (HEADS / KV_HEADS) == remembers / (HEADS / KV_HEADS);
                let want = if kept { full[h] } else { 0.0 };
                assert!((evicted[h] - want).abs() < 1e-5, "{remembers}: {full:?} {evicted:?}");
            }
        }
    }
}
