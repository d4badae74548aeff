//! Decoding on the f64 oracle, and what only needs to be shown once.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

#[path = "bodies/decode.rs"]
mod bodies;

use bodies::{VOCAB, assert_close, small, step, variants};
use fox_model::{
    AttentionView, Cache, DecayTime, ForgetGate, ForgettingConfig, ForwardOptions, Model,
    ModelConfig, Observer, Pruning,
};
use fox_tensor::{Device, Segments, Tape, tile_counts};

#[test]
fn steps_chunks_and_one_pass_agree() {
    bodies::steps_chunks_and_one_pass_agree(&Device::naive(), 1e-9);
}

#[test]
fn left_padding_has_no_effect() {
    bodies::left_padding_has_no_effect(&Device::naive(), 1e-9);
}

#[test]
fn failed_steps_leave_the_cache_unchanged() {
    bodies::failed_steps_leave_the_cache_unchanged(&Device::naive());
}

#[test]
fn recomputed_blocks_give_the_same_gradients() {
    bodies::recomputed_blocks_give_the_same_gradients(&Device::naive());
}

#[test]
fn recording_tapes_reject_caches() {
    let device = Device::naive();
    let model = Model::init(&variants()[0].1, 3, &device).unwrap();
    let mut cache = model.new_cache(1, 8).unwrap();
    let ids = device.from_i32(&[1, 2], [2]).unwrap();
    let mut tape = Tape::recording(&device);
    let options = ForwardOptions::default();
    let segments = Segments::uniform(1, 2);
    assert!(model.forward(&mut tape, &ids, &segments, Some(&mut cache), &options).is_err());
}

#[test]
fn tied_embeddings_sum_both_gradients() {
    let mut config = variants()[0].1.clone();
    config.tie_word_embeddings = true;
    let device = Device::naive();
    let mut model = Model::init(&config, 9, &device).unwrap();
    assert!(model.params().find("lm_head.weight").is_none());
    let table = model.params().find("model.embeddings.weight").unwrap();
    let (_, grads, _) = step(&model, &ForwardOptions::default());
    let mut values = model.params().value(table).to_f64().unwrap();
    let mean = |model: &Model| {
        let losses = step(model, &ForwardOptions::default()).0;
        losses.iter().sum::<f64>() / losses.len() as f64
    };
    let h = 1e-4;
    for element in [0, 5, 40, 32 * 36 + 3] {
        let mut at = |offset: f64| {
            values[element] += offset;
            let moved = device.from_f64(&values, [VOCAB, 32]).unwrap();
            values[element] -= offset;
            model.params_mut().set(table, moved).unwrap();
            mean(&model)
        };
        let slope = (at(h) - at(-h)) / (2.0 * h);
        let got = grads[table.0][element];
        assert!((slope - got).abs() < 1e-5 * (1.0 + got.abs()), "{element}: {slope} {got}");
    }
}

/// The ablation: all heads forget alike, and what they forget depends on the token.
#[test]
fn shared_gates_are_equal_for_all_heads() {
    let config =
        small(ForgettingConfig { gate: ForgetGate::Shared, ..ForgettingConfig::fox_llama(4) });
    let model = Model::init(&config, 9, &Device::naive()).unwrap();
    let weight = model.params().find("model.layers.1.attn.fgate_proj.weight").unwrap();
    assert_eq!(model.params().value(weight).dims(), [1, 32]);
    let mut cache = model.new_cache(1, 16).unwrap();
    model.decode(&[&bodies::tokens(16, 1)[..]], &mut cache, &ForwardOptions::default()).unwrap();
    let gates = cache.log_gates(1).unwrap().to_f64().unwrap();
    assert!(gates.chunks_exact(4).all(|row| row.iter().all(|gate| *gate == row[0])));
    assert!(gates.chunks_exact(4).any(|row| (row[0] - gates[0]).abs() > 1e-3));
    assert!(gates.iter().all(|gate| *gate < 0.0));
}

/// Keys of the first layer.
#[derive(Default)]
struct Keys(std::cell::RefCell<Vec<f64>>);

impl Observer for Keys {
    fn attention(&self, view: &AttentionView<'_>) -> fox_tensor::Result<()> {
        if view.layer == 0 {
            assert!(view.log_gates.is_none());
            *self.0.borrow_mut() = view.k.to_f64()?;
        }
        Ok(())
    }
}

/// The ablation: a key is multiplied by `sigmoid(w_f . k_j + b_f)` of its head.
#[test]
fn key_scale_multiplies_keys() {
    let mixer = ForgettingConfig { kv_heads: 2, ..ForgettingConfig::fox_llama(4) };
    let device = Device::naive();
    let keys = |gate: ForgetGate| {
        let config = small(ForgettingConfig { gate, ..mixer.clone() });
        let mut model = Model::init(&config, 9, &device).unwrap();
        if gate == ForgetGate::KeyScale {
            for (name, dims) in [("weight", &[16, 1, 1][..]), ("bias", &[2])] {
                let name = format!("model.layers.0.attn.key_scale.{name}");
                let id = model.params().find(&name).unwrap();
                let values: Vec<f32> =
                    (0..dims.iter().product()).map(|i| 0.3 * i as f32 - 1.0).collect();
                model.params_mut().set(id, device.from_f32(&values, dims).unwrap()).unwrap();
            }
        }
        let seen = Keys::default();
        let ids = device.from_i32(&bodies::tokens(9, 1), [9]).unwrap();
        let options = ForwardOptions::default();
        model.observe(&ids, &Segments::uniform(1, 9), &options, &seen).unwrap();
        seen.0.into_inner()
    };
    let (plain, scaled) = (keys(ForgetGate::None), keys(ForgetGate::KeyScale));
    for (n, (k, got)) in plain.chunks(8).zip(scaled.chunks(8)).enumerate() {
        let (head, value) = (n % 2, |i: usize| f64::from(0.3 * i as f32 - 1.0));
        let dot: f64 = k.iter().enumerate().map(|(c, k)| k * value(head * 8 + c)).sum();
        let factor = 1.0 / (1.0 + (-dot - value(head)).exp());
        let want: Vec<f64> = k.iter().map(|k| k * factor).collect();
        assert_close(got, &want, 1e-12, "keys");
    }
}

#[test]
fn stick_breaking_prunes_without_gates() {
    let stick = ForgettingConfig::fox_llama(4).stick_breaking();
    let config = small(ForgettingConfig { gate: ForgetGate::None, ..stick });
    let device = Device::naive();
    let model = Model::init(&config, 9, &device).unwrap();
    let ids = device.from_i32(&bodies::tokens(200, 1), [200]).unwrap();
    let run = |pruning: Pruning| {
        let mut tape = Tape::inference(&device);
        let options = ForwardOptions { pruning, ..ForwardOptions::default() };
        let out =
            model.forward(&mut tape, &ids, &Segments::uniform(1, 200), None, &options).unwrap();
        let visited =
            out.tiles.iter().flat_map(|b| tile_counts(b).unwrap()).map(|n| n[0]).sum::<u64>();
        (out.states.value().to_f64().unwrap(), visited)
    };
    let (exact, all) = run(Pruning::Off);
    let (pruned, fewer) = run(Pruning::Tolerance(-12.0));
    assert!(fewer < all, "{fewer} of {all}");
    assert_close(&pruned, &exact, 1e-3, "states");
}

#[test]
fn pruning_follows_config_override_and_gate() {
    let device = Device::naive();
    let visited = |config: &ModelConfig, pruning: Pruning| {
        let model = Model::init(config, 9, &device).unwrap();
        let (losses, _, tiles) =
            step(&model, &ForwardOptions { pruning, ..ForwardOptions::default() });
        let visited: u64 = tiles.iter().flatten().map(|[visited, _]| visited).sum();
        let all: u64 = tiles.iter().flatten().map(|[_, all]| all).sum();
        (losses, visited, all)
    };
    // A gate that forgets within a fraction of a token leaves little to visit.
    let decay_time = Some(DecayTime { min: 0.01, max: 0.02 });
    let mut config = small(ForgettingConfig {
        gate: ForgetGate::Fixed { decay_time },
        log_pruning_tolerance: Some(-10.0),
        ..ForgettingConfig::fox_pro(4)
    });
    let (exact, off, all) = visited(&config, Pruning::Off);
    assert_eq!(off, all);
    let (pruned, from_config, _) = visited(&config, Pruning::Config);
    assert_close(&pruned, &exact, 1e-9, "pruned losses");
    assert_eq!(from_config, visited(&config, Pruning::Tolerance(-10.0)).1);
    assert!(visited(&config, Pruning::Auto).1 <= all);
    let mixer = config.mixer.forgetting_mut().unwrap();
    mixer.gate = ForgetGate::None;
    assert_eq!(visited(&config, Pruning::Auto).1, visited(&config, Pruning::Off).1);
}

#[test]
fn paged_steps_download_gates_once() {
    let device = Device::naive();
    for layers in [1, 2, 5] {
        let mut config = small(ForgettingConfig::fox_pro(4));
        config.num_layers = layers;
        let model = Model::init(&config, 3, &device).unwrap();
        let policy = model.page_policy(Some(-10.0), 100).unwrap();
        let caches = (0..2).map(|_| model.new_paged_cache(&policy).unwrap()).collect();
        let mut cache = Cache::join(caches).unwrap();
        let steps: [[&[i32]; 2]; 3] = [[&[1, 2, 3], &[4]], [&[5], &[6]], [&[], &[7, 8]]];
        for tokens in &steps {
            let before = device.downloads();
            model.decode(tokens, &mut cache, &ForwardOptions::default()).unwrap();
            assert_eq!(device.downloads() - before, 1, "{layers} layers, {tokens:?}");
        }
    }
}

#[test]
fn paged_and_row_caches_agree() {
    let device = Device::naive();
    for (name, config) in variants() {
        let model = Model::init(&config, 3, &device).unwrap();
        let policy = model.page_policy(None, 100).unwrap();
        let (mut rows, mut pages) =
            (model.new_cache(1, 8).unwrap(), model.new_paged_cache(&policy).unwrap());
        let ids = bodies::tokens(80, 1);
        for step in [&ids[..60], &ids[60..61], &ids[61..63], &ids[63..]] {
            let run = |cache| model.decode(&[step], cache, &ForwardOptions::default()).unwrap();
            let (want, got) = (run(&mut rows).to_f64().unwrap(), run(&mut pages).to_f64().unwrap());
            assert_close(&got, &want, 1e-5, name);
        }
    }
}
