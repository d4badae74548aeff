//! Fine-tuning: runs that begin with a checkpoint, train a part of it, at separate rates, and let RoPE fade.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use fox_data::Tokenizer;
use fox_model::{Model, ModelConfig, SafetensorsFile};
use fox_train::recipe::{self, Recipe};
use fox_train::{Event, RunSpec, train};

const RECIPE: &str = r#"
[model]
hidden_size = 32
num_hidden_layers = 2
num_heads = 2
intermediate_size = 48
[data]
sequence_length = 64
[training]
tokens = 2560
batch = 4
[optimizer]
peak_lr = 5e-3
[schedule]
warmup_tokens = 512
[evaluation]
sequences = 2
[checkpoints]
every = 2
"#;

struct Bench {
    folder: tempfile::TempDir,
    recipe: String,
}

type Weights = BTreeMap<String, Vec<f32>>;

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("test.toml");
        fs::write(&path, RECIPE).unwrap();
        Bench { recipe: path.display().to_string(), folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A run from random weights.
    fn original(&self, set: &[&str]) -> PathBuf {
        let out = self.path("original");
        run(recipe::load(&self.recipe, &strings(set)).unwrap(), &out);
        out
    }

    /// The recipe that starts from a checkpoint.
    fn from(&self, init: &Path, set: &[&str]) -> fox_train::Result<Recipe> {
        recipe::load_from(&self.recipe, init, &strings(set))
    }
}

fn strings(set: &[&str]) -> Vec<String> {
    set.iter().map(|text| text.to_string()).collect()
}

fn spec(recipe: Recipe, out: &Path) -> RunSpec {
    RunSpec { recipe, out: out.to_path_buf(), device: fox_cpu::device(), command: Vec::new() }
}

fn run(recipe: Recipe, out: &Path) {
    train(&spec(recipe, out), &mut |_| ControlFlow::Continue(())).unwrap();
}

fn refused(recipe: fox_train::Result<Recipe>, out: &Path) -> String {
    let recipe = match recipe {
        Ok(recipe) => recipe,
        Err(error) => return error.to_string(),
    };
    let outcome = train(&spec(recipe, out), &mut |_| ControlFlow::Continue(()));
    outcome.map(|_| ()).unwrap_err().to_string()
}

fn weights(folder: &Path) -> Weights {
    let mut file = SafetensorsFile::open(&folder.join("model.safetensors")).unwrap();
    let names: Vec<String> = file.names().map(String::from).collect();
    names.into_iter().map(|name| (name.clone(), file.read_f32(&name).unwrap())).collect()
}

/// Names of the tensors that differ.
fn changed(a: &Weights, b: &Weights) -> Vec<String> {
    assert_eq!(a.len(), b.len());
    a.iter().filter(|(name, values)| b[*name] != **values).map(|(name, _)| name.clone()).collect()
}

#[test]
fn starts_from_checkpoint_or_run() {
    let bench = Bench::new();
    let first = bench.original(&[]);
    for init in [first.clone(), first.join("export")] {
        // Longer sequences, another base of RoPE: options that leave the parameters as they are.
        let set = ["data.sequence_length=96", "model.use_rope=true", "model.rope_base=1e6"];
        let recipe = bench.from(&init, &set).unwrap();
        let config = recipe.model_config(recipe.model["vocab_size"].as_integer().unwrap() as usize);
        let config = config.unwrap();
        assert_eq!(config.mixer.forgetting().unwrap().rope.unwrap().base, 1e6);
        assert_eq!(config.max_position_embeddings, 96);
        let model = recipe.initial_model(&config, &fox_cpu::device()).unwrap();
        let stored = weights(&first.join("export"));
        for (_, spec, value) in model.params().iter() {
            assert_eq!(value.to_f32().unwrap(), stored[&spec.name], "{}", spec.name);
        }
    }
    // The recipe of a run folder is the same recipe, and a table [model] is not needed.
    let recipe = bench.from(&first, &["training.tokens=512"]).unwrap();
    let text = recipe.to_toml().unwrap();
    let again = recipe::parse_table(&bench.recipe, text.parse().unwrap()).unwrap();
    assert_eq!(again, recipe);
    let mut bare: toml::Table = text.parse().unwrap();
    bare.remove("model");
    assert_eq!(recipe::parse_table(&bench.recipe, bare).unwrap(), recipe);
}

#[test]
fn trains_only_named_parameters() {
    let bench = Bench::new();
    let first = bench.original(&[]);
    let out = bench.path("tuned");
    let set = ["training.train=[\"gates\", \"model.layers.1.mlp.*\"]", "training.ema=0.9"];
    run(bench.from(&first, &set).unwrap(), &out);
    let found = changed(&weights(&first.join("export")), &weights(&out.join("export")));
    let want = [
        "model.layers.0.attn.fgate_proj.bias",
        "model.layers.0.attn.fgate_proj.weight",
        "model.layers.1.attn.fgate_proj.bias",
        "model.layers.1.attn.fgate_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.mlp.gate_proj.weight",
    ];
    assert_eq!(found, want);
    let state = out.join("checkpoints/step-00000010/optimizer.safetensors");
    let state = SafetensorsFile::open(&state).unwrap();
    assert_eq!(state.names().count(), 3 * want.len());
    // The averages of what is trained, and everything else as it is.
    let average = bench.path("average");
    let kind = Some(recipe::Weights::Ema);
    fox_train::export_run(&out, &average, kind, &fox_cpu::device()).unwrap();
    assert_eq!(changed(&weights(&out.join("export")), &weights(&average)), want);
}

#[test]
fn tuned_run_resumes_bit_exactly() {
    let bench = Bench::new();
    let first = bench.original(&["model.use_rope=true"]);
    let set = [
        "training.train=[\"attention\"]",
        "training.rates={gates = 4.0}",
        "training.rope_fade=[512, 1536]",
    ];
    let (whole, parts) = (bench.path("whole"), bench.path("parts"));
    run(bench.from(&first, &set).unwrap(), &whole);
    let mut steps = 0;
    let stopped = train(&spec(bench.from(&first, &set).unwrap(), &parts), &mut |event| {
        steps += u64::from(matches!(event, Event::Step(_)));
        if steps == 5 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert!(!stopped.unwrap().summary.finished);
    // Half of the fading is done after 1024 of 512 to 1536 tokens, and 3/4 after 1280.
    let middle = bench.path("middle");
    fox_train::export_run(&parts, &middle, None, &fox_cpu::device()).unwrap();
    let (config, _) = ModelConfig::from_file(&middle.join("config.json")).unwrap();
    assert_eq!(config.mixer.forgetting().unwrap().rope.unwrap().strength, 0.25);
    run(bench.from(&first, &set).unwrap(), &parts);
    assert!(changed(&weights(&whole.join("export")), &weights(&parts.join("export"))).is_empty());
    // At the end nothing rotates.
    let model = Model::from_checkpoint(&whole.join("export"), &fox_cpu::device()).unwrap();
    assert_eq!(model.config().mixer.forgetting().unwrap().rope, None);
}

#[test]
fn rates_multiply_the_learning_rate() {
    let bench = Bench::new();
    let first = bench.original(&[]);
    let tuned = |name: &str, set: &[&str]| {
        run(bench.from(&first, set).unwrap(), &bench.path(name));
        weights(&bench.path(name).join("export"))
    };
    let plain = tuned("plain", &["optimizer.peak_lr=2.5e-3"]);
    // A power of two, so that the bits are the same.
    let halved = tuned("halved", &["training.rates={all = 0.5}"]);
    assert!(changed(&plain, &halved).is_empty());
    let still = tuned("still", &["training.rates={mlp = 0.0}"]);
    let found = changed(&weights(&first.join("export")), &still);
    assert!(!found.is_empty() && found.iter().all(|name| !name.contains("mlp.")), "{found:?}");
}

/// With nothing to learn from itself and no labels, a model stays as it is; another one moves towards its teacher.
#[test]
fn distillation_keeps_model_close_to_teacher() {
    let bench = Bench::new();
    let first = bench.original(&[]);
    let start = weights(&first.join("export"));
    let distance = |name: &str, set: &[&str]| -> f64 {
        let mut all = vec!["optimizer.weight_decay=0.0", "optimizer.eps=1e-3"];
        all.extend(set);
        run(bench.from(&first, &all).unwrap(), &bench.path(name));
        let end = weights(&bench.path(name).join("export"));
        let square = |(name, values): (&String, &Vec<f32>)| -> f64 {
            values.iter().zip(&end[name]).map(|(a, b)| f64::from(a - b).powi(2)).sum()
        };
        start.iter().map(square).sum::<f64>().sqrt()
    };
    let free = distance("free", &[]);
    let half = distance("half", &["training.distill=0.9"]);
    let held = distance("held", &["training.distill=1.0"]);
    assert!(held < 1e-3 * free && held < half && half < free, "{held} {half} {free}");
    let error = recipe::load(&bench.recipe, &strings(&["training.distill=0.5"])).unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("needs a teacher; name the checkpoint to start from in training.init")
    );
}

#[test]
fn messages_use_tokenizer_of_checkpoint() {
    let bench = Bench::new();
    let first = bench.original(&[]);
    // The embedded corpus is text of words, so that any of them are tokens.
    let line = r#"{"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "a"}]}"#;
    let chats = bench.path("chats.jsonl");
    fs::write(&chats, format!("{line}\n").repeat(9)).unwrap();
    let path = format!(
        "data.messages={{path = {chats:?}, heldout = {chats:?}, template = \" {{role}} {{content}} .\"}}"
    );
    let recipe = bench.from(&first, &[&path, "optimizer.peak_lr=2e-2"]).unwrap();
    let data = fox_train::data::RunData::open(&recipe).unwrap();
    let batch = data.loader(&recipe).unwrap().batch(0).unwrap();
    let answers = batch.labels.iter().filter(|label| **label >= 0).count();
    assert!(answers > 0 && answers <= 4 * 8, "{answers} labels in 4 conversations");
    let config = recipe.model_config(data.train.vocab_size()).unwrap();
    let start = recipe.initial_model(&config, &fox_cpu::device()).unwrap();
    let evaluator = data.evaluator(&recipe).unwrap().unwrap();
    let before = evaluator.run(&start, &recipe.forward_options()).unwrap().loss;
    let out = bench.path("tuned");
    let trained = train(&spec(recipe, &out), &mut |_| ControlFlow::Continue(())).unwrap();
    let after = trained.summary.evaluation.unwrap().loss;
    assert!(after < 0.7 * before, "nine times the same answer: {before} {after}");
    let error = recipe::load(&bench.recipe, &strings(&[&path]))
        .map(|recipe| fox_train::data::RunData::open(&recipe).map(|_| ()).unwrap_err().to_string());
    assert!(error.unwrap().contains("`data.tokenizer` is missing; name the tokenizer"));
}

#[test]
fn rejects_what_does_not_fit() {
    let bench = Bench::new();
    let first = bench.original(&[]);
    let out = bench.path("out");
    let sentence = |set: &[&str]| {
        let text = refused(bench.from(&first, set), &out).replace(&bench.recipe, "test.toml");
        assert!(!text.contains('\n'), "{text}");
        text
    };
    assert_eq!(
        sentence(&["training.train=[\"gates\", \"adapters\"]"]),
        "test.toml: `training.train` names `adapters`, which the model does not have; give all, gates, attention, \
         mixers, mlp, norms, embedding, head or a pattern on names such as lm_head.weight"
    );
    assert_eq!(
        sentence(&["training.train=[]"]),
        "test.toml: `training.train` is empty, so nothing would be trained; name a part of the model, e.g. \"gates\""
    );
    assert_eq!(
        sentence(&["training.rope_fade=[0, 100]"]),
        "test.toml: `training.rope_fade` is set, but the model has no attention with RoPE; remove it"
    );
    let text = sentence(&["model.num_heads=1"]);
    assert!(
        text.ends_with(
            "has no model.layers.0.attn.fgate_proj.weight of shape [1, 32], which the model needs"
        ),
        "{text}"
    );
    // Another tokenizer.
    let other = bench.path("other");
    fs::create_dir(&other).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(first.join("export").join(file), other.join(file)).unwrap();
    }
    let bytes = Tokenizer::from_name("bytes").unwrap();
    bytes.save(&other).unwrap();
    let text = refused(bench.from(&other, &[]), &out);
    let want =
        format!("whose tokenizer is {}, but the data were made with synthetic", bytes.identity());
    assert!(text.contains(&want) && !text.contains('\n'), "{text}");
    assert!(text.ends_with("prepare them with the tokenizer of the checkpoint"), "{text}");
    assert!(!out.exists(), "nothing is written");
}
