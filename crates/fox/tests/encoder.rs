//! An encoder on the command line: trained, evaluated, inspected, embedded with, and refused where text is generated.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;

use std::path::Path;

use common::succeed;
use serde_json::Value;

fn printed(args: &[&str]) -> String {
    succeed(&[args, &["--device", "cpu"]].concat())
}

/// The error message of a failing command, one sentence.
fn complaint(args: &[&str]) -> String {
    common::complaint(&[args, &["--device", "cpu"]].concat())
}

/// Trains a recipe for 20 steps of 256 tokens; returns the output.
fn trained(recipe: &str, out: &Path) -> String {
    let mut args = vec!["train", recipe, "--out", out.to_str().unwrap()];
    for set in [
        "model.hidden_size=32",
        "model.intermediate_size=48",
        "data.sequence_length=64",
        "training.batch=4",
        "training.tokens=5120",
        "schedule.warmup_tokens=512",
        "evaluation.sequences=4",
    ] {
        args.extend(["--set", set]);
    }
    printed(&args)
}

#[test]
fn encoder_is_trained_evaluated_and_embedded_with() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let (run, causal) = (at("encoder"), at("causal"));
    let summary = trained("tiny-encoder", &run);
    assert!(summary.contains(" masked tokens)") && summary.contains("fox embed "), "{summary}");
    assert!(!summary.contains("fox generate"), "{summary}");
    trained("tiny-fox-pro", &causal);
    let (run, causal) = (run.to_str().unwrap(), causal.to_str().unwrap());

    // Beyond the training length, with other numbers of masks.
    let length = ["--length", "128", "--documents", "3", "--json"];
    let loss = |every: &str| {
        let args = [&["eval", "loss", run, "--mask-every", every], &length[..]].concat();
        let curves: Value = serde_json::from_str(&printed(&args)).unwrap();
        curves[0]["mean"]["value"].as_f64().unwrap()
    };
    let (some, few) = (loss("4"), loss("16"));
    assert!(some > 1.0 && few > 1.0 && some != few, "{some} {few}");
    let text = complaint(&["eval", "loss", run, causal, "--length", "64", "--documents", "2"]);
    assert!(text.contains("an encoder and a causal model, whose losses cannot"), "{text}");

    let page = at("page.html");
    let inspected = ["inspect", run, "--length", "96", "--json", "--out", page.to_str().unwrap()];
    let seen: Value = serde_json::from_str(&printed(&inspected)).unwrap();
    let map = |name: &str| seen["pictures"][0][name].clone();
    // Queries look at later keys, and the forget matrix is symmetric.
    assert!(map("attention_map")[0][90].as_f64().is_some());
    assert_eq!(map("forget_matrix")[2][40], map("forget_matrix")[40][2]);

    let vectors = |args: &[&str]| -> Vec<Value> {
        let lines = printed(&[&["embed", run], args].concat());
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let file = at("texts.jsonl");
    let texts = "{\"text\": \"alba is red .\"}\n{\"text\": \"bruno is blue . alba\"}\n";
    std::fs::write(&file, texts).unwrap();
    let both = vectors(&["--file", file.to_str().unwrap()]);
    let alone = vectors(&["--text", "bruno is blue . alba"]);
    assert_eq!(both.len(), 2);
    assert_eq!(both[1]["embedding"], alone[0]["embedding"]);
    assert_ne!(both[0]["embedding"], both[1]["embedding"]);
    assert_eq!(alone[0]["embedding"].as_array().unwrap().len(), 32);
    let unit = vectors(&["--text", "bruno is blue .", "--normalize", "--length", "2"]);
    let values = unit[0]["embedding"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap());
    let norm: f64 = values.map(|x| x * x).sum();
    assert!((norm - 1.0).abs() < 1e-5, "{norm}");
    assert_eq!((&unit[0]["tokens"], &unit[0]["cut"]), (&2.into(), &true.into()));

    for command in
        [&["generate", run, "-p", "alba"][..], &["chat", run], &["serve", run, "--port", "0"]]
    {
        let text = complaint(command);
        assert!(text.contains("the model is an encoder: it predicts masked tokens"), "{text}");
    }
    let text = complaint(&["embed", run]);
    assert!(text.contains("give a text with --text, or texts with --file"), "{text}");
    let text = complaint(&["embed", run, "--text", ""]);
    assert!(text.contains("a text without tokens has no embedding"), "{text}");
}
