//! What is particular to the recurrent families and to gates that do not look at the input.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::path::{Path, PathBuf};

use fox_model::{
    CheckpointLayout, DecayTime, Error, ForgetGate, ForgettingConfig, ForwardOptions, Hgrn2Config,
    Init, LowerBounds, Model, ModelConfig, ModelType, WriteOptions,
};
use fox_tensor::cases::Rng;
use fox_tensor::{AttentionSpec, Device, Segments, Tape, Var};

fn dump(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name)
}

fn kind(name: &str) -> ModelType {
    ModelType::by_name(name).unwrap()
}

/// Logits of some tokens.
fn logits(model: &Model) -> Vec<f64> {
    let ids: Vec<i32> = (0..90).map(|t| (t * t * 5 + t) % 61).collect();
    let ids = model.device().from_i32(&ids, [90]).unwrap();
    let mut tape = Tape::inference(model.device());
    let segments = Segments::packed(&[0, 70, 90]).unwrap();
    let options = ForwardOptions::default();
    let hidden = model.forward(&mut tape, &ids, &segments, None, &options).unwrap();
    model.logits(&mut tape, &hidden.states).unwrap().value().to_f64().unwrap()
}

#[test]
fn both_layouts_hold_the_same_model() {
    let device = Device::naive();
    let folder = tempfile::tempdir().unwrap();
    for (name, layouts) in [
        ("delta_net", ["delta_net-project_fox", "delta_net"]),
        ("mamba2", ["mamba2-project_fox", "mamba2"]),
        ("hgrn2", ["hgrn2", "hgrn2"]),
    ] {
        let model = Model::from_checkpoint(&dump(name), &device).unwrap();
        let want = logits(&model);
        for (n, model_type) in layouts.map(kind).into_iter().enumerate() {
            let to = folder.path().join(format!("{name} {n}"));
            let options = WriteOptions { model_type, ..WriteOptions::for_model(model.config()) };
            model.save(&to, &options).unwrap();
            let again = Model::from_checkpoint(&to, &device).unwrap();
            assert_eq!(again.config().mixer, model.config().mixer, "{name}");
            assert_eq!(logits(&again), want, "{name} as {}", model_type.as_str());
        }
    }
    // The references read it only as a bare literal.
    let text = std::fs::read_to_string(folder.path().join("mamba2 0/config.json")).unwrap();
    assert!(text.contains("Infinity") && !text.contains("\"Infinity\""), "{text}");
}

#[test]
fn formats_name_what_they_lack() {
    let hgrn2 = Model::from_checkpoint(&dump("hgrn2"), &Device::naive()).unwrap();
    let config = hgrn2.config();
    assert_eq!(config.default_model_type(CheckpointLayout::OFFICIAL), kind("hgrn2-project_fox"));
    assert_eq!(config.storage_type(), kind("hgrn2"));
    let error = config.to_json(kind("hgrn2-project_fox")).unwrap_err();
    assert!(matches!(error, Error::NotExpressible { .. }));
    assert!(error.to_string().contains("lower bounds that have an effect"), "{error}");
    let error = config.to_json(kind("forgetting_transformer-project_fox")).unwrap_err();
    assert!(error.to_string().contains("HGRN2"), "{error}");
    let error = ModelConfig::fox_pro(64, 2, 2).to_json(kind("mamba2")).unwrap_err();
    assert!(error.to_string().contains("softmax attention"), "{error}");
}

#[test]
fn delta_net_reads_its_output_gate() {
    for gated in [false, true] {
        let text = format!(
            r#"{{"model_type": "delta_net", "hidden_size": 64, "num_heads": 2, "use_gate": {gated}}}"#
        );
        let (config, _) = ModelConfig::from_json(&text, Path::new("config.json")).unwrap();
        let specs = config.param_specs();
        assert_eq!(specs.iter().any(|spec| spec.name.contains("attn.g_proj")), gated);
    }
}

#[test]
fn sizes_of_hgrn2_follow_its_heads() {
    let mut config = ModelConfig::hgrn2(32, 1, 4);
    let (heads, expand_ratio) = (4, 16);
    let lower_bounds = LowerBounds::None;
    config.mixer =
        Box::new(Hgrn2Config { heads, expand_ratio, lower_bounds, output_norm_eps: 1e-5 });
    assert_eq!((config.heads(), config.mixer.key_heads(&config)), ((4, 16), 4));
    // Values of 8 per head, chunks of 2 tokens: products of queries and keys, of weights and values, with states.
    let want = 4 * (2 * 4 * 16) + 3 * (2 * 4 * 8) + 6 * (2 * 4 * 16 * 8);
    assert_eq!(config.mixer.train_flops(&config, 2), f64::from(want));
}

/// With a large first row all bounds of the table are 0, which is what the official layer does.
#[test]
fn official_hgrn2_has_no_lower_bounds() {
    let device = Device::naive();
    let config = |lower_bounds: LowerBounds| {
        let mut config = ModelConfig::hgrn2(32, 3, 2).with_vocab(61);
        let (heads, expand_ratio) = (2, 16);
        config.mixer =
            Box::new(Hgrn2Config { heads, expand_ratio, lower_bounds, output_norm_eps: 1e-5 });
        config
    };
    let official = Model::init(&config(LowerBounds::Stored), 4, &device).unwrap();
    let table = official.params().find("model.lower_bounds").unwrap();
    assert!(!official.params().spec(table).trainable);
    let mut bounded = Model::init(&config(LowerBounds::Used), 4, &device).unwrap();
    let differs = logits(&official).iter().zip(logits(&bounded)).any(|(a, b)| (a - b).abs() > 1e-4);
    assert!(differs, "zeros in the table are bounds of a third and two thirds");
    let mut values = vec![0.0; 3 * 32];
    values[..32].fill(1000.0);
    bounded.params_mut().set(table, device.from_f64(&values, [3, 32]).unwrap()).unwrap();
    for (a, b) in logits(&official).iter().zip(logits(&bounded)) {
        assert!((a - b).abs() < 1e-12, "{a} {b}");
    }
}

#[test]
fn decay_init_matches_the_reference() {
    let undecayed = |config: &ModelConfig| -> Vec<String> {
        let specs = config.param_specs();
        let names = specs.iter().filter(|s| !s.decay && s.name.contains(".0."));
        names.map(|s| s.name.rsplit(".0.").next().unwrap().to_string()).collect()
    };
    let mamba2 = ModelConfig::mamba2(64, 2, 4);
    assert_eq!(
        undecayed(&mamba2),
        [
            "norm.weight",
            "mixer.dt_bias",
            "mixer.A_log",
            "mixer.D",
            "mixer.conv1d.bias",
            "mixer.norm.weight"
        ]
    );
    let gated = ModelConfig::gated_delta_net(64, 2, 2);
    let names =
        ["attn_norm.weight", "attn.A_log", "attn.dt_bias", "attn.o_norm.weight", "mlp_norm.weight"];
    assert_eq!(undecayed(&gated), names);
    let find = |config: &ModelConfig, name: &str| {
        config.param_specs().into_iter().find(|s| s.name == name).unwrap().init
    };
    let bound = 2f64.powf(-2.5) * (6.0 / 128f64).sqrt();
    assert_eq!(
        find(&ModelConfig::hgrn2(64, 2, 2), "model.layers.1.attn.o_proj.weight"),
        Init::Uniform { bound }
    );
    let down = find(&ModelConfig::delta_net(64, 2, 2), "model.layers.1.mlp.down_proj.weight");
    assert_eq!(down, Init::Normal { std: 0.01, zero_row: None });
    let a_log = find(&mamba2, "backbone.layers.0.mixer.A_log");
    assert_eq!(a_log, Init::Given((1..=4).map(|h| (h as f32).ln()).collect()));
}

/// Attention with a fixed gate of decay time `T` is ALiBi with slope `1 / T`, and the learned one
/// starts there.
#[test]
fn fixed_gates_are_alibi() {
    let (device, heads, d, len) = (Device::naive(), 4, 8, 40);
    let time = DecayTime { min: 2.0, max: 54.0 };
    let mut rng = Rng::new(3);
    let mut draw = || rng.normals(len * heads * d);
    let (q, k, v) = (draw(), draw(), draw());
    for gate in [
        ForgetGate::Fixed { decay_time: Some(time) },
        ForgetGate::BiasOnly { decay_time: Some(time) },
    ] {
        let mut config = ModelConfig::fox_llama(heads * d, 1, heads).with_vocab(8);
        config.mixer = Box::new(ForgettingConfig { gate, ..ForgettingConfig::fox_llama(heads) });
        let model = Model::init(&config, 0, &device).unwrap();
        let id = model.params().find("model.layers.0.attn.fgate_bias").unwrap();
        let bias = Var::constant(model.params().value(id).clone());
        let mut tape = Tape::inference(&device);
        let var = |x: &[f64]| Var::constant(device.from_f64(x, [len, heads * d]).unwrap());
        let gates = tape.log_gate(None, Some(&bias), len).unwrap();
        let spec = AttentionSpec::causal(heads, d, Segments::uniform(1, len));
        let (o, _) = tape.attention(&var(&q), &var(&k), &var(&v), Some(&gates), &spec).unwrap();
        let o = o.value().to_f64().unwrap();
        for h in 0..heads {
            let slope = 1.0 / (2.0 * 3f64.powi(h as i32));
            for i in 0..len {
                let row = |x: &[f64], t: usize| x[(t * heads + h) * d..][..d].to_vec();
                let weight = |j: usize| {
                    let dot: f64 = row(&q, i).iter().zip(row(&k, j)).map(|(a, b)| a * b).sum();
                    (dot / (d as f64).sqrt() - slope * (i - j) as f64).exp()
                };
                let sum: f64 = (0..=i).map(weight).sum();
                for c in 0..d {
                    let want: f64 = (0..=i).map(|j| weight(j) * row(&v, j)[c]).sum::<f64>() / sum;
                    let got = o[(i * heads + h) * d + c];
                    // The bias is stored in f32.
                    assert!((got - want).abs() < 2e-5, "head {h}, token {i}: {got} {want}");
                }
            }
        }
    }
}
