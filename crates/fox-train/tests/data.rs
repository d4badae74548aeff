//! The data of a recipe: held-out documents that are none are refused.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use fox_data::{HeldOut, PrepareOptions, Tokenizer, prepare};
use fox_train::data::RunData;
use fox_train::recipe::load;

/// Prepares 50 documents and gives the folder.
fn prepared(folder: &Path, name: &str, tokenizer: &str, held_out: HeldOut) -> PathBuf {
    let corpus = folder.join("corpus.jsonl");
    let line = |i| format!("{{\"text\": \"document number {i}\"}}\n");
    fs::write(&corpus, (0..50).map(line).collect::<String>()).unwrap();
    let out = folder.join(name);
    let tokenizer = Tokenizer::from_name(tokenizer).unwrap();
    let options = PrepareOptions { held_out, ..PrepareOptions::new(&corpus, &out, tokenizer) };
    prepare(&options, |_| ControlFlow::Continue(())).unwrap();
    out
}

/// What is said about training on one folder and evaluating on another; nothing when it may be done.
fn said(path: &Path, heldout: &Path) -> Option<String> {
    let mut recipe = load("tiny-fox-pro", &[]).unwrap();
    recipe.data.path = Some(path.to_path_buf());
    recipe.data.heldout = Some(heldout.to_path_buf());
    RunData::open(&recipe).err().map(|error| error.to_string())
}

const SAME: &str = "tiny-fox-pro: `data.heldout` has the documents that are trained on; give others, or leave it out for the held-out part of the data";

#[test]
fn rejects_training_data_as_held_out() {
    let dir = tempfile::tempdir().unwrap();
    let whole = prepared(dir.path(), "whole", "bytes", HeldOut::None);
    let fraction = HeldOut::Fraction { fraction: 0.2, seed: 0 };
    let split = prepared(dir.path(), "split", "bytes", fraction.clone());
    assert_eq!(said(&whole, &whole).as_deref(), Some(SAME));
    assert_eq!(said(&whole, &dir.path().join("split/../whole")).as_deref(), Some(SAME));
    assert_eq!(said(&split, &split), None);
    // The same documents prepared once more, elsewhere.
    let copy = prepared(dir.path(), "copy", "bytes", HeldOut::None);
    assert_eq!(said(&whole, &copy).as_deref(), Some(SAME));
    let other = prepared(dir.path(), "other", "gpt2", fraction);
    let error = said(&split, &other).unwrap();
    assert!(
        error.contains("was made with tokenizer gpt2:") && error.contains("not bytes:"),
        "{error}"
    );
}

#[test]
fn arrays_are_identified_by_path() {
    let dir = tempfile::tempdir().unwrap();
    let array = |place: &str| {
        let path = dir.path().join(place).join("tokens.zarr");
        fs::create_dir_all(&path).unwrap();
        let metadata = r#"{"zarr_format": 2, "shape": [4, 8], "chunks": [4, 8], "dtype": "<u2",
            "order": "C", "fill_value": 0, "filters": null, "compressor": null}"#;
        fs::write(path.join(".zarray"), metadata).unwrap();
        path
    };
    let (a, b) = (array("a"), array("b"));
    assert_eq!(said(&a, &a).as_deref(), Some(SAME));
    assert_eq!(said(&a, &b), None);
}
