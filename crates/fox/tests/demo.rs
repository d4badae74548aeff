//! A short `fox demo`: its figures, its files, and resuming.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use fox_data::{SyntheticConfig, SyntheticDataset, SyntheticTokenizer};
use fox_eval::Subject;
use fox_eval::loss::{LossOptions, evaluate_loss};
use fox_eval::needle::{Grid, ModelReader, SyntheticCases, run_needle};
use fox_model::{Model, Pruning};
use serde_json::Value;

/// A few steps per model, two documents, one needle per cell.
fn demo(out: &Path, more: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_fox"))
        .args(["demo", "--device", "cpu", "--documents", "2", "--needles", "1", "--out"])
        .arg(out)
        .args(more)
        .output()
        .unwrap()
}

fn said(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is not a number"))
}

#[test]
fn demo_losses_match_evaluation_and_exceed_entropy() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("demo");
    let args = ["--tokens", "8192", "--seed", "3", "--seeds", "2", "--threads", "2", "--json"];
    let numbers: Value = serde_json::from_str(&said(&demo(&out, &args))).unwrap();
    assert_eq!(numbers["chance"], 1.0 / 16.0);
    let attainable = ["attainable_inside", "attainable_beyond"].map(|key| number(&numbers[key]));
    let models = numbers["models"].as_array().unwrap();
    let names: Vec<&str> = models.iter().map(|m| m["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["FoX", "Transformer (RoPE 10k)", "Transformer (RoPE 500k)"]);

    let config = SyntheticConfig { document_len: 1024, ..SyntheticConfig::default() }.held_out();
    let pruning = Pruning::Tolerance(-10.0);
    for model in models {
        let seeds = model["seeds"].as_array().unwrap();
        assert_eq!(seeds.iter().map(|s| s["seed"].as_u64().unwrap()).collect::<Vec<_>>(), [3, 4]);
        let mean = |key: &str| seeds.iter().map(|s| number(&s[key])).sum::<f64>() / 2.0;
        for key in ["change", "needles", "loss_inside", "loss_beyond"] {
            assert!((mean(key) - number(&model[key]["value"])).abs() < 1e-9, "{key}: {model}");
        }
        for seed in seeds {
            for (key, floor) in ["loss_inside", "loss_beyond"].iter().zip(attainable) {
                assert!(number(&seed[key]) > floor, "{key} {floor} {seed}");
            }
        }

        // The first run again, evaluated from its folder.
        let folder = Path::new(seeds[0]["folder"].as_str().unwrap()).join("export");
        let opened = Model::from_checkpoint(&folder, &fox_cpu::device()).unwrap();
        let subject = Subject { name: "again", model: &opened, training_length: Some(256) };
        let options = LossOptions { length: 1024, documents: 2, pruning, mask_every: 8 };
        let data = SyntheticDataset::new(config);
        let losses = evaluate_loss(&subject, &data, &options, None, |_| ()).unwrap().mean();
        let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
        let change = mean(&losses[512..1024]) - mean(&losses[128..256]);
        assert_eq!(number(&seeds[0]["change"]), change);
        let grid = Grid { lengths: vec![1024], depths: Grid::even_depths(5), cases: 1 };
        let mut reader = ModelReader::new(subject, pruning);
        let decode = |ids: &[u32]| Ok(SyntheticTokenizer.decode(ids)?);
        let cases = SyntheticCases { config };
        let map = run_needle("m", &mut reader, &cases, &grid, &decode, None, |_| ()).unwrap();
        assert_eq!(number(&seeds[0]["needles"]), map.accuracy_at(1024));
    }

    let page = fs::read_to_string(out.join("report.html")).unwrap();
    for part in ["training length", "A new chapter begins.", "Where FoX wins", "Needles in a hay"] {
        assert!(page.contains(part), "no {part}");
    }
    // The report is self-contained: it loads no external resource.
    for outside in ["<script src", "<link", "src=\"http", "@import", "url(http"] {
        assert!(!page.contains(outside), "{outside}");
    }

    // A second start with another number of threads only evaluates, with the same result.
    let metrics = out.join("fox-seed-3/metrics.jsonl");
    let before = fs::read(&metrics).unwrap();
    let args = ["--tokens", "8192", "--seed", "3", "--seeds", "2", "--threads", "1"];
    let text = said(&demo(&out, &args));
    assert!(text.contains("Trained on sequences of 256 tokens and evaluated up to 1024"), "{text}");
    assert_eq!(fs::read(&metrics).unwrap(), before);
    let again: Value = serde_json::from_slice(&fs::read(out.join("demo.json")).unwrap()).unwrap();
    for (a, b) in models.iter().zip(again["models"].as_array().unwrap()) {
        for key in ["change", "needles", "loss_inside", "loss_beyond"] {
            assert_eq!(a[key], b[key], "{key}");
        }
    }
    assert_eq!(numbers["comparisons"][0], again["comparisons"][0]);

    // A folder with another demo is refused and unchanged.
    let page = fs::read(out.join("report.html")).unwrap();
    let output = demo(&out, &["--tokens", "16384", "--seed", "3"]);
    assert_eq!(output.status.code(), Some(1));
    let sentence = String::from_utf8(output.stderr).unwrap();
    assert!(sentence.contains("training.tokens is 8192 there and 16384 here"), "{sentence}");
    assert!(fs::read(out.join("report.html")).unwrap() == page);
}

#[test]
fn bits_do_not_depend_on_concurrent_models() {
    let dir = tempfile::tempdir().unwrap();
    let run = |threads: &str| -> Vec<u8> {
        let out = dir.path().join(threads);
        said(&demo(&out, &["--tokens", "4096", "--seeds", "1", "--threads", threads]));
        fs::read(out.join("rope-10k-seed-0/export/model.safetensors")).unwrap()
    };
    assert!(run("1") == run("3"));
}

#[test]
fn rejects_invalid_arguments() {
    let dir = tempfile::tempdir().unwrap();
    for (args, want) in [
        (&["--simd", "sse9"][..], "--simd sse9: this CPU has "),
        (&["--length", "100"], "64, 128, 256, 512, 1024, 2048 or 4096"),
        (&["--seeds", "0"], "--seeds"),
    ] {
        let output = demo(&dir.path().join("x"), args);
        assert!(!output.status.success(), "{args:?}");
        let sentence = String::from_utf8(output.stderr).unwrap();
        assert!(sentence.contains(want), "{sentence}");
    }
    assert!(!dir.path().join("x").exists());
}
