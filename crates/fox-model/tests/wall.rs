//! Wall attention: decoding from closed blocks, the start of its gates, and bad options.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::path::Path;

use fox_model::{DecayTime, ForwardOptions, Model, ModelConfig, WallConfig};
use fox_tensor::{Device, Segments, Tape};

const VOCAB: usize = 20;

/// Strong decays: both biases near 0.
fn config(mixer: WallConfig) -> ModelConfig {
    let mut config = ModelConfig::wall(32, 2, 4).with_vocab(VOCAB);
    config.initializer_range = 0.3;
    config.mixer = Box::new(WallConfig { gate_init_bias: 1.0, ..mixer });
    config
}

fn tokens(count: usize, seed: usize) -> Vec<i32> {
    (0..count).map(|t| ((t * 7 + t / 3 * 5 + seed) % VOCAB) as i32).collect()
}

/// Logits after the last token, in one pass.
fn one_pass(model: &Model, ids: &[i32]) -> Vec<f64> {
    let device = model.device();
    let mut tape = Tape::inference(device);
    let input = device.from_i32(ids, [ids.len()]).unwrap();
    let (segments, options) = (Segments::uniform(1, ids.len()), ForwardOptions::default());
    let hidden = model.forward(&mut tape, &input, &segments, None, &options).unwrap();
    let logits = model.logits(&mut tape, &hidden.states).unwrap().value().to_f64().unwrap();
    logits[logits.len() - VOCAB..].to_vec()
}

fn assert_close(got: &[f64], want: &[f64]) {
    let error = fox_base::difference::largest_error(got, want);
    assert!(error <= 1e-9, "{error}");
}

/// Prompts of several blocks, one of them longer than the window, then single tokens.
#[test]
fn decoding_from_closed_blocks_matches_one_pass() {
    let options = ForwardOptions::default();
    let plain = WallConfig::new(4);
    let rich = WallConfig { kv_heads: 2, qk_norm: true, output_gate: true, ..plain.clone() };
    for mixer in [
        plain.clone(),
        WallConfig { scalar_gate: true, ..rich },
        WallConfig { window: Some(70), qkv_bias: true, ..plain },
    ] {
        let model = Model::init(&config(mixer), 5, &Device::naive()).unwrap();
        let (first, second) = (tokens(200, 0), tokens(75, 3));
        let mut cache = model.new_cache(2, 8).unwrap();
        model.decode(&[&first[..130], &second[..3]], &mut cache, &options).unwrap();
        model.decode(&[&first[130..131], &second[3..70]], &mut cache, &options).unwrap();
        model.decode(&[&first[131..195], &[]], &mut cache, &options).unwrap();
        for t in 0..5 {
            let new: [&[i32]; 2] = [&first[195 + t..196 + t], &second[70 + t..71 + t]];
            let logits = model.decode(&new, &mut cache, &options).unwrap().to_f64().unwrap();
            let (a, b) = logits.split_at(VOCAB);
            assert_close(a, &one_pass(&model, &first[..196 + t]));
            assert_close(b, &one_pass(&model, &second[..71 + t]));
        }
    }
}

#[test]
fn spread_start_sets_channels_or_heads() {
    let times = DecayTime { min: 1.0, max: 100.0 };
    let bias = |config: &ModelConfig, name: &str| {
        let mut model = Model::init(config, 0, &Device::naive()).unwrap();
        assert!(model.init_decay_times(times).unwrap());
        let id = model.params().find(&format!("model.layers.1.attn.{name}.bias")).unwrap();
        model.params().value(id).to_f32().unwrap()
    };
    let channels = bias(&ModelConfig::wall(32, 2, 4), "g_proj");
    assert_eq!(channels, times.gate_biases(8).repeat(4));
    let scalar = ModelConfig::wall_scalar(32, 2, 4);
    assert_eq!(bias(&scalar, "gs_proj"), times.gate_biases(4));
    assert_eq!(bias(&scalar, "g_proj"), [8.0; 32]);
}

#[test]
fn rejects_bad_options() {
    let refused = |fields: &str| {
        let text = format!(
            r#"{{"model_type": "wall_transformer", "hidden_size": 64, "num_hidden_layers": 2, {fields}}}"#
        );
        let (config, _) = match ModelConfig::from_json(&text, Path::new("config.json")) {
            Ok(config) => config,
            Err(error) => return error.to_string(),
        };
        config.validate("config.json").unwrap_err().to_string()
    };
    assert_eq!(
        refused(r#""num_heads": 5"#),
        "config.json: `num_heads` is 5, which does not divide `hidden_size` 64"
    );
    assert_eq!(
        refused(r#""num_heads": 16"#),
        "config.json: `num_heads` gives heads of width 4; the width must be a multiple of 8 up to 256"
    );
    assert_eq!(
        refused(r#""num_heads": 4, "num_kv_heads": 3"#),
        "config.json: `num_kv_heads` is 3, which does not divide `num_heads` 4"
    );
    assert_eq!(
        refused(r#""num_heads": 4, "window_size": 0"#),
        "config.json: `window_size` is 0; it must be between 1 and 1099511627776"
    );
    assert!(refused(r#""num_heads": 4, "use_l2warp": true"#).contains("use_l2warp"));
}
