//! `fox sweep`: table, picture, search, and resuming.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use common::{recipe, stderr, succeeded, wait_until, wait_until_free};

fn sweep(items: &[&str], out: &Path, extra: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fox"));
    command.arg("sweep").args(items).arg("--out").arg(out).args(extra);
    command.args(["--quiet", "--set", "training.tokens=5120"]).output().unwrap()
}

#[test]
fn sweep_compares_recipes_and_reuses_finished_runs() {
    let dir = tempfile::tempdir().unwrap();
    let file = recipe(dir.path());
    let name = file.to_str().unwrap();
    let list = dir.path().join("list.toml");
    let text =
        format!("recipes = [\"{name}\", \"{name}+no-kv-shift\"]\n[set.training]\nbatch = 2\n");
    fs::write(&list, text).unwrap();
    let out = dir.path().join("sweep");
    let items = [list.to_str().unwrap(), &format!("{name}+rope")];
    let first = sweep(&items, &out, &[]);
    assert!(first.status.success(), "{}", stderr(&first));
    let printed = String::from_utf8_lossy(&first.stdout).to_string();
    assert!(
        printed.lines().all(|line| line.chars().count() <= 80 || line.contains('/')),
        "{printed}"
    );
    let table = fs::read_to_string(out.join("comparison.md")).unwrap();
    for row in ["| test |", "| test+no-kv-shift |", "| test+rope |"] {
        assert_eq!(table.matches(row).count(), 1, "{table}");
    }
    assert_eq!(table.matches("**").count(), 2, "one best run: {table}");
    let csv = fs::read_to_string(out.join("comparison.csv")).unwrap();
    assert_eq!(csv.lines().count(), 4);
    let svg = fs::read_to_string(out.join("comparison.svg")).unwrap();
    assert_eq!(svg.matches("<path class=\"line\"").count(), 3);
    let json: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(out.join("comparison.json")).unwrap()).unwrap();
    assert_eq!(json["complete"], true);
    assert_eq!(json["rows"][0]["summary"]["steps"], 40, "the list's batch of 2");
    assert_eq!(json["rows"][2]["summary"]["steps"], 20, "the recipe's batch of 4");

    // One run is deleted; only that one is trained again, with the same numbers.
    let metrics = out.join("runs/test/metrics.jsonl");
    let untouched = fs::metadata(&metrics).unwrap().modified().unwrap();
    fs::remove_dir_all(out.join("runs/test+rope")).unwrap();
    succeeded(&sweep(&items, &out, &[]));
    assert_eq!(fs::metadata(&metrics).unwrap().modified().unwrap(), untouched);
    let losses = |csv: &str| -> Vec<String> {
        csv.lines().map(|line| line.split(',').take(6).collect::<Vec<_>>().join(",")).collect()
    };
    let again = fs::read_to_string(out.join("comparison.csv")).unwrap();
    assert_eq!(losses(&again), losses(&csv));
}

#[test]
fn learning_rate_search_brackets_optimum() {
    bracketed("adamw");
}

#[test]
fn learning_rate_search_brackets_optimum_of_muon() {
    bracketed("muon");
}

fn bracketed(optimizer: &str) {
    let dir = tempfile::tempdir().unwrap();
    let file = recipe(dir.path());
    let out = dir.path().join("sweep");
    let name = format!("optimizer.name={optimizer}");
    succeeded(&sweep(&[file.to_str().unwrap()], &out, &["--search", "lr", "--set", &name]));
    let json: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(out.join("comparison.json")).unwrap()).unwrap();
    let mut tried: Vec<(f64, f64)> = json["rows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| {
            let loss = row["summary"]["evaluation"]["loss"].as_f64().unwrap_or(f64::INFINITY);
            (row["peak_lr"].as_f64().unwrap(), loss)
        })
        .collect();
    tried.sort_by(|a, b| a.0.total_cmp(&b.0));
    let best = (0..tried.len()).min_by(|a, b| tried[*a].1.total_cmp(&tried[*b].1)).unwrap();
    assert!(best > 0 && best + 1 < tried.len(), "the best is at the edge: {tried:?}");
}

#[test]
fn rejects_equal_names_and_unknown_recipes() {
    let dir = tempfile::tempdir().unwrap();
    let file = recipe(dir.path());
    let name = file.to_str().unwrap();
    let out = dir.path().join("sweep");
    let output = sweep(&[name, name], &out, &[]);
    assert!(stderr(&output).starts_with("error: two recipes of the sweep are called `test`"));
    let output = sweep(&["tiny-fox-por"], &out, &[]);
    assert!(stderr(&output).contains("did you mean `tiny-fox-pro`?"), "{}", stderr(&output));
    assert!(!out.exists());
}

/// Label, tokens and losses of every line of comparison.csv.
fn figures(out: &Path) -> Vec<String> {
    let csv = fs::read_to_string(out.join("comparison.csv")).unwrap();
    csv.lines().map(|line| line.split(',').take(7).collect::<Vec<_>>().join(",")).collect()
}

#[test]
fn grid_with_seeds_is_independent_of_jobs() {
    let dir = tempfile::tempdir().unwrap();
    let file = recipe(dir.path());
    let grid = ["--set", "training.seed=0..1", "--set", "optimizer.peak_lr=1e-3,5e-3"];
    let (one, two) = (dir.path().join("one"), dir.path().join("two"));
    succeeded(&sweep(&[file.to_str().unwrap()], &one, &grid));
    let jobs = [&grid[..], &["--jobs", "3"]].concat();
    succeeded(&sweep(&[file.to_str().unwrap()], &two, &jobs));
    assert_eq!(figures(&one), figures(&two));
    let table = fs::read_to_string(two.join("comparison.md")).unwrap();
    for lr in ["1e-3", "5e-3"] {
        let row = format!("| test peak_lr {lr} seed 1 |");
        assert_eq!(table.matches(&row).count(), 1, "{table}");
        assert_eq!(table.matches(&format!("| test peak_lr {lr} | 2 |")).count(), 1, "{table}");
    }
    // The mean of two values and their interval, by hand: 12.706 times half their difference.
    let text = fs::read_to_string(two.join("comparison.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let loss = |row: usize| json["rows"][row]["summary"]["evaluation"]["loss"].as_f64().unwrap();
    let same = |row: usize| json["rows"][row]["group"] == json["rows"][0]["group"];
    let other = (1..4).find(|row| same(*row)).unwrap();
    let found = &json["seeds"][0]["loss"];
    let (a, b) = (loss(0), loss(other));
    assert!((found["mean"].as_f64().unwrap() - (a + b) / 2.0).abs() < 1e-12);
    let half = 12.706 * (a - b).abs() / 2.0;
    assert!((found["half_width"].as_f64().unwrap() - half).abs() < 1e-9);
}

#[test]
fn failed_run_does_not_end_sweep() {
    let dir = tempfile::tempdir().unwrap();
    let good = recipe(dir.path());
    let bad = dir.path().join("bad.toml");
    fs::write(&bad, "extends = \"test.toml\"\n[data]\ntokenizer = \"bytes\"\n").unwrap();
    let out = dir.path().join("sweep");
    let items = [bad.to_str().unwrap(), good.to_str().unwrap()];
    let output = sweep(&items, &out, &["--jobs", "2"]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let table = fs::read_to_string(out.join("comparison.md")).unwrap();
    assert!(table.contains("| bad | | | 5e-3 | failed | | | | |"), "{table}");
    assert!(
        table.contains("bad failed: ") && table.contains("`data.tokenizer` is bytes"),
        "{table}"
    );
    assert!(table.contains("| test | "), "{table}");
    let csv = fs::read_to_string(out.join("comparison.csv")).unwrap();
    assert!(
        csv.lines().any(|line| line.starts_with("\"test\",") && line.ends_with(",false,false"))
    );
}

#[test]
fn killed_sweep_ends_children_and_resumes() {
    let dir = tempfile::tempdir().unwrap();
    let file = recipe(dir.path());
    let out = dir.path().join("sweep");
    let start = |tokens: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fox"));
        command.arg("sweep").arg(&file).arg("--out").arg(&out);
        command.args(["--quiet", "--jobs", "2", "--set", "training.seed=0..1"]);
        command.args(["--set", tokens]).args(["--device", "cpu"]);
        command.stdout(std::process::Stdio::null()).spawn().unwrap()
    };
    // Takes minutes unless it is stopped.
    let tokens = "training.tokens=50000000";
    let mut parent = start(tokens);
    let runs = ["test_seed_0", "test_seed_1"].map(|name| out.join("runs").join(name));
    let lines =
        |run: &Path| fs::read_to_string(run.join("metrics.jsonl")).map_or(0, |t| t.lines().count());
    wait_until("both are trained", || runs.iter().all(|run| lines(run) > 5));
    parent.kill().unwrap();
    parent.wait().unwrap();
    for run in &runs {
        wait_until_free(run);
        assert!(!run.join("summary.json").exists());
    }
    let mut again = start(tokens);
    let before: Vec<usize> = runs.iter().map(|run| lines(run)).collect();
    wait_until("both go on", || {
        runs.iter().zip(&before).all(|(run, before)| lines(run) > before + 5)
    });
    again.kill().unwrap();
    again.wait().unwrap();
    runs.iter().for_each(|run| wait_until_free(run));
}
