//! The pretrained model of the repository, which commands use when no model is named.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;

use std::path::Path;

use common::succeed;
use serde_json::Value;

fn folder() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/books-16m")
}

#[test]
fn generates_english_without_a_model_argument() {
    let args = ["generate", "-p", "It was a dark and", "-m", "120", "-t", "0", "--device", "cpu"];
    let text = succeed(&args);
    assert_eq!(text, succeed(&args), "greedy decoding is deterministic");
    let words: Vec<&str> = text.split_whitespace().collect();
    let common = ["the", "of", "and", "a", "to", "in", "was", "his", "that", "had", "with"];
    let known = words.iter().filter(|word| common.contains(word)).count();
    assert!(words.len() > 12 && known * 5 > words.len(), "not English: {text}");
}

#[test]
fn prompt_may_be_positional() {
    let rest = ["-m", "8", "-t", "0", "--device", "cpu"];
    let by_flag = succeed(&[&["generate", "-p", "It was a dark"][..], &rest].concat());
    assert_eq!(succeed(&[&["generate", "It was a dark"][..], &rest].concat()), by_flag);
    let model = folder();
    let named = [&["generate", model.to_str().unwrap(), "It was a dark"][..], &rest].concat();
    assert_eq!(succeed(&named), by_flag);
}

#[test]
fn inspects_quoted_words() {
    let dir = tempfile::tempdir().unwrap();
    let page = dir.path().join("page.html");
    let words = "It was a dark and stormy night";
    let args = ["inspect", "--text", words, "--out", page.to_str().unwrap(), "--device", "cpu"];
    let numbers: Value =
        serde_json::from_str(&succeed(&[&args[..], &["--json"]].concat())).unwrap();
    // The start marker and the bytes of the text.
    assert_eq!(numbers["tokens"].as_array().unwrap().len(), words.len() + 1);
    let page = std::fs::read_to_string(page).unwrap();
    assert!(
        page.contains("with: fox inspect --text &#39;It was")
            || page.contains("with: fox inspect --text 'It was")
    );
}

#[test]
fn sample_has_local_and_global_heads() {
    let dir = tempfile::tempdir().unwrap();
    let page = dir.path().join("page.html");
    let table = succeed(&["inspect", "--out", page.to_str().unwrap(), "--device", "cpu"]);
    let count = |reach: &str| table.lines().filter(|line| line.contains(reach)).count();
    assert!(count("local") >= 16 && count("global") >= 4, "{table}");
    assert!(std::fs::read_to_string(page).unwrap().contains("</html>"));
}

#[test]
fn heldout_loss_matches_model_card() {
    let dir = tempfile::tempdir().unwrap();
    let (model, sample) = (folder(), folder().join("sample.txt"));
    let out = dir.path().join("loss");
    let json = succeed(&[
        "eval",
        "loss",
        model.to_str().unwrap(),
        "--data",
        sample.to_str().unwrap(),
        "--length",
        "4096",
        "--documents",
        "2",
        "--out",
        out.to_str().unwrap(),
        "--json",
        "--device",
        "cpu",
    ]);
    let report: Value = serde_json::from_str(&json).unwrap();
    let loss = report[0]["mean"]["value"].as_f64().unwrap();
    assert!((0.9..1.3).contains(&loss), "{loss} nats per byte");
}

#[test]
fn file_fits_16_mib() {
    let bytes = std::fs::metadata(folder().join("model.safetensors")).unwrap().len();
    assert!(bytes <= 16 << 20, "{bytes} bytes");
}
