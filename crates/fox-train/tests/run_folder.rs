//! Run folders that were damaged, moved, or written by earlier versions.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use fox_train::recipe::{self, GateInit};
use fox_train::{Error, Event, Outcome, Recipe, Result, RunFolder, RunSpec, train};

/// A model that steps in milliseconds, for 8 steps with a checkpoint every 2.
fn recipe(extra: &[&str]) -> Recipe {
    let set = [
        "model.hidden_size=32",
        "model.num_hidden_layers=1",
        "model.num_heads=2",
        "model.intermediate_size=48",
        "data.sequence_length=64",
        "training.batch=2",
        "training.tokens=1024",
        "schedule.warmup_tokens=128",
        "checkpoints.every=2",
        "evaluation.sequences=2",
    ];
    let set: Vec<String> = set.iter().chain(extra).map(|text| text.to_string()).collect();
    recipe::load("tiny-fox-pro", &set).unwrap()
}

/// Trains; `at` runs after every step and may stop the run. Returns the notices too.
fn run(
    recipe: &Recipe,
    out: &Path,
    at: impl Fn(u64) -> ControlFlow<()>,
) -> (Result<Outcome>, Vec<String>) {
    let (recipe, out) = (recipe.clone(), out.to_path_buf());
    let spec = RunSpec { recipe, out, device: fox_cpu::device(), command: Vec::new() };
    let mut notices = Vec::new();
    let outcome = train(&spec, &mut |event| {
        match event {
            Event::Notice(text) => notices.push(text.to_string()),
            Event::Step(record) => return at(record.step),
            _ => {}
        }
        ControlFlow::Continue(())
    });
    (outcome, notices)
}

fn stop_after(last: u64) -> impl Fn(u64) -> ControlFlow<()> {
    move |step| if step == last { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
}

fn go_on(_: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

#[test]
fn resumes_with_damaged_run_json() {
    let dir = tempfile::tempdir().unwrap();
    let (out, recipe) = (dir.path().join("run"), recipe(&[]));
    run(&recipe, &out, stop_after(3)).0.unwrap();
    fs::write(out.join("run.json"), "{ \"recipe\": \"tin").unwrap();
    let (outcome, notices) = run(&recipe, &out, go_on);
    assert_eq!(outcome.unwrap().summary.steps, 8);
    let notice = notices.iter().find(|notice| notice.contains("run.json is damaged")).unwrap();
    assert!(notice.ends_with("run.json.damaged"), "{notice}");
    assert!(out.join("run.json.damaged").is_file());
    let info = RunFolder::info(&out).unwrap();
    assert_eq!((info.starts.len(), info.starts[0].from_step), (1, 3));
}

#[test]
fn moved_run_folder_is_not_recreated() {
    let dir = tempfile::tempdir().unwrap();
    let (out, moved, recipe) = (dir.path().join("run"), dir.path().join("moved"), recipe(&[]));
    let (outcome, _) = run(&recipe, &out, |step| {
        if step == 5 {
            fs::rename(&out, &moved).unwrap();
        }
        ControlFlow::Continue(())
    });
    let error = outcome.unwrap_err();
    assert!(matches!(error, Error::FolderMoved { .. }), "{error}");
    assert!(!out.exists(), "nothing is written to the old path");
    fs::rename(&moved, &out).unwrap();
    assert_eq!(run(&recipe, &out, go_on).0.unwrap().summary.steps, 8);
}

/// Folders from before `training.gate_init` have no such key: their gates started as published, and a recipe whose
/// default is another start resumes them.
#[test]
fn resumes_folders_without_gate_init() {
    let dir = tempfile::tempdir().unwrap();
    let (old, whole) = (dir.path().join("old"), dir.path().join("whole"));
    let published = recipe(&["training.gate_init=published"]);
    run(&published, &whole, go_on).0.unwrap();
    run(&published, &old, stop_after(4)).0.unwrap();
    let config = old.join("config.toml");
    let text = fs::read_to_string(&config).unwrap();
    let without = text.replace("gate_init = \"published\"\n", "");
    assert_ne!(without, text);
    fs::write(&config, without).unwrap();
    let today = recipe(&[]);
    assert_eq!(today.training.gate_init, GateInit::Spread);
    let error = run(&recipe(&["training.gate_init=[1, 2]"]), &old, go_on).0.unwrap_err();
    assert!(error.to_string().contains("training.gate_init is"), "{error}");
    run(&today, &old, stop_after(6)).0.unwrap();
    assert_eq!(run(&today, &old, go_on).0.unwrap().summary.steps, 8);
    let weights = |run: &Path| fs::read(run.join("export/model.safetensors")).unwrap();
    assert!(weights(&old) == weights(&whole), "the same bits");
    assert!(!fs::read_to_string(&config).unwrap().contains("gate_init"));
    // A folder that has the key is another run.
    let error = run(&today, &whole, go_on).0.unwrap_err().to_string();
    assert!(
        error.contains("training.gate_init is \"published\" there and \"spread\" here"),
        "{error}"
    );
}
