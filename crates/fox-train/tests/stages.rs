//! Runs whose sequences grow by stages.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use fox_train::metrics::{MetricsLog, Record};
use fox_train::recipe::{self, Recipe};
use fox_train::{Event, RunSpec, train};

/// A model that steps in milliseconds.
const SMALL: [&str; 4] = [
    "model.hidden_size=32",
    "model.num_hidden_layers=1",
    "model.num_heads=2",
    "model.intermediate_size=48",
];

fn strings(set: &[&str]) -> Vec<String> {
    set.iter().map(|text| text.to_string()).collect()
}

/// Trains until the end, or until `stop` steps are done; the rows and columns of every step, and notices.
fn run(recipe: &Recipe, out: &Path, stop: Option<u64>) -> Vec<String> {
    let spec = RunSpec {
        recipe: recipe.clone(),
        out: out.to_path_buf(),
        device: fox_cpu::device(),
        command: Vec::new(),
    };
    let mut notices = Vec::new();
    train(&spec, &mut |event| {
        match event {
            Event::Notice(text) => notices.push(text.to_string()),
            Event::Step(record) if Some(record.step) == stop => return ControlFlow::Break(()),
            _ => {}
        }
        ControlFlow::Continue(())
    })
    .unwrap();
    notices
}

fn weights(out: &Path) -> Vec<u8> {
    fs::read(out.join("export/model.safetensors")).unwrap()
}

/// The tiny recipe of three stages on what a first run left: its lengths, a held-out loss at the last length at the end
/// of each stage, and the same bits when it is stopped within a stage or between two.
#[test]
fn length_stages_start_from_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let mut set = strings(&SMALL);
    set.extend(strings(&["training.tokens=4096", "data.sequence_length=64"]));
    set.push("schedule.warmup_tokens=512".into());
    run(&recipe::load("tiny-transformer", &set).unwrap(), &path("first"), None);

    let recipe = recipe::load_from("tiny-long-context", &path("first"), &[]).unwrap();
    assert_eq!((recipe.steps(), recipe.tokens_per_step()), (24, 1024));
    let notices = run(&recipe, &path("whole"), None);
    assert_eq!(notices, ["step 8: sequences of 128 tokens", "step 16: sequences of 256 tokens"]);
    let records = MetricsLog::read(&path("whole")).unwrap().records;
    let (mut steps, mut judged) = (Vec::new(), Vec::new());
    for record in &records {
        match record {
            Record::Train(step) => steps.push(step.tokens),
            Record::Eval(eval) => judged.push((eval.step, eval.evaluation.name())),
        }
    }
    assert!(steps.windows(2).all(|pair| pair[1] - pair[0] == 1024), "{steps:?}");
    let name = "held-out loss (8 x 256 tokens)".to_string();
    assert_eq!(judged, [(8, name.clone()), (16, name.clone()), (24, name)]);

    for stop in [5, 8, 17] {
        let out = path(&format!("stopped{stop}"));
        run(&recipe, &out, Some(stop));
        assert!(!out.join("export").exists());
        run(&recipe, &out, None);
        assert!(weights(&out) == weights(&path("whole")), "stopped after {stop} steps");
    }
}
