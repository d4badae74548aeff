//! `fox eval accuracy` on runs of small tasks.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::{complaint, outcome, text};
use serde_json::Value;

/// A flip-flop of 16 tokens: 10 steps of a tiny model.
const SMALL: [&str; 9] = [
    "data.sequence_length=16",
    "data.task.train=[[16, 0.5]]",
    "data.task.test=[[16, 0.5], [64, 0.9]]",
    "data.task.test_cases=30",
    "training.tokens=1280",
    "training.batch=8",
    "schedule.warmup_tokens=128",
    "evaluation.sequences=4",
    "model.hidden_size=64",
];

/// Trains a recipe with the small sizes; returns its folder and output.
fn trained(dir: &Path, recipe: &str, name: &str, extra: &[&str]) -> (PathBuf, String) {
    let out = dir.join(name);
    let mut args = vec!["train", recipe, "--quiet", "--device", "cpu", "--out", text(&out)];
    for change in SMALL.iter().chain(extra) {
        args.extend(["--set", change]);
    }
    let (done, printed, said) = outcome(&args);
    assert!(done, "{said}");
    (out, printed)
}

#[test]
fn accuracy_groups_runs_by_setting_and_seed() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = "task-flip-flop+fox-llama";
    let (a, printed) = trained(dir.path(), recipe, "seed0", &[]);
    assert!(printed.contains(" answers)"), "{printed}");
    let (b, _) = trained(dir.path(), recipe, "seed1", &["training.seed=1"]);
    let (c, _) = trained(dir.path(), "task-flip-flop+hgrn2", "hgrn2", &[]);
    let out = dir.path().join("accuracy");
    let args =
        ["eval", "accuracy", text(&a), text(&b), text(&c), "--device", "cpu", "--out", text(&out)];
    let (done, printed, said) = outcome(&args);
    assert!(done, "{said}");
    for part in [
        "16 x 0.5 ",
        "64 x 0.9*",
        "answers right (%)",
        "cases right (%)",
        "length in tokens x ignored",
    ] {
        assert!(printed.contains(part), "{part} in {printed}");
    }
    let json: Value =
        serde_json::from_slice(&fs::read(out.join("accuracy.json")).unwrap()).unwrap();
    let models = json["models"].as_array().unwrap();
    assert_eq!(models[0]["name"], "fox-llama (2 seeds)");
    assert_eq!((&models[1]["name"], models.len()), (&"hgrn2".into(), 2));
    assert_eq!(models[0]["runs"][1]["seed"], 1);
    let shares: Vec<f64> = models[0]["runs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|run| &run["scores"][1])
        .map(|s| s["answers_right"].as_f64().unwrap() / s["answers"].as_f64().unwrap())
        .collect();
    let cell = &models[0]["cells"][1];
    let mean = (shares[0] + shares[1]) / 2.0;
    assert!((cell["answers"]["value"].as_f64().unwrap() - mean).abs() < 1e-12);
    assert_eq!((&cell["length"], &cell["difficulty"]), (&64.into(), &0.9.into()));
    assert_eq!(models[1]["runs"][0]["scores"][0]["cases"], 30);
    // A few steps learn to answer with a bit, and no more: about half of the answers are right.
    assert!((0.2..0.8).contains(&mean), "{mean}");
    for picture in ["answers.svg", "cases.svg"] {
        assert!(fs::read_to_string(out.join(picture)).unwrap().contains("hgrn2"), "{picture}");
    }
    // Stored answers are reused; other settings are evaluated.
    let path = out.join("hgrn2.accuracy.json");
    let known = fs::read_to_string(&path).unwrap();
    fs::write(&path, known.replace("\"cases\": 30", "\"cases\": 31")).unwrap();
    let again = |extra: &[&str]| -> Value {
        let args = ["eval", "accuracy", text(&c), "--json", "--device", "cpu", "--out", text(&out)];
        let (done, printed, said) = outcome(&[&args[..], extra].concat());
        assert!(done, "{said}");
        serde_json::from_str(&printed).unwrap()
    };
    assert_eq!(again(&[])["models"][0]["runs"][0]["scores"][0]["cases"], 31);
    let other = again(&["--settings", "32x0.1,16x0.5", "--cases", "7"]);
    let scores = &other["models"][0]["runs"][0]["scores"];
    assert_eq!((&scores[0]["length"], &scores[1]["cases"]), (&32.into(), &7.into()));
}

#[test]
fn rejects_runs_without_task() {
    let dir = tempfile::tempdir().unwrap();
    let (flip, _) = trained(dir.path(), "task-flip-flop+fox-llama", "flip", &[]);
    let parity = ["data.task.train=[[16, 0]]", "data.task.test=[[16, 0]]"];
    let (parity, _) = trained(dir.path(), "task-parity+fox-llama", "parity", &parity);
    let out = dir.path().join("out");
    let with =
        |args: &[&str]| complaint(&[args, &["--device", "cpu", "--out", text(&out)]].concat());
    assert_eq!(
        with(&["eval", "accuracy", text(&flip), text(&parity)]),
        "error: parity was trained on another task than flip (parity and flip-flop); score one task at a time"
    );
    assert_eq!(
        with(&["eval", "accuracy", text(&flip), "--settings", "15x0.5"]),
        "error: task flip-flop: test has cases of 15 tokens; give an even number"
    );
    let said = with(&["compare", text(&flip)]);
    assert_eq!(
        said,
        "error: flip was trained on the task flip-flop, which has no text; use `fox eval accuracy`"
    );
    let said = with(&["eval", "loss", text(&flip)]);
    assert!(
        said.ends_with(
            "was trained on the task flip-flop, which has no text; use `fox eval accuracy`"
        ),
        "{said}"
    );
    let bare = dir.path().join("bare");
    let (done, ..) =
        outcome(&["train", "--out", text(&flip), "--export", text(&bare), "--device", "cpu"]);
    assert!(done);
    assert_eq!(
        with(&["eval", "accuracy", text(&bare)]),
        "error: bare is not a run of a task; train one, e.g. `fox train task-mqar+fox-pro`, and give its folder"
    );
    let said = with(&["train", "task-flipflop"]);
    assert!(said.contains("did you mean `task-flip-flop`?"), "{said}");
}
