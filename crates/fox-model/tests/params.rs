//! Parameters: which are decayed and trained, and how they start.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use fox_model::{DecayTime, ForgetGate, Model, ModelConfig, ParamSpec};
use fox_tensor::{Device, WeightFormat};

fn small() -> ModelConfig {
    let mut config = ModelConfig::fox_pro(32, 1, 2).with_vocab(400);
    config.tokens.pad = Some(3);
    config
}

fn names(specs: &[ParamSpec], keep: impl Fn(&ParamSpec) -> bool) -> Vec<&str> {
    specs.iter().filter(|spec| keep(spec)).map(|spec| spec.name.as_str()).collect()
}

#[test]
fn weight_decay_applies_to_matrices_only() {
    let specs = small().param_specs();
    assert_eq!(
        names(&specs, |spec| !spec.decay),
        [
            "model.layers.0.attn_norm.weight",
            "model.layers.0.attn.q_norm.weight",
            "model.layers.0.attn.k_norm.weight",
            "model.layers.0.attn.fgate_proj.bias",
            "model.layers.0.attn.output_norm.weight",
            "model.layers.0.mlp_norm.weight",
            "model.norm.weight",
        ]
    );
    assert!(specs.iter().all(|spec| spec.decay == (spec.dims.len() == 2) && spec.trainable));
    assert!(names(&specs, |s| s.decay).contains(&"model.layers.0.attn.k_proj.shift_proj.weight"));
}

#[test]
fn stacked_matrices_are_marked() {
    let mlp = small().mlp_width();
    for config in [small(), ModelConfig::mamba2(64, 1, 4), ModelConfig::hgrn2(64, 1, 2)] {
        for spec in config.param_specs() {
            let (rows, name) = (spec.dims[0], spec.name.as_str());
            let want: &[usize] = match name.rsplit('.').nth(1) {
                Some("gate_proj") if config == small() => &[mlp, mlp],
                Some("gate_proj") => &[rows / 2, rows / 2],
                // Gate, values, keys, queries, time steps.
                Some("in_proj") => &[128, 128, 128, 128, 4],
                Some("embeddings" | "lm_head") => &[],
                _ if name.contains("lower_bounds") || spec.dims.len() != 2 => &[],
                _ => &[rows],
            };
            assert_eq!(spec.matrices, want, "{name} {:?}", spec.dims);
        }
    }
}

#[test]
fn weights_per_head_are_not_packed() {
    let model = Model::init(&small(), 1, &Device::naive()).unwrap();
    let specs = small().param_specs();
    // Two heads: the projections of the forget gate and of the shifts have two rows.
    let in_f32 = ["embeddings", "fgate_proj", "shift_proj"];
    let packed = specs
        .iter()
        .filter(|spec| spec.dims.len() == 2 && !in_f32.iter().any(|name| spec.name.contains(name)));
    let packed: usize = packed.map(ParamSpec::count).sum();
    let bytes = |format: WeightFormat| model.weight_bytes_per_step(format);
    assert_eq!(bytes(WeightFormat::F32) - bytes(WeightFormat::Bf16), 2.0 * packed as f64);
}

#[test]
fn fixed_gates_are_stored_untrained() {
    let mut config = small();
    for (gate, trained) in [
        (ForgetGate::Fixed { decay_time: None }, false),
        (ForgetGate::BiasOnly { decay_time: None }, true),
    ] {
        let mixer = config.mixer.forgetting_mut().unwrap();
        mixer.gate = gate;
        let specs = config.param_specs();
        let bias = specs.iter().find(|s| s.name == "model.layers.0.attn.fgate_bias").unwrap();
        assert_eq!((bias.trainable, bias.decay), (trained, false));
        assert!(specs.iter().filter(|s| s.name != bias.name).all(|s| s.trainable));
    }
}

#[test]
fn init_matches_the_reference_and_the_seed() {
    let device = Device::naive();
    let mut config = small();
    let mixer = config.mixer.forgetting_mut().unwrap();
    mixer.gate = ForgetGate::BiasOnly { decay_time: Some(DecayTime { min: 4.0, max: 16.0 }) };
    let model = Model::init(&config, 11, &device).unwrap();
    let again = Model::init(&config, 11, &device).unwrap();
    let other = Model::init(&config, 12, &device).unwrap();
    for (id, spec, value) in model.params().iter() {
        let values = value.to_f64().unwrap();
        assert_eq!(values, again.params().value(id).to_f64().unwrap(), "{}", spec.name);
        if spec.dims.len() == 2 {
            assert_ne!(values, other.params().value(id).to_f64().unwrap(), "{}", spec.name);
            let square = values.iter().map(|v| v * v).sum::<f64>() / values.len() as f64;
            let tolerance = 4.0 / (values.len() as f64).sqrt();
            assert!((square.sqrt() / 0.02 - 1.0).abs() < tolerance, "{}", spec.name);
        } else if spec.name.ends_with("fgate_bias") {
            for (bias, time) in values.iter().zip([4.0, 16.0]) {
                let log_gate = -(-bias).exp().ln_1p();
                assert!((log_gate * time + 1.0).abs() < 1e-5, "{bias} {time}");
            }
        } else {
            assert!(values.iter().all(|&v| v == 1.0), "{}", spec.name);
        }
    }
    let table = model.params().find("model.embeddings.weight").unwrap();
    let table = model.params().value(table).to_f64().unwrap();
    assert!(table[3 * 32..4 * 32].iter().all(|&v| v == 0.0));
    // A parameter's start does not depend on what else there is.
    config.num_layers = 2;
    let deeper = Model::init(&config, 11, &device).unwrap();
    for (_, spec, value) in model.params().iter() {
        let twin = deeper.params().value(deeper.params().find(&spec.name).unwrap());
        assert_eq!(value.to_f64().unwrap(), twin.to_f64().unwrap(), "{}", spec.name);
    }
}
