//! Helpers of the tests of commands: the executable, a small recipe, a small model.
#![allow(dead_code)] // each test uses a part

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use fox_base::FolderLock;
use fox_data::{SyntheticTokenizer, Tokenizer};
use fox_model::{Model, ModelConfig, WriteOptions};

/// A model so small that a step takes milliseconds.
pub const RECIPE: &str = r#"
description = "A recipe for tests"
[model]
hidden_size = 32
num_hidden_layers = 2
num_heads = 2
intermediate_size = 48
qk_norm = true
use_output_gate = true
use_output_norm = true
use_k_shift = true
use_v_shift = true
[data]
sequence_length = 64
[training]
tokens = 51200
batch = 4
micro_batch = 2
[optimizer]
peak_lr = 5e-3
[schedule]
warmup_tokens = 2560
[evaluation]
every = 50
sequences = 4
[checkpoints]
every = 3
keep = 2
[metrics]
every = 2
details_every = 20
"#;

/// Writes the recipe and returns its path.
pub fn recipe(dir: &Path) -> PathBuf {
    let path = dir.join("test.toml");
    fs::write(&path, RECIPE).unwrap();
    path
}

/// `fox train` with the recipe into `out`. `FOX_BINARY` overrides the executable, for a
/// test that was copied to another machine.
pub fn command(recipe: &Path, out: &Path, extra: &[&str]) -> Command {
    let built = || env!("CARGO_BIN_EXE_fox").into();
    let mut command = Command::new(std::env::var_os("FOX_BINARY").unwrap_or_else(built));
    command.arg("train").arg(recipe).arg("--out").arg(out).args(extra);
    command
}

pub fn run(recipe: &Path, out: &Path, extra: &[&str]) -> Output {
    command(recipe, out, extra).output().unwrap()
}

/// Runs `fox` with these arguments.
pub fn fox(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_fox")).args(args).output().unwrap()
}

/// Whether `fox` succeeds, its output and its messages.
pub fn outcome(args: &[&str]) -> (bool, String, String) {
    let output = fox(args);
    (output.status.success(), stdout(&output), stderr(&output))
}

/// The output of `fox`, which must succeed.
pub fn succeed(args: &[&str]) -> String {
    succeeded(&fox(args))
}

/// The error message of `fox`, which must fail.
pub fn complaint(args: &[&str]) -> String {
    refused(&fox(args))
}

/// The output of a command that must have succeeded.
pub fn succeeded(output: &Output) -> String {
    assert!(output.status.success(), "{}", stderr(output));
    stdout(output)
}

/// The error message of a command that must have failed: one sentence.
pub fn refused(output: &Output) -> String {
    let said = stderr(output);
    assert!(!output.status.success(), "it should have failed: {said}");
    assert!(said.starts_with("error: ") && said.trim_end().lines().count() == 1, "{said}");
    said.trim_end().to_string()
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The folder of a reference dump.
pub fn dump(name: &str) -> String {
    format!("{}/../../fixtures/models/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Writes a small untrained model of the embedded corpus, with its tokenizer.
pub fn small_model(path: &Path, change: impl FnOnce(&mut ModelConfig)) {
    let mut config = ModelConfig::fox_pro(32, 2, 2)
        .with_vocab(SyntheticTokenizer::VOCAB_SIZE)
        .with_mlp_width(48);
    change(&mut config);
    let model = Model::init(&config, 1, &fox_cpu::device()).unwrap();
    model.save(path, &WriteOptions::for_model(&config)).unwrap();
    Tokenizer::Synthetic(SyntheticTokenizer).save(path).unwrap();
}

/// The state that must be bit-exact: exported weights, and the optimizer state of the last checkpoint.
pub fn result(out: &Path) -> (Vec<u8>, Vec<u8>) {
    let weights = fs::read(out.join("export/model.safetensors")).unwrap();
    let last = checkpoints(out).pop().unwrap();
    (weights, fs::read(last.join("optimizer.safetensors")).unwrap())
}

/// Folders of finished checkpoints, oldest first.
pub fn checkpoints(out: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(out.join("checkpoints")) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_none())
        .collect();
    found.sort();
    found
}

/// Waits until the lock of `run` is free.
pub fn wait_until_free(run: &Path) {
    wait_until("the run folder is unlocked", || {
        FolderLock::take(&run.join("run.lock")).unwrap().is_ok()
    });
}

/// Waits two minutes at most.
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(120), "waited for two minutes: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Step and loss of every line of metrics.jsonl, in order.
pub fn metrics(out: &Path) -> Vec<(String, u64, String)> {
    let text = fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let line = |line: &str| {
        let json: serde_json::Value = serde_json::from_str(line).unwrap();
        let kind = json["kind"].as_str().unwrap().to_string();
        let numbers = ["loss", "lr", "grad_norm", "param_norm", "half_lives", "pruned", "tokens"];
        let values = numbers.map(|name| json[name].to_string()).join(" ");
        (kind, json["step"].as_u64().unwrap(), values)
    };
    text.lines().map(line).collect()
}
