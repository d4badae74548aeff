//! `fox reproduce`: a tiny reproduction from the first run to the report, stopped and resumed.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use common::{stderr, succeeded, wait_until, wait_until_free};

/// A few steps of the models of the laptop scale.
const SCALE: &str = r#"
description = "A scale for tests"
suffix = "1m"
tokens = 2048
seeds = 2
warmup = 0.1
length = 512
documents = 3
needles = { lengths = [256, 300], depths = 2, cases = 1 }
inspect = 128
window = "window-32"
memory = [64, 256]
[set.training]
batch = 2
[set.data]
sequence_length = 64
[set.evaluation]
sequences = 4
[set.metrics]
every = 2
details_every = 2
"#;

fn scale(dir: &Path) -> PathBuf {
    let path = dir.join("scale.toml");
    fs::write(&path, SCALE).unwrap();
    path
}

fn command(scale: &Path, out: &Path, extra: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fox"));
    command.args(["reproduce", "tests"]).arg("--scale").arg(scale).arg("--out").arg(out);
    command.args(["--device", "cpu", "--jobs", "2", "--quiet"]).args(extra);
    command
}

fn json(path: &Path) -> serde_json::Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).to_string()
}

/// Run folders with a summary.
fn finished(out: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(out.join("runs")) else { return Vec::new() };
    let paths = entries.map(|entry| entry.unwrap().path());
    paths.filter(|path| path.join("summary.json").exists()).collect()
}

#[test]
fn dry_run_estimates_without_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    let scale = scale(dir.path());
    let before = fs::read_dir(dir.path()).unwrap().count();
    let dry_run = |extra: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_fox"))
            .current_dir(dir.path())
            .args(["reproduce", "--dry-run", "--only", "gates", "--device", "cpu", "--scale"])
            .arg(&scale)
            .args(extra)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        stdout(&output)
    };
    let json: serde_json::Value = serde_json::from_str(&dry_run(&["--json"])).unwrap();
    assert!(json["speed"]["tokens_per_second"].as_f64().unwrap() > 0.0, "{json}");
    assert_eq!(json["experiments"][1]["name"], "gates", "{json}");
    assert!(json["experiments"][1]["runs"].as_u64() > Some(1), "{json}");
    let text = dry_run(&[]);
    assert!(text.contains("estimate from ") && text.contains(" tokens/s of "), "{text}");
    let total = text.lines().find(|line| line.starts_with("total ")).unwrap();
    let minutes: f64 = total.split_whitespace().last().unwrap().parse().unwrap();
    assert!(minutes > 0.0, "{text}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), before, "something was written");
}

#[test]
fn killed_reproduction_resumes_and_reports() {
    let dir = tempfile::tempdir().unwrap();
    let (scale, out) = (scale(dir.path()), dir.path().join("out"));
    let only = ["--only", "gates,pruning"];
    let mut first = command(&scale, &out, &only).stdout(Stdio::null()).spawn().unwrap();
    wait_until("some runs are finished", || finished(&out).len() >= 4);
    first.kill().unwrap();
    first.wait().unwrap();
    // Child processes end by themselves, even those that are starting.
    std::thread::sleep(Duration::from_secs(2));
    fs::read_dir(out.join("runs")).unwrap().for_each(|run| wait_until_free(&run.unwrap().path()));
    let before: Vec<(PathBuf, std::time::SystemTime)> = finished(&out)
        .into_iter()
        .map(|run| {
            (run.clone(), fs::metadata(run.join("metrics.jsonl")).unwrap().modified().unwrap())
        })
        .collect();

    // A report of the finished runs needs no training.
    let report = |out: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fox"));
        command.args(["reproduce", "--report"]).arg(out).output().unwrap()
    };
    succeeded(&report(&out));
    let runs = json(&out.join("report.json"));
    assert!(runs["finished"].as_u64() < runs["runs"].as_u64(), "{runs}");

    let second = command(&scale, &out, &only).output().unwrap();
    assert!(second.status.success(), "{}{}", stdout(&second), stderr(&second));
    for (run, time) in &before {
        let now = fs::metadata(run.join("metrics.jsonl")).unwrap().modified().unwrap();
        assert_eq!(now, *time, "{} was trained again", run.display());
    }
    let whole = json(&out.join("report.json"));
    assert_eq!(whole["finished"], whole["runs"]);
    assert_eq!(whole["runs"], 1 + 3 + 2 + 2);
    let gates = &whole["experiments"][1];
    assert_eq!(gates["name"], "gates");
    let names: Vec<&str> =
        gates["rows"].as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(
        names[..3],
        ["data-dependent", "factor per key (not in the paper)", "data-independent, T_max 64"]
    );
    assert!(gates["rows"][0]["loss"]["mean"].as_f64().unwrap() > 0.0);
    // Every learning rate comes from the search: the best one is between two worse ones.
    let tried = whole["rates"]["fox-llama"]["tried"].as_array().unwrap();
    let best = whole["rates"]["fox-llama"]["best"].as_f64().unwrap();
    let at = tried.iter().position(|point| point["peak_lr"] == best).unwrap();
    assert!(at > 0 && at + 1 < tried.len(), "{tried:?}");
    assert_eq!(gates["rows"][1]["runs"][0]["peak_lr"], best);
    let markdown = fs::read_to_string(out.join("report.md")).unwrap();
    for part in ["## Kinds of forget gate", "## Adaptive computation pruning", "pictures/gates.svg"]
    {
        assert!(markdown.contains(part), "{part}\n{markdown}");
    }
    let html = fs::read_to_string(out.join("report.html")).unwrap();
    assert!(html.contains("<svg"));
    for outside in ["<script", "src=", "href=\"http"] {
        assert!(!html.contains(outside), "{outside}");
    }
    assert!(
        !out.join("runs").read_dir().unwrap().any(|run| run
            .unwrap()
            .path()
            .join("checkpoints")
            .exists())
    );

    let other = command(&scale, &out, &["--data", "elsewhere"]).output().unwrap();
    assert!(stderr(&other).contains("contains a reproduction at scale"), "{}", stderr(&other));
    let foreign = out.join("runs");
    let other = command(&scale, &foreign, &[]).output().unwrap();
    assert!(stderr(&other).contains("contains other files"), "{}", stderr(&other));
    assert!(!foreign.join("report.html").exists());
}

/// Pseudo-random text of a few thousand bytes.
fn story(words: usize, seed: usize) -> String {
    const WORDS: [&str; 8] = ["the", "fox", "forgot", "what", "it", "read", "yesterday", "again."];
    (0..words).map(|i| WORDS[(i * i + seed * i + i / 7) % 8]).collect::<Vec<_>>().join(" ")
}

fn prepare(dir: &Path, heldout: &[String]) -> PathBuf {
    let lines = |texts: &[String]| -> String {
        texts.iter().map(|text| format!("{}\n", serde_json::json!({ "text": text }))).collect()
    };
    fs::write(dir.join("train.jsonl"), lines(&[story(2000, 1), story(2000, 3)])).unwrap();
    fs::write(dir.join("heldout.jsonl"), lines(heldout)).unwrap();
    let out = dir.join("data");
    let mut command = Command::new(env!("CARGO_BIN_EXE_fox"));
    command.arg("prepare").arg(dir.join("train.jsonl")).arg(&out).args(["--tokenizer", "bytes"]);
    match heldout.is_empty() {
        true => command.args(["--heldout", "0"]),
        false => command.arg("--heldout-corpus").arg(dir.join("heldout.jsonl")),
    };
    succeeded(&command.output().unwrap());
    out
}

#[test]
fn main_comparison_on_given_text() {
    let dir = tempfile::tempdir().unwrap();
    let data = prepare(dir.path(), &[story(400, 5), story(300, 7)]);
    let (scale, out) = (scale(dir.path()), dir.path().join("out"));
    let extra = ["--data", data.to_str().unwrap(), "--only", "main", "--seeds", "1"];
    let output = command(&scale, &out, &extra).output().unwrap();
    assert!(output.status.success(), "{}{}", stdout(&output), stderr(&output));
    // Seven searches of about four runs, each with a fifth of the tokens.
    let said = stderr(&output);
    let row = said.lines().find(|line| line.starts_with("rates ")).unwrap();
    assert!(said.contains("estimate from"), "{said}");
    assert_eq!(row.split_whitespace().take(3).collect::<Vec<_>>(), ["rates", "28", "11,480"]);
    assert!(stdout(&output).contains("8 of 8 runs finished"), "{}", stdout(&output));
    // Chunks of both held-out documents, alternating.
    assert_eq!(fs::read_to_string(out.join("held-out.jsonl")).unwrap().lines().count(), 3);
    let report = json(&out.join("report.json"));
    let main = &report["experiments"][1];
    assert_eq!(main["rows"].as_array().unwrap().len(), 8);
    for row in main["rows"].as_array().unwrap() {
        for place in ["inside", "beyond", "loss"] {
            assert!(row[place]["mean"].as_f64().unwrap() > 0.0, "{row}");
        }
    }
    assert_eq!(main["claims"].as_array().unwrap().len(), 9);
    assert!(report["busy"].as_f64().unwrap() > 0.0);
    let markdown = fs::read_to_string(out.join("report.md")).unwrap();
    for part in ["## Needles", "## What heads remember", "## Time of every run"] {
        assert!(markdown.contains(part), "{part}");
    }
    for picture in ["loss-by-position", "needles-Mamba-2-easy", "half-lives-FoX--Pro"] {
        assert!(out.join(format!("pictures/{picture}.svg")).exists(), "{picture}");
    }
}

/// Recall, speed, memory and pruning in the report of the experiment about the start of the gates.
#[test]
fn start_of_the_gates_measures_recall_and_speed() {
    let dir = tempfile::tempdir().unwrap();
    let data = prepare(dir.path(), &[story(400, 5), story(300, 7)]);
    let (scale, out) = (scale(dir.path()), dir.path().join("out"));
    let extra = ["--data", data.to_str().unwrap(), "--only", "start", "--seeds", "1"];
    let output = command(&scale, &out, &extra).output().unwrap();
    assert!(output.status.success(), "{}{}", stdout(&output), stderr(&output));
    let report = json(&out.join("report.json"));
    let start = &report["experiments"][1];
    for row in start["rows"].as_array().unwrap() {
        let recall = row["recall"]["mean"].as_f64().unwrap();
        assert!((0.0..=1.0).contains(&recall), "{row}");
        let run = &row["runs"][0];
        assert!(run["tokens_per_second_alone"].as_f64().unwrap() > 0.0, "{row}");
        assert!(run["peak_memory"].as_u64().unwrap() > 1 << 20, "{row}");
    }
    // A claim about recall holds where the better row finds more.
    let claims = start["claims"].as_array().unwrap();
    let recall = claims.iter().find(|c| c["claim"].as_str().unwrap().starts_with("recall: "));
    let recall = recall.unwrap();
    assert_eq!(recall["holds"], recall["difference"]["mean"].as_f64().unwrap() > 0.0);
    let markdown = fs::read_to_string(out.join("report.md")).unwrap();
    for part in ["| candidates, 256 |", "| tokens/s alone | peak memory |", "candidates.svg"] {
        assert!(markdown.contains(part), "{part}\n{markdown}");
    }
}

/// Two stages with gates added between them: every second stage initializes from the first one of its seed, and the
/// report is made from the run folders alone.
#[test]
fn longer_contexts_from_transformer() {
    let dir = tempfile::tempdir().unwrap();
    let (scale, out) = (scale(dir.path()), dir.path().join("out"));
    let extra = ["--only", "longer", "--seeds", "1"];
    let output = command(&scale, &out, &extra).output().unwrap();
    assert!(output.status.success(), "{}{}", stdout(&output), stderr(&output));
    let report = json(&out.join("report.json"));
    assert_eq!((report["finished"].as_u64(), report["runs"].as_u64()), (Some(7), Some(7)));
    let rows = report["experiments"][1]["rows"].as_array().unwrap();
    let kept = rows.iter().find(|row| row["name"] == "gates added, RoPE kept").unwrap();
    let folder = out.join("runs").join(kept["runs"][0]["folder"].as_str().unwrap());
    let config = fs::read_to_string(folder.join("config.toml")).unwrap();
    assert!(config.contains("_gates128") && config.contains("sequence_length = 128"), "{config}");
    // The exported model has no RoPE after it faded out.
    let faded = rows.iter().find(|row| row["name"] == "gates added, RoPE faded out").unwrap();
    let folder = out.join("runs").join(faded["runs"][0]["folder"].as_str().unwrap());
    assert_eq!(json(&folder.join("export/config.json"))["use_rope"], false);
    let markdown = fs::read_to_string(out.join("report.md")).unwrap();
    for part in
        ["| loss at 8..15 | loss at 64..127 | loss at 256..511 |", "pictures/longer-contexts.svg"]
    {
        assert!(markdown.contains(part), "{part}\n{markdown}");
    }
    // Nothing is recomputed.
    succeeded(&command(&scale, &out, &extra).output().unwrap());
    assert_eq!(json(&out.join("report.json"))["experiments"], report["experiments"]);
}

#[test]
fn rejects_invalid_input() {
    let dir = tempfile::tempdir().unwrap();
    let (scale, out) = (scale(dir.path()), dir.path().join("out"));
    let error = |scale: &Path, extra: &[&str]| {
        let output = command(scale, &out, extra).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(!out.exists());
        let text = stderr(&output);
        assert_eq!(text.lines().count(), 1, "{text}");
        text
    };
    let text = error(&scale, &["--only", "table4"]);
    assert!(
        text.starts_with("error: there is no experiment `table4`; choose from rates, main"),
        "{text}"
    );
    let text = error(Path::new("huge"), &[]);
    assert_eq!(text, "error: there is no scale `huge`; choose from laptop, minutes, small, 125m\n");
    let short = prepare(dir.path(), &["A short text.".to_string()]);
    let text = error(&scale, &["--data", short.to_str().unwrap()]);
    assert!(text.contains("the longest held-out document of"), "{text}");
    assert!(text.contains("has 14 tokens, but the scale"), "{text}");
    let alone = tempfile::tempdir().unwrap();
    let none = prepare(alone.path(), &[]);
    let text = error(&scale, &["--data", none.to_str().unwrap()]);
    assert!(text.contains("has no held-out documents; prepare it with --heldout-corpus"), "{text}");
}
