//! Hybrids: patterns, what they make of the layers, and patterns that are refused.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::path::Path;

use fox_model::{MemoryEstimate, Model, ModelConfig, ModelType, WriteOptions};
use fox_tensor::Device;

fn parse(mixers: &str) -> fox_model::Result<ModelConfig> {
    let text = format!(
        r#"{{"model_type": "fox_hybrid", "hidden_size": 64, "num_hidden_layers": 6, "num_heads": 4,
            "vocab_size": 31, "intermediate_size": 48, "mixers": {mixers}}}"#
    );
    Ok(ModelConfig::from_json(&text, Path::new("config.json"))?.0)
}

fn names(config: &ModelConfig) -> Vec<&'static str> {
    (0..config.num_layers).map(|layer| config.mixer_of(layer).name()).collect()
}

#[test]
fn patterns_repeat_and_may_be_truncated() {
    let config = parse(r#"["fox", "window:16", "gated-delta-net", "mamba2"]"#).unwrap();
    let want = ["FoX", "Transformer", "Gated DeltaNet", "Mamba-2", "FoX", "Transformer"];
    assert_eq!(names(&config), want);
    // Those of its attention.
    assert_eq!((config.heads(), config.mixer.key_heads(&config)), ((4, 16), 4));
    let window = config.mixer_of(5).forgetting().unwrap();
    assert_eq!((window.window, window.rope.map(|rope| rope.base)), (Some(16), Some(500_000.0)));
    let fox = config.mixer_of(4).forgetting().unwrap();
    assert_eq!((fox.window, fox.rope), (None, None));
}

#[test]
fn rejects_invalid_patterns() {
    let refused = |mixers: &str| parse(mixers).unwrap_err().to_string();
    assert_eq!(
        refused(r#"["fox", "window"]"#),
        "config.json: `mixers` names `window`, which is not a mixer; the mixers are fox, attention, window:N, \
         path, path-fox, gated-delta-net, kda, wall, mamba2, mamba1"
    );
    assert_eq!(
        refused(r#"["fox", "fox", "fox", "fox", "fox", "fox", "mamba2"]"#),
        "config.json: `mixers` names 7 layers; it must name between 1 and the model's 6"
    );
    assert_eq!(
        refused("[]"),
        "config.json: `mixers` names 0 layers; it must name between 1 and the model's 6"
    );
    assert_eq!(refused("\"fox\""), "config.json: `mixers` must be a list of words, not \"fox\"");
    assert_eq!(
        refused(r#"["window:0"]"#),
        "config.json: `window_size` is 0; it must be between 1 and 1099511627776"
    );
}

#[test]
fn rope_base_reaches_all_layers() {
    let text = r#"{"model_type": "fox_hybrid", "hidden_size": 64, "num_hidden_layers": 3, "num_heads": 4,
        "use_rope": true, "rope_base": 1234.0, "mixers": ["window:16", "attention", "fox"]}"#;
    let (config, _) = ModelConfig::from_json(text, Path::new("config.json")).unwrap();
    let samba = r#"{"model_type": "samba-project_fox", "hidden_size": 64, "num_hidden_layers": 2,
        "attn": {"num_heads": 4}, "rope_base": 1234.0}"#;
    let (samba, _) = ModelConfig::from_json(samba, Path::new("config.json")).unwrap();
    let base = |config: &ModelConfig, layer: usize| {
        config.mixer_of(layer).forgetting().unwrap().rope.unwrap().base
    };
    let found = [base(&config, 0), base(&config, 1), base(&config, 2), base(&samba, 1)];
    assert_eq!(found, [1234.0; 4]);
}

/// At this width the two ratios, 3 after Mamba-1 and 4 after attention, do not round to the same width.
#[test]
fn mlp_ratios_belong_to_their_layers() {
    let config = ModelConfig::samba(768, 4, 12);
    let widths: Vec<usize> = (0..4).map(|layer| config.mlp_width_of(layer)).collect();
    assert_eq!(widths, [1536, 2048, 1536, 2048]);
    let json = config.to_json(ModelType::by_name("samba-project_fox").unwrap()).unwrap();
    assert_eq!((&json["mamba_hidden_ratio"], &json["attn_hidden_ratio"]), (&3.into(), &4.into()));
    let (again, _) = ModelConfig::from_json(&json.to_string(), Path::new("config.json")).unwrap();
    assert_eq!(again, config);
}

#[test]
fn hybrids_round_trip_through_files() {
    let device = Device::naive();
    let folder = tempfile::tempdir().unwrap();
    for (i, mixers) in [
        r#"["fox", "window:16", "gated-delta-net"]"#,
        r#"["mamba1", "attention", "mamba2"]"#,
        r#"["path", "path-fox", "fox"]"#,
    ]
    .into_iter()
    .enumerate()
    {
        let model = Model::init(&parse(mixers).unwrap(), 7, &device).unwrap();
        let options = WriteOptions::for_model(model.config());
        assert_eq!(options.model_type, ModelType::by_name("fox_hybrid").unwrap());
        let dir = folder.path().join(i.to_string());
        model.save(&dir, &options).unwrap();
        let again = Model::from_checkpoint(&dir, &device).unwrap();
        assert_eq!(again.config(), model.config());
        for ((_, spec, a), (_, _, b)) in model.params().iter().zip(again.params().iter()) {
            assert_eq!(a.to_f32().unwrap(), b.to_f32().unwrap(), "{}", spec.name);
        }
    }
}

/// What planners say of a hybrid is the sum of what they say of its layers.
#[test]
fn estimates_sum_over_layers() {
    let model = |mixers: &str| parse(mixers).unwrap();
    let (fox, delta) = (model(r#"["fox"]"#), model(r#"["gated-delta-net"]"#));
    let both = model(r#"["fox", "gated-delta-net"]"#);
    let (a, b) = (fox.train_flops_per_token(512), delta.train_flops_per_token(512));
    assert_eq!(both.train_flops_per_token(512), (a + b) / 2.0);
    let cache = |config: &ModelConfig| MemoryEstimate::new(config, 2, 512).unwrap().cache;
    assert_eq!(cache(&both), (cache(&fox) + cache(&delta)) / 2.0);
    let kept = |config: &ModelConfig| MemoryEstimate::new(config, 2, 512).unwrap().activations;
    assert_eq!(kept(&both), (kept(&fox) + kept(&delta)) / 2.0);
}
