//! PaTH attention: decoding over pages with eviction, shared prefixes, gates at the start, refused options.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::path::Path;

use fox_model::{
    Cache, DecayTime, ForwardOptions, Model, ModelConfig, PagePolicy, PathConfig, PathConv,
};
use fox_tensor::{Device, Segments, Tape};

const VOCAB: usize = 29;

fn config(mixer: PathConfig) -> ModelConfig {
    let mut config = ModelConfig::path(32, 2, 4);
    config.mixer = Box::new(mixer);
    config.vocab_size = VOCAB;
    config.mlp.intermediate_size = Some(24);
    config
}

fn gated() -> PathConfig {
    PathConfig { kv_heads: 2, qk_norm: true, forget_gate: true, ..PathConfig::published(4) }
}

fn tokens(len: usize) -> Vec<i32> {
    (0..len).map(|t| ((t * t * 7 + t * 3 + 5) % VOCAB) as i32).collect()
}

/// Logits of all tokens in one pass.
fn whole(model: &Model, ids: &[i32]) -> Vec<f64> {
    let (device, segments) = (model.device(), Segments::uniform(1, ids.len()));
    let ids = device.from_i32(ids, [ids.len()]).unwrap();
    let mut tape = Tape::inference(device);
    let out = model.forward(&mut tape, &ids, &segments, None, &ForwardOptions::default()).unwrap();
    model.logits(&mut tape, &out.states).unwrap().value().to_f64().unwrap()
}

fn decode(model: &Model, ids: &[i32], cache: &mut Cache) -> Vec<f64> {
    model.decode(&[ids], cache, &ForwardOptions::default()).unwrap().to_f64().unwrap()
}

fn close(got: &[f64], want: &[f64], tolerance: f64, what: &str) {
    let far = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(far < tolerance, "{what}: {far}");
}

#[test]
fn paged_decoding_matches_with_and_without_eviction() {
    for device in [Device::naive(), fox_cpu::device()] {
        let mut model = Model::init(&config(gated()), 5, &device).unwrap();
        // Heads that forget within a few tokens, so that whole pages go.
        assert!(model.init_decay_times(DecayTime { min: 1.0, max: 2.0 }).unwrap());
        let ids = tokens(330);
        let want = whole(&model, &ids);
        let policy = model.page_policy(Some(-14.0), 512).unwrap();
        for (policy, evicts) in [(PagePolicy::keep_all(), false), (policy, true)] {
            let mut cache = model.new_paged_cache(&policy).unwrap();
            // A prompt in chunks that are not whole blocks, then single tokens.
            decode(&model, &ids[..150], &mut cache);
            decode(&model, &ids[150..257], &mut cache);
            for t in 257..330 {
                let got = decode(&model, &ids[t..=t], &mut cache);
                close(&got, &want[t * VOCAB..][..VOCAB], 2e-4, "token");
            }
            let dropped: usize = cache.pages(0).iter().flatten().map(|(_, dropped)| dropped).sum();
            assert_eq!(dropped > 0, evicts, "{dropped} pages");
        }
    }
}

#[test]
fn forks_share_a_prefix() {
    let device = fox_cpu::device();
    let model = Model::init(&config(gated()), 5, &device).unwrap();
    let policy = PagePolicy::keep_all();
    let (ids, other) = (tokens(150), vec![7; 20]);
    let mut cache = model.new_paged_cache(&policy).unwrap();
    decode(&model, &ids[..100], &mut cache);
    let shared = policy.meter().bytes();
    let mut fork = cache.clone();
    let mut both = Vec::new();
    for n in 0..20 {
        both.push(decode(&model, &ids[100 + n..=100 + n], &mut cache));
        decode(&model, &other[n..=n], &mut fork);
    }
    // Of two pages per head, the fork copied the open one alone.
    assert!(policy.meter().bytes() < 2 * shared, "{} of {shared}", policy.meter().bytes());
    let want = whole(&model, &ids[..120]);
    let branch: Vec<i32> = ids[..100].iter().chain(&other).copied().collect();
    let last = decode(&model, &[3], &mut fork);
    let mut branch_ids = branch;
    branch_ids.push(3);
    close(&last, &whole(&model, &branch_ids)[120 * VOCAB..][..VOCAB], 1e-4, "fork");
    close(both.last().unwrap(), &want[119 * VOCAB..][..VOCAB], 1e-4, "original");
}

#[test]
fn decay_times_hold_after_the_scale() {
    let device = Device::naive();
    let mut model = Model::init(&config(gated()), 5, &device).unwrap();
    model.init_decay_times(DecayTime { min: 2.0, max: 128.0 }).unwrap();
    let id = model.params().find("model.layers.0.attn.g_proj.bias").unwrap();
    let biases = model.params().value(id).to_f64().unwrap();
    for (bias, tokens) in biases.into_iter().zip([2.0, 8.0, 32.0, 128.0]) {
        // Heads of 8: the log gate of a score is the gate's over sqrt(8).
        let log_gate = -(-bias).exp().ln_1p() / 8f64.sqrt();
        assert!((log_gate * tokens + 1.0).abs() < 1e-5, "{log_gate} for {tokens} tokens");
    }
}

#[test]
fn files_keep_every_option() {
    let conv = Some(PathConv { taps: 4, bias: true });
    let mixers = [
        PathConfig { conv, low_rank: false, ..gated() },
        PathConfig { conv: None, log_pruning_tolerance: Some(-10.0), ..gated() },
        PathConfig::published(4),
    ];
    let device = Device::naive();
    for mixer in mixers {
        let model = Model::init(&config(mixer), 7, &device).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let options = fox_model::WriteOptions::for_model(model.config());
        model.save(folder.path(), &options).unwrap();
        let again = Model::from_checkpoint(folder.path(), &device).unwrap();
        assert_eq!(again.config(), model.config());
        for ((_, spec, a), (_, _, b)) in model.params().iter().zip(again.params().iter()) {
            assert_eq!(a.to_f32().unwrap(), b.to_f32().unwrap(), "{}", spec.name);
        }
    }
}

#[test]
fn rejects_conflicting_options() {
    let refused = |fields: &str| {
        let text = format!(
            r#"{{"model_type": "path_attn", "hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 9, {fields}}}"#
        );
        let parsed = ModelConfig::from_json(&text, Path::new("config.json"));
        parsed.and_then(|(config, _)| config.validate("config.json")).unwrap_err().to_string()
    };
    assert_eq!(
        refused(r#""num_heads": 1"#),
        "config.json: `num_heads` gives heads of width 256; PaTH needs a multiple of 8 up to 128"
    );
    assert_eq!(
        refused(r#""num_heads": 64"#),
        "config.json: `num_heads` gives heads of width 4; PaTH needs a multiple of 8 up to 128"
    );
    assert_eq!(
        refused(r#""num_heads": 4, "num_kv_heads": 3"#),
        "config.json: `num_kv_heads` is 3, which does not divide `num_heads` 4"
    );
    assert_eq!(
        refused(r#""num_heads": 4, "log_pruning_tolerance": -10.0"#),
        "config.json: `log_pruning_tolerance` needs `use_forget_gate` true: without forget gates no key loses its \
         weight"
    );
    let conv = refused(r#""num_heads": 4, "use_w_shortconv": false, "conv_bias": true"#);
    assert!(
        conv.contains("`conv_bias`") && conv.contains("needs `use_w_shortconv` true"),
        "{conv}"
    );
}
