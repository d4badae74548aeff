//! `fox demo`, made short: what it leaves behind, and going on after a stop.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// Ten steps a model, two documents, one needle a cell.
fn demo(out: &Path, tokens: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_fox"))
        .args(["demo", "--tokens", tokens, "--documents", "2", "--needles", "1", "--out"])
        .arg(out)
        .output()
        .unwrap()
}

fn said(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn the_report_stands_alone_and_a_second_run_only_evaluates() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("demo");
    let text = said(&demo(&out, "20480"));
    assert!(text.contains("Beyond the training length of 128 tokens"), "{text}");

    let page = fs::read_to_string(out.join("report.html")).unwrap();
    for part in ["Needles in a haystack", "What FoX forgets", "Speed", "A sample from FoX", "<svg"]
    {
        assert!(page.contains(part), "no {part}");
    }
    // Opens offline: nothing is loaded from anywhere.
    for outside in ["<script src", "<link", "src=\"http", "@import", "url(http"] {
        assert!(!page.contains(outside), "{outside}");
    }

    let numbers: Value = serde_json::from_slice(&fs::read(out.join("demo.json")).unwrap()).unwrap();
    assert_eq!(numbers["chance"], 0.125);
    for (i, folder) in ["fox", "transformer"].iter().enumerate() {
        assert!(out.join(folder).join("export/model.safetensors").is_file(), "{folder}");
        let model = &numbers["models"][i];
        // Ten steps are enough to leave the loss of a guess among all words, and not for much more.
        let loss = model["loss_beyond"].as_f64().unwrap();
        assert!(loss > 1.0 && loss < 5.5, "{folder}: {loss}");
        assert_eq!(model["training_losses"].as_array().unwrap().len(), 3, "{model}");
    }

    let before = fs::read(out.join("fox/metrics.jsonl")).unwrap();
    said(&demo(&out, "20480"));
    assert_eq!(fs::read(out.join("fox/metrics.jsonl")).unwrap(), before);
}

#[test]
fn another_demo_in_the_folder_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("demo");
    said(&demo(&out, "20480"));
    let report = fs::read(out.join("report.html")).unwrap();
    let output = demo(&out, "40960");
    assert_eq!(output.status.code(), Some(1));
    let sentence = String::from_utf8(output.stderr).unwrap();
    assert!(sentence.contains("training.tokens is 20480 there and 40960 here"), "{sentence}");
    assert_eq!(fs::read(out.join("report.html")).unwrap(), report);
}
