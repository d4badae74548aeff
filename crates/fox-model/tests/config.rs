//! Configurations: published sizes, reading, writing, and every kind of bad value.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::path::Path;

use fox_model::{
    Architecture, CheckpointLayout, DecayTime, Error, ForgetGate, ForgettingConfig, ModelConfig,
    ModelType, Preset, QkNorm,
};
use fox_tensor::{Activation, AttentionWeights, Mask, Rope, RopeScaling};
use proptest::prelude::*;

fn parse(text: &str) -> fox_model::Result<(ModelConfig, ModelType)> {
    ModelConfig::from_json(text, Path::new("some/config.json"))
}

/// Hugging Face's formats have the width of the MLP outright.
fn outright_width(again: &mut ModelConfig, config: &ModelConfig, kind: ModelType) {
    if kind.layout() == CheckpointLayout::HUGGING_FACE {
        assert_eq!(again.mlp_width(), config.mlp_width());
        again.mlp = config.mlp.clone();
    }
}

/// The formats of attention.
const FOX: &str = "forgetting_transformer-project_fox";
const TRANSFORMER: &str = "transformer-project_fox";
const FLA_FOX: &str = "forgetting_transformer";
const FLA_TRANSFORMER: &str = "transformer";
const NATIVE: &str = "fox";

fn kind(name: &str) -> ModelType {
    ModelType::by_name(name).unwrap()
}

fn mixer(config: &ModelConfig) -> &ForgettingConfig {
    config.mixer.forgetting().unwrap()
}

#[test]
fn published_parameter_totals() {
    for (name, total, width) in [
        ("fox-llama-125m", 162_259_344, 2048),
        ("fox-llama-360m", 411_651_456, 2816),
        ("fox-llama-760m", 834_827_328, 4096),
        ("fox-pro-125m", 162_508_176, 1792),
        ("fox-pro-360m", 418_803_072, 2560),
        ("fox-pro-760m", 836_707_392, 3584),
        ("transformer-llama-125m", 162_148_608, 2048),
        ("transformer-llama-360m", 411_257_856, 2816),
        ("transformer-llama-760m", 833_942_016, 4096),
        ("transformer-pro-125m", 162_397_440, 1792),
        ("transformer-pro-360m", 418_409_472, 2560),
        ("transformer_PRO_760M", 834_937_344, 3584),
        ("delta-net-125m", 162_316_032, 2048),
        ("delta-net-360m", 411_752_448, 2816),
        ("delta-net-760m", 834_829_824, 4096),
        ("hgrn2-125m", 162_167_040, 2048),
        ("hgrn2-360m", 411_307_008, 2816),
        ("hgrn2-760m", 834_015_744, 4096),
        ("mamba2-125m", 167_563_200, 0),
        ("mamba2-360m", 419_778_048, 0),
        ("mamba2-760m", 857_308_416, 0),
    ] {
        let config = Preset::by_name(name).unwrap().config();
        config.validate(name).unwrap();
        let count: usize = config.param_specs().iter().map(|spec| spec.count()).sum();
        assert_eq!(count, total, "{name}");
        assert_eq!(config.mlp_width(), width, "{name}");
    }
    assert!(Preset::by_name("fox-pro-1t").is_none());
}

/// Found by fuzzing: fields that one format ignores, and defaults given explicitly.
#[test]
fn fields_without_effect_survive_a_round_trip() {
    for text in [
        r#"{"model_type": "llama", "hidden_ratio": 3, "intermediate_size": 512}"#,
        r#"{"model_type": "llama", "head_dim": 64, "intermediate_size": 512}"#,
        r#"{"model_type": "qwen3", "head_dim": 64, "intermediate_size": 512}"#,
        r#"{"model_type": "qwen2", "head_dim": 128, "intermediate_size": 512}"#,
        r#"{"model_type": "fox", "head_dim": 64, "intermediate_size": 512, "hidden_ratio": 3}"#,
        r#"{"model_type": "samba-project_fox", "hidden_ratio": 3}"#,
        r#"{"model_type": "samba-project_fox", "intermediate_size": 4096}"#,
        r#"{"model_type": "mamba2", "hidden_ratio": 3, "intermediate_size": 512}"#,
        r#"{"model_type": "fox", "eos_token_id": [5, 7, 9]}"#,
        r#"{"model_type": "fox", "eos_token_id": null}"#,
    ] {
        let (config, kind) = parse(text).unwrap();
        let written = config.to_json(kind).unwrap().to_string();
        assert_eq!(parse(&written).unwrap(), (config, kind), "{text}\n{written}");
    }
    let error =
        parse(r#"{"model_type": "samba-project_fox", "intermediate_size": 5}"#).unwrap_err();
    assert!(error.to_string().contains("must be `expand` times `hidden_size`, 4096"), "{error}");
}

#[test]
fn defaults_match_the_references() {
    let (config, kind) = parse(r#"{"model_type": "forgetting_transformer-project_fox"}"#).unwrap();
    assert_eq!(kind.as_str(), FOX);
    assert_eq!((config.vocab_size, config.hidden_size, config.num_layers), (32000, 2048, 24));
    let tokens = &config.tokens;
    assert_eq!((tokens.bos, tokens.eos.as_slice(), tokens.pad), (Some(1), &[2][..], None));
    assert_eq!(mixer(&config), &ForgettingConfig::fox_llama(32));
    assert_eq!(config.mlp_width(), 5632);
    let (config, _) = parse(r#"{"model_type": "transformer-project_fox"}"#).unwrap();
    assert_eq!(mixer(&config), &ForgettingConfig::fox_llama(32).without_forgetting());
    let (config, _) = parse(r#"{"model_type": "transformer", "qk_norm": true}"#).unwrap();
    assert_eq!(mixer(&config).rope, Some(Rope::new(10_000.0)));
    assert_eq!(mixer(&config).qk_norm, Some(QkNorm::Shared));
}

#[test]
fn bare_literals_are_numbers() {
    let text = r#"{"model_type": "fox", "x": [Infinity, -Infinity, NaN], "y": "Infinity NaN"}"#;
    parse(text).unwrap();
    let error = parse(r#"{"model_type": "fox", "norm_eps": Infinity}"#).unwrap_err().to_string();
    assert_eq!(error, "some/config.json: `norm_eps` is inf; it must be above 0 and at most 1");
    assert!(parse(r#"{"model_type": "fox", "norm_eps": NaN}"#).is_err());
}

#[test]
fn bad_values_name_field_and_file() {
    for (kind, fields, want) in [
        ("fox", r#""vocab_size": 0"#, "`vocab_size` is 0; it must be between 1 and 268435456"),
        ("fox", r#""vocab_size": -3"#, "`vocab_size` must be a whole number, not -3"),
        ("fox", r#""vocab_size": "many""#, "`vocab_size` must be a whole number, not \"many\""),
        ("fox", r#""hidden_size": null"#, "`hidden_size` must be a whole number, not null"),
        ("fox", r#""hidden_size": 18446744073709551615"#, "between 1 and 1048576"),
        ("fox", r#""num_hidden_layers": 4000000000"#, "between 1 and 10000"),
        ("fox", r#""num_heads": 0"#, "`num_heads` is 0"),
        ("fox", r#""num_heads": 31"#, "does not divide `hidden_size` 2048"),
        ("fox", r#""hidden_size": 40, "num_heads": 2"#, "heads of width 20"),
        ("fox", r#""hidden_size": 2048, "num_heads": 2"#, "heads of width 1024"),
        ("fox", r#""num_kv_heads": 5"#, "does not divide `num_heads` 32"),
        ("fox", r#""window_size": 0"#, "`window_size` is 0"),
        ("fox", r#""intermediate_size": 99999999"#, "`intermediate_size` is 99999999"),
        ("fox", r#""hidden_ratio": -1"#, "`hidden_ratio` is -1"),
        ("fox", r#""norm_eps": 0"#, "`norm_eps` is 0"),
        ("fox", r#""pad_token_id": 32000"#, "the vocabulary has 32000 entries"),
        ("fox", r#""tie_word_embeddings": 1"#, "must be true or false, not 1"),
        (
            "fox",
            r#""fgate_type": "half""#,
            r#"must be one of "full", "shared", "bias_only", "fixed", "key_scale", "none", not "half""#,
        ),
        ("fox", r#""hidden_act": "gelu""#, r#"one of "swish", "silu", "sigmoid""#),
        ("fox", r#""use_rope": true, "rope_base": 0"#, "`rope_base` is 0"),
        ("fox", r#""log_pruning_tolerance": 1.5"#, "so it is negative"),
        (
            "fox",
            r#""use_output_gate": true, "use_output_norm": true, "ogate_act": "silu""#,
            "`ogate_act` must be \"sigmoid\"",
        ),
        ("fox", r#""fgate_bias_init": true"#, "needs `decay_time_min` and `decay_time_max`"),
        (
            "fox",
            r#""fgate_bias_init": true, "decay_time_min": 1, "decay_time_max": 2"#,
            "needs `fgate_type`",
        ),
        (
            "fox",
            r#""fgate_type": "fixed", "fgate_bias_init": true, "decay_time_min": 9, "decay_time_max": 2"#,
            "above `decay_time_max` 2",
        ),
        ("forgetting_transformer-project_fox", r#""num_kv_heads": 4"#, "equal to `num_heads` (32)"),
        ("transformer-project_fox", r#""qk_norm": true"#, "must be false"),
        ("forgetting_transformer", r#""attnres_block_size": 4"#, "must be null"),
        ("forgetting_transformer", r#""hidden_act": "sigmoid""#, r#"one of "swish", "silu""#),
    ] {
        let text = format!(r#"{{"model_type": "{kind}", {fields}}}"#);
        let error = parse(&text).expect_err(&text).to_string();
        assert!(error.starts_with("some/config.json: "), "{error}");
        assert!(error.contains(want), "{error}\n  should contain {want}");
        assert!(!error.contains('\n'), "{error}");
    }
    for (text, want) in [
        ("{}", "the field `model_type` is missing"),
        (r#"{"model_type": "gpt2"}"#, "unknown model_type `gpt2`; supported are"),
        (r#"{"model_type": "rwkv-project_fox"}"#, "unknown model_type `rwkv-project_fox`"),
        ("[]", "a configuration is an object"),
        ("{\"a\": ", "is not valid JSON"),
    ] {
        let error = parse(text).expect_err(text).to_string();
        assert!(error.contains(want), "{error}");
    }
}

#[test]
fn names_options_that_a_format_lacks() {
    let pro = ModelConfig::fox_pro(64, 2, 2);
    assert_eq!(
        pro.to_json(kind(FLA_FOX)).unwrap_err().to_string(),
        "model_type `forgetting_transformer` cannot express use_k_shift, use_v_shift, \
         use_output_norm"
    );
    let transformer = ModelConfig::transformer_pro(64, 2, 2);
    assert_eq!(transformer.default_model_type(CheckpointLayout::FLA), kind(FLA_TRANSFORMER));
    let error = transformer.to_json(kind(FLA_TRANSFORMER)).unwrap_err().to_string();
    assert!(error.contains("qk_norm with weights per head, use_output_gate"), "{error}");
    assert_eq!(transformer.storage_type(), kind(FOX));
    assert_eq!(ModelConfig::transformer_llama(64, 2, 2).storage_type(), kind(TRANSFORMER));
    let mut grouped = ModelConfig::fox_pro(64, 2, 4);
    let mixer = grouped.mixer.forgetting_mut().unwrap();
    mixer.kv_heads = 2;
    assert_eq!(grouped.storage_type(), kind(NATIVE));
    let error = grouped.to_json(kind(FOX)).unwrap_err().to_string();
    assert!(error.ends_with("cannot express num_kv_heads below num_heads"), "{error}");
    let stick = ModelConfig::stick_breaking(64, 2, 4);
    assert_eq!(stick.storage_type(), kind(NATIVE));
    let encoder = ModelConfig::fox_encoder(64, 2, 4);
    assert_eq!(encoder.storage_type(), kind("fox_encoder"));
    for model_type in ModelType::all().into_iter().filter(|t| t.as_str() != "fox_encoder") {
        let error = encoder.to_json(model_type).unwrap_err().to_string();
        assert!(error.contains("cannot express bidirectional attention"), "{error}");
    }
    let error = pro.to_json(kind("fox_encoder")).unwrap_err().to_string();
    assert!(error.ends_with("cannot express causal attention"), "{error}");
    for layout in [CheckpointLayout::OFFICIAL, CheckpointLayout::FLA] {
        let error = stick.to_json(stick.default_model_type(layout)).unwrap_err().to_string();
        assert!(error.contains("attention_weights \"stick_breaking\""), "{error}");
    }
}

#[test]
fn architectures_round_trip_in_every_format() {
    for architecture in Architecture::all() {
        let config = architecture.config(64, 2, 2);
        let mut written = 0;
        for kind in ModelType::all() {
            let Ok(json) = config.to_json(kind) else { continue };
            let (mut again, found) = parse(&json.to_string()).unwrap();
            outright_width(&mut again, &config, kind);
            assert_eq!((&again, found), (&config, kind), "{}", architecture.name);
            written += 1;
        }
        assert!(written > 0, "{} cannot be stored", architecture.name);
        assert!(config.to_json(config.storage_type()).is_ok(), "{}", architecture.name);
    }
}

#[test]
fn native_options_are_rejected_elsewhere() {
    let message = |kind: ModelType, field: &str| {
        let text = format!(r#"{{"model_type": "{}", {field}}}"#, kind.as_str());
        parse(&text).unwrap_err().to_string()
    };
    let native = CheckpointLayout::NATIVE;
    for kind in ModelType::all().into_iter().filter(|kind| kind.layout() != native) {
        let error = message(kind, r#""attention_weights": "stick_breaking""#);
        assert!(error.ends_with("`attention_weights` needs `model_type` \"fox\""), "{error}");
    }
    let error = message(kind(FOX), r#""fgate_type": "shared""#);
    assert!(error.ends_with("`fgate_type` \"shared\" needs `model_type` \"fox\""), "{error}");
    let error = message(kind(NATIVE), r#""attention_weights": "hard""#);
    assert!(error.contains("one of \"softmax\", \"stick_breaking\""), "{error}");
}

fn any_gate() -> impl Strategy<Value = ForgetGate> {
    let time = proptest::option::of(Just(DecayTime { min: 2.0, max: 64.5 }));
    prop_oneof![
        Just(ForgetGate::None),
        Just(ForgetGate::Full),
        Just(ForgetGate::Shared),
        Just(ForgetGate::KeyScale),
        time.clone().prop_map(|decay_time| ForgetGate::BiasOnly { decay_time }),
        time.prop_map(|decay_time| ForgetGate::Fixed { decay_time }),
    ]
}

fn any_rope() -> impl Strategy<Value = Rope> {
    let scaling = RopeScaling {
        factor: 8.0,
        low_freq_factor: 1.5,
        high_freq_factor: 4.0,
        original_length: 512,
    };
    let plain = Rope::new(12_345.5);
    prop_oneof![
        Just(plain),
        Just(Rope { scaling: Some(scaling), ..plain }),
        Just(Rope { strength: 0.25, ..plain }),
    ]
}

fn any_config() -> impl Strategy<Value = ModelConfig> {
    let flags = proptest::array::uniform5(any::<bool>());
    let norm = proptest::option::of(prop_oneof![Just(QkNorm::PerHead), Just(QkNorm::Shared)]);
    let ogate =
        proptest::option::of(prop_oneof![Just(Activation::Sigmoid), Just(Activation::Silu)]);
    let numbers = (
        proptest::option::of(any_rope()),
        proptest::option::of(1usize..9),
        proptest::option::of(Just(-10.0)),
        proptest::option::of(1usize..99),
        proptest::option::of(0usize..50),
    );
    let kinds = (
        any_gate(),
        prop_oneof![Just(AttentionWeights::Softmax), Just(AttentionWeights::StickBreaking)],
    );
    (kinds, flags, norm, ogate, numbers, any::<bool>()).prop_map(
        |(kinds, [k_shift, v_shift, norm_out, bias, grouped], qk_norm, ogate, numbers, tied)| {
            let (gate, weights) = kinds;
            let (rope, window, log_pruning_tolerance, intermediate_size, pad) = numbers;
            let mut config = ModelConfig::fox_llama(64, 2, 4);
            config.mlp.intermediate_size = intermediate_size;
            config.mlp.hidden_ratio = 3.5;
            config.tokens.pad = pad;
            config.tokens.mask = pad.filter(|_| tied);
            config.tie_word_embeddings = tied;
            config.mixer = Box::new(ForgettingConfig {
                heads: 4,
                kv_heads: if grouped { 2 } else { 4 },
                head_dim: grouped.then_some(24),
                mask: match tied && !bias && weights == AttentionWeights::Softmax {
                    true => Mask::Bidirectional,
                    false => Mask::Causal,
                },
                weights,
                gate,
                qkv_bias: bias,
                k_shift,
                v_shift,
                qk_norm,
                qk_norm_eps: if qk_norm.is_some() && norm_out { 1e-6 } else { 1e-5 },
                rope,
                window,
                sink: bias && weights == AttentionWeights::Softmax,
                output_norm: norm_out && ogate != Some(Activation::Silu),
                output_gate: ogate,
                log_pruning_tolerance,
            });
            config
        },
    )
}

/// Found by fuzzing: numbers were read a unit in the last place off.
#[test]
fn numbers_are_read_exactly() {
    for (text, number) in [("1e-60", 1e-60), ("1.2345678901234567e-31", 1.2345678901234567e-31)] {
        let json = ModelConfig::fox_pro(64, 1, 1).to_json(kind(NATIVE)).unwrap().to_string();
        let at = json.find("\"norm_eps\":").unwrap() + 11;
        let end = at + json[at..].find(',').unwrap();
        let json = format!("{}{text}{}", &json[..at], &json[end..]);
        assert_eq!(parse(&json).unwrap().0.norm_eps, number);
    }
}

/// Found by fuzzing: a Mamba-2 with the sizes of an MLP, which it has not, was another one after it was written.
#[test]
fn mlp_sizes_without_an_mlp_are_ignored() {
    let json = include_str!("../../../fuzz/seeds/config/mamba2-with-sizes-of-an-mlp.json");
    let (config, kind) = parse(json).unwrap();
    assert!(!config.has_mlp());
    let written = config.to_json(kind).unwrap().to_string();
    assert_eq!(parse(&written).unwrap(), (config, kind));
}

proptest! {
    #[test]
    fn written_configurations_read_back(config in any_config()) {
        for kind in ModelType::all() {
            let Ok(json) = config.to_json(kind) else { continue };
            let (mut again, found) = parse(&json.to_string()).unwrap();
            prop_assert_eq!(found, kind);
            // Where nothing is forgotten a tolerance has no effect, and only FoX files keep it.
            let mixer = again.mixer.forgetting_mut().unwrap();
            let wanted = config.mixer.forgetting().unwrap();
            if wanted.gate == ForgetGate::None {
                mixer.log_pruning_tolerance = wanted.log_pruning_tolerance;
            }
            outright_width(&mut again, &config, kind);
            prop_assert_eq!(&again, &config);
        }
        let own = if config.is_encoder() { "fox_encoder" } else { NATIVE };
        prop_assert!(config.to_json(kind(own)).is_ok());
    }

    #[test]
    fn arbitrary_config_text_never_panics(text in ".{0,200}") {
        let _ = parse(&text);
    }

    /// A file that is read and written again describes the same model, whatever its fields are.
    #[test]
    fn arbitrary_fields_are_rejected_or_round_trip(
        fields in prop::collection::vec((prop::sample::select(FIELDS), any_value()), 1..6),
        model_type in prop::sample::select(ModelType::all()),
    ) {
        let fields: Vec<String> =
            fields.iter().map(|(field, value)| format!(r#", "{field}": {value}"#)).collect();
        let text = format!(r#"{{"model_type": "{}"{}}}"#, model_type.as_str(), fields.concat());
        if let Ok((config, kind)) = parse(&text) {
            prop_assert!(config.param_specs().len() < 200_000);
            let written = match config.to_json(kind) {
                Ok(written) => written.to_string(),
                // Some formats read more than the references write.
                Err(Error::NotExpressible { .. }) => return Ok(()),
                Err(error) => return Err(TestCaseError::fail(format!("{error} after {text}"))),
            };
            let again = parse(&written);
            prop_assert!(again.is_ok(), "{} in {} after {}", again.unwrap_err(), written, text);
            prop_assert_eq!(again.unwrap(), (config, kind), "{} after {}", written, text);
        }
    }
}

#[rustfmt::skip]
const FIELDS: &[&str] = &[
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "num_kv_heads",
    "hidden_ratio", "intermediate_size", "norm_eps", "rms_norm_eps", "window_size", "head_dim",
    "num_attention_heads", "num_key_value_heads", "decay_time_min", "rope_base", "rope_theta",
    "initializer_range", "max_position_embeddings", "hidden_act", "tie_word_embeddings",
    "use_rope", "use_sink", "qkv_bias", "rope_strength", "mixers", "sliding_window",
    "use_sliding_window", "attn_hidden_ratio", "mamba_hidden_ratio", "expand", "expand_v",
    "state_size", "time_step_rank", "conv_kernel", "conv_size", "delta_heads", "delta_head_dim",
    "delta_expand_v", "mamba_heads", "mamba_head_dim", "mamba_state_size", "mamba1_channels",
    "bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id", "attn", "num_groups",
    "n_groups", "chunk_size", "attention_weights",
];

/// Sizes that fit, and values that do not.
fn any_value() -> impl Strategy<Value = String> {
    let sizes = (0_u32..14).prop_map(|n| (1_u64 << n).to_string());
    #[rustfmt::skip]
    let literals = prop::sample::select(vec![
        "null", "Infinity", "-Infinity", "NaN", "[]", "{}", "1e999", "true", "false", "0.5", "3",
        "1e-5",
        r#"["fox"]"#,
        r#"["mamba1", "window:64"]"#,
        r#"["gated-delta-net", "mamba2", "attention"]"#,
        r#"{"num_heads": 16}"#,
        r#"{"num_heads": 32, "window_size": 5}"#,
        r#""swish""#,
        r#""sigmoid""#,
        r#""auto""#,
        r#""stick_breaking""#,
        r#""softmax""#,
    ]);
    prop_oneof![
        4 => sizes,
        4 => literals.prop_map(str::to_owned),
        1 => any::<i64>().prop_map(|n| n.to_string()),
        1 => any::<u64>().prop_map(|n| n.to_string()),
        1 => any::<f64>().prop_map(|n| format!("{n:?}")),
        1 => "\"[a-z_]{0,9}\"",
    ]
}
