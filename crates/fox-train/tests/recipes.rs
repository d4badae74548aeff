//! The published configurations, and what can be wrong with a recipe.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::fs;

use fox_model::{ForgetGate, ModelConfig, Pruning};
use fox_tensor::AttentionWeights;
use fox_train::recipe::{self, GateInit, load};
use fox_train::{AdamW, Decay, Muon, Recipe, Scale};

const GI: u64 = 1 << 30;
/// Family, then for each size: parameters; then peak learning rates for 125M, 360M, 760M/16B, 760M/48B.
const TABLE: [(&str, [usize; 3], [f64; 4]); 7] = [
    ("fox-llama", [162_259_344, 411_651_456, 834_827_328], [2e-3, 2e-3, 1e-3, 1e-3]),
    ("fox-pro", [162_508_176, 418_803_072, 836_707_392], [2e-3, 2e-3, 1e-3, 2e-3]),
    ("transformer-llama", [162_148_608, 411_257_856, 833_942_016], [2e-3, 2e-3, 1e-3, 5e-4]),
    ("transformer-pro", [162_397_440, 418_409_472, 834_937_344], [2e-3, 2e-3, 1e-3, 1e-3]),
    ("delta-net", [162_316_032, 411_752_448, 834_829_824], [2e-3, 2e-3, 1e-3, 1e-3]),
    ("hgrn2", [162_167_040, 411_307_008, 834_015_744], [2e-3, 2e-3, 1e-3, 2e-3]),
    ("mamba2", [167_563_200, 419_778_048, 857_308_416], [2e-3, 2e-3, 1e-3, 2e-3]),
];

fn parameters(config: &ModelConfig) -> usize {
    config.param_specs().iter().map(|spec| spec.count()).sum()
}

#[test]
fn published_recipes_match_paper() {
    for (family, counts, rates) in TABLE {
        let sizes = [
            ("125m", counts[0], rates[0], 5 * GI / 2, 5120),
            ("360m", counts[1], rates[1], 7 * GI, 14336),
            ("760m", counts[2], rates[2], 15 * GI, 30720),
            ("760m-48b", counts[2], rates[3], 45 * GI, 92160),
        ];
        for (size, count, rate, tokens, steps) in sizes {
            let name = format!("{family}-{size}");
            let recipe = load(&name, &[]).unwrap();
            let config = recipe.model_config(50257).unwrap();
            assert_eq!(parameters(&config), count, "{name}");
            assert_eq!(recipe.training.tokens, tokens, "{name}");
            assert_eq!(recipe.steps(), steps, "{name}");
            assert_eq!(recipe.tokens_per_step(), 524_288, "{name}");
            assert_eq!(recipe.optimizer.name, "adamw", "{name}");
            let o: AdamW = recipe.optimizer.settings().unwrap();
            assert_eq!(recipe.optimizer.peak_lr, rate, "{name}");
            assert_eq!((o.beta1, o.beta2, o.eps), (0.9, 0.95, 1e-8), "{name}");
            assert_eq!((o.weight_decay, recipe.optimizer.clip), (0.1, 1.0), "{name}");
            let schedule = recipe.schedule();
            assert_eq!(schedule.lr(0), 0.0, "{name}");
            assert_eq!(schedule.lr(1 << 28), rate, "{name}");
            assert!(schedule.lr(tokens).abs() < 1e-18, "{name}");
        }
    }
}

#[test]
fn published_models_are_the_presets() {
    for preset in fox_model::Preset::all() {
        let recipe = load(preset.name, &[]).unwrap();
        let mut config = recipe.model_config(50257).unwrap();
        config.max_position_embeddings = preset.config().max_position_embeddings;
        assert_eq!(config, preset.config(), "{}", preset.name);
    }
}

#[test]
fn windowed_baseline() {
    let recipe = load("transformer-llama-760m-window", &[]).unwrap();
    let config = recipe.model_config(50257).unwrap();
    assert_eq!(parameters(&config), 833_942_016);
    assert!(config.to_json(config.storage_type()).unwrap()["window_size"] == 2048);
}

#[test]
fn built_in_recipes_load() {
    for name in &recipe::builtin_names().unwrap() {
        let recipe = load(name, &[]).unwrap();
        assert!(!recipe.description.is_empty(), "{}", name);
        // What recipes share has no sizes.
        let shared = ["published", "shared-1m", "shared-26m", "long-context", "tiny-long-context"]
            .contains(&name.as_str());
        assert_eq!(recipe.model_config(256).is_ok(), !shared, "{}", name);
        // What is written to a run folder is a recipe again.
        let text = recipe.to_toml().unwrap();
        let again = recipe::parse_table(name, text.parse().unwrap()).unwrap();
        assert_eq!(again, recipe, "{}", name);
    }
    for variant in recipe::variants().unwrap() {
        assert!(!variant.about.is_empty(), "{}", variant.name);
        let recipe = load(&format!("tiny-fox-pro+{}", variant.name), &[]).unwrap();
        recipe.model_config(256).unwrap();
    }
}

#[test]
fn model_variant_keeps_only_sizes() {
    for (name, layer) in [
        ("fox-llama", "FoX"),
        ("fox-pro", "FoX (Pro)"),
        ("transformer-llama", "Transformer"),
        ("transformer-pro", "Transformer"),
        ("mamba2", "Mamba-2"),
        ("hgrn2", "HGRN2"),
        ("delta-net", "DeltaNet"),
        ("gated-delta-net", "Gated DeltaNet"),
    ] {
        let config = |spec: String| load(&spec, &[]).unwrap().model_config(256).unwrap();
        let found = config(format!("books-small+{name}"));
        let base = config("books-small".into());
        assert_eq!((found.hidden_size, found.num_layers), (base.hidden_size, base.num_layers));
        assert!(found.mixer.name().starts_with(layer), "{name}: {}", found.mixer.name());
        // The sequence of variants counts: what comes after a model changes it.
        if name == "fox-llama" {
            let changed = config(format!("books-small+{name}+qk-norm"));
            assert_ne!(changed, found);
            assert_eq!(config(format!("books-small+qk-norm+{name}")), found);
        }
    }
}

#[test]
fn tiny_pairs_have_equal_sizes() {
    for (a, b) in [
        ("tiny-fox-pro", "tiny-transformer"),
        ("tiny-fox-pro", "tiny-transformer-pro"),
        ("tiny-fox-pro", "tiny-stick-breaking"),
        ("books-small", "books-small-transformer"),
    ] {
        let count = |name: &str| parameters(&load(name, &[]).unwrap().model_config(256).unwrap());
        let ratio = count(a) as f64 / count(b) as f64;
        assert!((ratio - 1.0).abs() < 0.02, "{a} / {b}: {ratio}");
    }
}

#[test]
fn variants_stack_and_overrides_come_last() {
    let recipe = load(
        "fox-llama-125m+qk-norm+rope",
        &[
            "training.tokens=1.5e6".into(),
            "model.rope_base=10000.0".into(),
            "data.order=sequential".into(),
        ],
    )
    .unwrap();
    assert_eq!(recipe.training.tokens, 1_500_000);
    assert_eq!(recipe.model["qk_norm"].as_bool(), Some(true));
    assert_eq!(recipe.model["rope_base"].as_float(), Some(10000.0));
    assert_eq!(recipe.data.order, recipe::OrderName::Sequential);
}

#[test]
fn extends_built_in_recipe_or_sibling_file() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_string_lossy().to_string()
    };
    write("base.toml", "extends = \"tiny-fox-pro\"\n[training]\nbatch = 3\nseed = 5\n");
    let top = write("top.toml", "extends = \"base.toml\"\n[training]\nbatch = 4\n");
    let recipe = load(&format!("{top}+rope"), &[]).unwrap();
    assert_eq!((recipe.training.batch, recipe.training.seed), (4, 5));
    assert_eq!(recipe.model["use_rope"].as_bool(), Some(true));
    let circle = write("circle.toml", "extends = \"circle.toml\"\n");
    let error = load(&circle, &[]).unwrap_err().to_string();
    assert!(error.contains("extends itself"), "{error}");
}

/// The ablations that only the native format can hold.
#[test]
fn sticks_and_shared_gates() {
    let config = |name: &str| load(name, &[]).unwrap().model_config(256).unwrap();
    let mixer = |name: &str| config(name).mixer.forgetting().unwrap().clone();
    let alone = mixer("tiny-stick-breaking");
    assert_eq!((alone.weights, alone.gate), (AttentionWeights::StickBreaking, ForgetGate::None));
    let both = mixer("tiny-fox-llama+stick-breaking");
    assert_eq!((both.weights, both.gate), (AttentionWeights::StickBreaking, ForgetGate::Full));
    let shared = mixer("tiny-fox-pro+shared-gate");
    assert_eq!((shared.weights, shared.gate), (AttentionWeights::Softmax, ForgetGate::Shared));
    // A vector and a bias instead of one of each per head, in each of the layers.
    let config = config("tiny-fox-pro");
    let fewer = (config.heads().0 - 1) * (config.hidden_size + 1) * config.num_layers;
    let shared = load("tiny-fox-pro+shared-gate", &[]).unwrap().model_config(256).unwrap();
    assert_eq!(parameters(&config) - parameters(&shared), fewer);
}

fn message(name: &str, overrides: &[&str]) -> String {
    let overrides: Vec<String> = overrides.iter().map(|text| text.to_string()).collect();
    match load(name, &overrides) {
        Err(error) => error.to_string(),
        Ok(recipe) => recipe.model_config(256).unwrap_err().to_string(),
    }
}

#[test]
fn mistakes_suggest_nearest_name() {
    // Overrides, and the error after the name of the recipe.
    #[rustfmt::skip]
    let refused = [
        ("training.tokenz=5", "unknown key `training.tokenz`; did you mean `training.tokens`?"),
        ("trainig.tokens=5", "unknown key `trainig`; did you mean `training`?"),
        ("model.hiden_size=5", "unknown key `model.hiden_size`; did you mean `model.hidden_size`?"),
        ("data.synthetic.octave=5", "unknown key `data.synthetic.octave`; did you mean `data.synthetic.octaves`?"),
        ("optimizer.wavelength=5", "unknown key `optimizer.wavelength`"),
        ("optimizer.beta3=0.5", "unknown key `optimizer.beta3`; did you mean `optimizer.beta1`?"),
        ("optimizer.peak_lt=0.5", "unknown key `optimizer.peak_lt`; did you mean `optimizer.peak_lr`?"),
        ("optimizer.name=moun", "`optimizer.name` is \"moun\"; there are adamw and muon"),
        ("optimizer.name=3", "`optimizer.name` must be text"),
        ("optimizer.momentum=0.9",
         "`optimizer.momentum` is a key of muon, not of adamw; set optimizer.name=\"muon\" or leave it out"),
        ("optimizer.beta2=1.0", "`optimizer.beta2` must be at least 0 and below 1"),
        ("optimizer.name=muon; optimizer.newton_schulz_steps=0",
         "`optimizer.newton_schulz_steps` must be between 1 and 20; 5 is usual"),
        ("training.dropout=1.0", "`training.dropout` must be a probability of at least 0 and below 1, e.g. 0.1"),
        ("training.dropout=-0.1", "`training.dropout` must be a probability of at least 0 and below 1, e.g. 0.1"),
        ("training.ema=1.0", "`training.ema` must be between 0 and 1"),
        ("evaluation.weights=ema",
         "`evaluation.weights` is \"ema\", but no average is kept; set training.ema, e.g. to 0.999"),
        ("schedule.shape=wsd", "`schedule.decay` must be linear or 1-sqrt in the shape \"wsd\""),
        ("schedule.decay_fraction=0.1",
         "`schedule.decay_fraction` is a key of the shape \"wsd\"; set schedule.shape=\"wsd\" or use schedule.decay_tokens"),
        ("schedule.shape=wsd; schedule.decay=linear; schedule.decay_tokens=5",
         "`schedule.decay_tokens` has no place in the shape \"wsd\", whose decay is \
          schedule.decay_fraction of the run; leave it out"),
        ("training.gate_init=[64, 8]",
         "`training.gate_init` must be [shortest, longest] in tokens, both above 0 and the shortest first"),
        ("training.batch=0", "`training.batch` must be at least 1"),
        ("training.batch=9000000000000000000",
         "`training.batch` times data.sequence_length is more than 2^31 tokens in a step; lower one of them"),
        ("model.vocab_size=100", "`model.vocab_size` is 100, but the data have 256 token ids"),
    ];
    for (overrides, want) in refused {
        let overrides: Vec<&str> = overrides.split("; ").collect();
        assert_eq!(message("tiny-fox-pro", &overrides), format!("tiny-fox-pro: {want}"));
    }
    assert_eq!(
        message("tiny-fox-pro", &["tokens"]),
        "`tokens` is not an override; write key=value, e.g. training.tokens=1000000"
    );
    #[rustfmt::skip]
    let refused = [
        ("data.task.name=mqqr", "`data.task.name` is `mqqr`, which is not a task; did you mean `mqar`?"),
        ("data.task.name=chess-endgames",
         "`data.task.name` is `chess-endgames`, which is not a task; the tasks are mqar, \
          mqar-rebound, n-back, flip-flop, selective-copy, parity"),
        ("data.task.test=[[64, 40]]", "`data.task.test` has cases of 64 tokens, but difficulty 40 needs 160"),
        ("data.sequence_length=512",
         "`data.sequence_length` is 512, but the longest case of data.task.train has 256 tokens; make them equal"),
        ("data.task.vocabulry=9", "unknown key `data.task.vocabulry`; did you mean `data.task.vocabulary`?"),
        ("data.path=books", "`data.path` is set beside data.task, which generates its data; remove one of them"),
    ];
    for (overrides, want) in refused {
        let said = load("task-mqar", &[overrides.into()])
            .and_then(|recipe| fox_train::data::RunData::open(&recipe).map(|_| ()));
        assert_eq!(said.unwrap_err().to_string(), format!("task-mqar: {want}"));
    }
    let wrong_type = message("tiny-fox-pro", &["training.tokens=many"]);
    assert!(wrong_type.starts_with("tiny-fox-pro: `training.tokens` does not fit"), "{wrong_type}");
    let heads = message("tiny-fox-pro", &["model.num_heads=7"]);
    assert!(heads.contains("num_heads") && heads.contains("does not divide"), "{heads}");
    assert_eq!(
        message("tiny-fox-por", &[]),
        "`tiny-fox-por` is neither a file nor a built-in recipe; did you mean `tiny-fox-pro`?"
    );
    assert!(message("tiny-fox-pro+no-kv-shit", &[]).contains("did you mean `no-kv-shift`?"));
    assert!(!message("missing.toml", &[]).contains('\n'));
}

#[test]
fn rejects_recipe_without_sizes() {
    let missing = |key: &str| {
        format!(
            "`model.{key}` is missing; give the model's sizes (hidden_size, num_hidden_layers, num_heads), extend a recipe that has them, or start from a checkpoint (training.init)"
        )
    };
    assert_eq!(message("published", &[]), format!("published: {}", missing("hidden_size")));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mine.toml");
    let name = path.to_string_lossy();
    let sizes = ["hidden_size = 64", "num_hidden_layers = 2", "num_heads = 4"];
    for (left_out, key) in ["hidden_size", "num_hidden_layers", "num_heads"].iter().enumerate() {
        let mut given = sizes.to_vec();
        given.remove(left_out);
        fs::write(&path, format!("[model]\n{}\n", given.join("\n"))).unwrap();
        assert_eq!(message(&name, &[]), format!("{name}: {}", missing(key)));
    }
    fs::write(&path, "[model]\n").unwrap();
    assert_eq!(message(&name, &[]), format!("{name}: {}", missing("hidden_size")));
    fs::write(&path, "[training]\nbatch = 4\n").unwrap();
    assert_eq!(
        message(&name, &[]),
        format!(
            "{name}: `model` is missing; give the model's sizes in a table or extend another recipe"
        )
    );
    fs::write(&path, format!("[model]\n{}\n", sizes.join("\n"))).unwrap();
    assert!(load(&name, &[]).unwrap().model_config(256).is_ok());
    // The width of a head determines their number, too.
    let mamba = ["model.model_type=mamba2", "model.hidden_size=64", "model.num_hidden_layers=1"];
    fs::write(&path, "[model]\nhead_dim = 16\n").unwrap();
    assert!(load(&name, &mamba.map(String::from)).unwrap().model_config(256).is_ok());
}

#[test]
fn step_counts_do_not_overflow() {
    let recipe =
        load("tiny-fox-pro", &["training.tokens=9_000_000_000_000_000_000".into()]).unwrap();
    assert_eq!(recipe.steps(), 9_000_000_000_000_000_000_u64.div_ceil(8 * 512));
    let published = load("fox-pro-760m-48b", &[]).unwrap();
    assert!(published.training.tokens > u64::from(u32::MAX) && published.steps() == 92160);
    let largest = ["training.batch=2097151".to_string(), "data.sequence_length=1024".to_string()];
    assert_eq!(load("tiny-fox-pro", &largest).unwrap().tokens_per_step(), 2_147_482_624);
    for batch in ["2097152", "9223372036854775807"] {
        assert_eq!(
            message(
                "tiny-fox-pro",
                &[&format!("training.batch={batch}"), "data.sequence_length=1024"]
            ),
            "tiny-fox-pro: `training.batch` times data.sequence_length is more than 2^31 tokens in a step; lower one of them"
        );
    }
}

/// Also where the comparison with NaN could go either way.
#[test]
fn forward_options_follow_the_recipe() {
    let options = |set: &[&str]| {
        let set: Vec<String> = set.iter().map(|text| text.to_string()).collect();
        load("tiny-fox-pro", &set).unwrap().forward_options()
    };
    assert_eq!(options(&[]).pruning, Pruning::Config);
    assert_eq!(options(&["training.pruning=off"]).pruning, Pruning::Off);
    assert_eq!(options(&["training.pruning=auto"]).pruning, Pruning::Auto);
    assert_eq!(options(&["training.pruning=-0.5"]).pruning, Pruning::Tolerance(-0.5));
    assert!(!options(&[]).recompute && options(&["training.recompute=true"]).recompute);
}

#[test]
fn rejects_non_negative_pruning_tolerance() {
    for value in ["0", "0.0", "10000", "nan", "inf"] {
        assert_eq!(
            message("tiny-fox-pro", &[&format!("training.pruning={value}")]),
            "tiny-fox-pro: `training.pruning` must be config, off, auto or a negative number"
        );
        let said = message("tiny-fox-pro", &[&format!("model.log_pruning_tolerance={value}")]);
        assert!(said.contains("log_pruning_tolerance"), "{value}: {said}");
    }
    assert!(load("tiny-fox-pro", &["training.pruning=-0.5".into()]).is_ok());
}

#[test]
fn warm_up_stable_decay() {
    let set = ["training.tokens=1000000".into(), "schedule.warmup_tokens=100000".into()];
    let recipe = load("tiny-fox-pro+wsd", &set).unwrap();
    let (schedule, peak) = (recipe.schedule(), recipe.optimizer.peak_lr);
    assert_eq!(schedule.lr(50_000), peak / 2.0);
    for tokens in [100_000, 500_000, 800_000] {
        assert_eq!(schedule.lr(tokens), peak, "{tokens}");
    }
    let close = |tokens: u64, part: f64| (schedule.lr(tokens) / peak - part).abs() < 1e-12;
    assert!(close(850_000, 0.5) && close(1_000_000, 0.0));
    // The shape's own decay, when the recipe names none.
    let text = "[model]\nhidden_size = 64\n[schedule]\nshape = \"wsd\"\ndecay_fraction = 0.5\n";
    let recipe = recipe::parse_table("x", text.parse().unwrap()).unwrap();
    assert_eq!(recipe.schedule.decay, Decay::OneMinusSqrt);
    assert_eq!(recipe.schedule().decay_tokens, Some(recipe.training.tokens / 2));
}

#[test]
fn optimizer_settings_round_trip_through_run_folder() {
    let set = ["optimizer.scale=spectral", "optimizer.adamw_lr=0.1", "training.ema=0.99"];
    let recipe = load("tiny-fox-pro+muon", &set.map(String::from)).unwrap();
    let again = recipe::parse_table("x", recipe.to_toml().unwrap().parse().unwrap()).unwrap();
    assert_eq!((&again.optimizer, again.training.ema), (&recipe.optimizer, Some(0.99)));
    let muon: Muon = again.optimizer.settings().unwrap();
    let want = Muon { scale: Scale::Spectral, adamw_lr: 0.1, ..Muon::default() };
    assert_eq!((again.optimizer.name.as_str(), muon), ("muon", want));
    let text = recipe.to_toml().unwrap();
    for line in ["name = \"muon\"", "momentum = 0.95", "newton_schulz_steps = 5", "clip = 1.0"] {
        assert!(text.contains(line), "{text}");
    }
}

/// Decay times of the gates of a layer after initialization.
fn decay_times(recipe: &Recipe, layer: usize) -> Vec<f32> {
    let device = fox_cpu::device();
    let model = recipe.initial_model(&recipe.model_config(256).unwrap(), &device).unwrap();
    let name = format!("model.layers.{layer}.attn.fgate_proj.bias");
    let bias = model.params().value(model.params().find(&name).unwrap()).to_f32().unwrap();
    bias.iter().map(|b| 1.0 / (-b).exp().ln_1p()).collect()
}

#[test]
fn gate_init_sets_decay_times() {
    let half = 1.0 / 2f32.ln();
    let patterned = |mixers: &str| {
        ["model.model_type=fox_hybrid".to_string(), format!("model.mixers={mixers}")]
    };
    let samba_like = patterned(r#"["mamba2", "fox", "window:64"]"#);
    let set = |text: &str| [format!("training.gate_init={text}")];
    for (name, set, layer, want) in [
        ("tiny-fox-pro", &set("[8, 512]")[..], 1, [8.0, 32.0, 128.0, 512.0]),
        ("tiny-fox-pro", &["training.gate_memory=[8, 512]".into()], 0, [8.0, 32.0, 128.0, 512.0]),
        ("tiny-fox-pro", &[], 0, [1.0, 8.0, 64.0, 512.0]),
        ("tiny-fox-pro+rope+window-64", &[], 0, [1.0, 8.0, 64.0, 512.0]),
        ("tiny-fox-pro", &["data.sequence_length=64".into()], 1, [1.0, 4.0, 16.0, 64.0]),
        ("tiny-fox-pro", &set("published"), 1, [half; 4]),
        ("tiny-fox-pro+published-start", &[], 1, [half; 4]),
        ("tiny-fox-pro+open-start", &[], 1, [2981.0; 4]),
        ("tiny-hybrid", &[], 0, [1.0, 8.0, 64.0, 512.0]),
        ("tiny-hybrid", &samba_like, 1, [1.0, 8.0, 64.0, 512.0]),
        ("task-mqar+fox-pro", &[], 1, [half; 4]),
        ("task-mqar+fox-pro+memory-256", &[], 1, [16.0, 40.3175, 101.594, 256.0]),
    ] {
        let got = decay_times(&load(name, set).unwrap(), layer);
        for (got, want) in got.iter().zip(want) {
            assert!((got / want - 1.0).abs() < 1e-4, "{name} {set:?}: {got} {want}");
        }
    }
}

#[test]
fn gate_init_defaults() {
    let init = |name: &str| load(name, &[]).unwrap().training.gate_init;
    for name in ["tiny-fox-llama", "tiny-hybrid", "tiny-encoder", "fox-pro-1m", "fox-encoder-125m"]
    {
        assert_eq!(init(name), GateInit::Spread, "{name}");
    }
    for name in ["fox-pro-125m", "fox-llama-760m-48b", "fox-window-125m", "task-parity+fox-pro"] {
        assert_eq!(init(name), GateInit::Published, "{name}");
        assert_eq!(init(&format!("{name}+spread")), GateInit::Spread, "{name}");
    }
    // What replaces the gates resets the start of the recipe below.
    for name in [
        "tiny-fox-pro+no-forget-gate",
        "tiny-fox-pro+bias-only-64",
        "tiny-fox-pro+mamba2",
        "tiny-stick-breaking",
        "books-small-transformer",
        "transformer-encoder-26m",
    ] {
        assert_eq!(init(name), GateInit::Published, "{name}");
    }
    let set = ["training.init=some/checkpoint".to_string()];
    assert_eq!(load("tiny-fox-pro", &set).unwrap().training.gate_init, GateInit::Published);
}

#[test]
fn gate_init_rejects_bad_input() {
    let device = fox_cpu::device();
    let error = |name: &str, set: &[&str]| {
        let set: Vec<String> = set.iter().map(ToString::to_string).collect();
        let made = load(name, &set).and_then(|recipe| {
            let config = recipe.model_config(256)?;
            recipe.initial_model(&config, &device)
        });
        made.unwrap_err().to_string()
    };
    for set in ["[0, 8]", "[64, 8]", "[-1, 8]", "[nan, 8]", "[1, inf]"] {
        assert_eq!(
            error("tiny-fox-pro", &[&format!("training.gate_init={set}")]),
            "tiny-fox-pro: `training.gate_init` must be [shortest, longest] in tokens, both above 0 and the shortest first"
        );
    }
    for set in ["open", "[8]", "[1, 2, 3]", "8", "{ min = 8 }"] {
        let error = error("tiny-fox-pro", &[&format!("training.gate_init={set}")]);
        let want = "set it to \"published\", \"spread\" or [shortest, longest] in tokens";
        assert!(error.contains("`training.gate_init` ") && error.ends_with(want), "{error}");
    }
    for set in ["spread", "[8, 64]"] {
        let want = "tiny-transformer-pro: `training.gate_init` is set, but the model has no data-dependent forget gates; set it to \"published\"";
        assert_eq!(error("tiny-transformer-pro", &[&format!("training.gate_init={set}")]), want);
    }
    let both = error("tiny-fox-pro", &["training.gate_memory=[1, 2]", "training.gate_init=[1, 3]"]);
    assert!(both.contains("is the former name of training.gate_init"), "{both}");
}

#[test]
fn gate_memory_is_read_with_notice() {
    let recipe = load("tiny-fox-pro", &["training.gate_memory=[8, 512]".into()]).unwrap();
    assert_eq!(recipe.training.gate_init, GateInit::DecayTimes([8.0, 512.0]));
    assert_eq!(
        recipe.notices,
        ["tiny-fox-pro: training.gate_memory is now called training.gate_init"]
    );
    assert_eq!(load("tiny-fox-pro", &[]).unwrap().notices, [""; 0]);
}
