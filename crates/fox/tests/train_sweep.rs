//! `fox sweep`: the table, the picture, the search, and going on.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod train_common;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use train_common::{recipe, stderr};

fn sweep(items: &[&str], out: &Path, extra: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fox"));
    command.arg("sweep").args(items).arg("--out").arg(out).args(extra);
    command.args(["--quiet", "--set", "training.tokens=5120"]).output().unwrap()
}

#[test]
fn recipes_are_compared_and_finished_runs_are_not_trained_again() {
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
    let table = String::from_utf8_lossy(&first.stdout).to_string();
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

    // One run is taken back; only that one is trained again, to the same numbers.
    let metrics = out.join("runs/test/metrics.jsonl");
    let untouched = fs::metadata(&metrics).unwrap().modified().unwrap();
    fs::remove_dir_all(out.join("runs/test+rope")).unwrap();
    let second = sweep(&items, &out, &[]);
    assert!(second.status.success(), "{}", stderr(&second));
    assert_eq!(fs::metadata(&metrics).unwrap().modified().unwrap(), untouched);
    let losses = |csv: &str| -> Vec<String> {
        csv.lines().map(|line| line.split(',').take(6).collect::<Vec<_>>().join(",")).collect()
    };
    let again = fs::read_to_string(out.join("comparison.csv")).unwrap();
    assert_eq!(losses(&again), losses(&csv));
}

#[test]
fn a_learning_rate_is_bracketed() {
    bracketed("adamw");
}

#[test]
fn a_learning_rate_of_muon_is_bracketed() {
    bracketed("muon");
}

fn bracketed(optimizer: &str) {
    let dir = tempfile::tempdir().unwrap();
    let file = recipe(dir.path());
    let out = dir.path().join("sweep");
    let name = format!("optimizer.name={optimizer}");
    let output = sweep(&[file.to_str().unwrap()], &out, &["--search", "lr", "--set", &name]);
    assert!(output.status.success(), "{}", stderr(&output));
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
fn equal_names_and_unknown_recipes_get_one_sentence() {
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
