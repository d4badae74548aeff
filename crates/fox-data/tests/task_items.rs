//! The items of the small tasks in `bench/tasks` are those of the held-out part of the synthetic corpus.
//!
//! - `fox_needles.jsonl`: a text with a fact and a question for it, the actions that may answer, the right one;
//! - `fox_texts.jsonl`: documents, each as a text and its last word.
#![allow(clippy::unwrap_used)] // helpers of tests

use std::fs;
use std::path::Path;

use fox_data::synthetic::SyntheticDocument;
use fox_data::{NeedleCase, SyntheticConfig, SyntheticTokenizer};
use serde_json::json;

const NEEDLES: u64 = 100;
const NEEDLE_CONTEXT: usize = 64;
const TEXTS: u64 = 50;
const TEXT_TOKENS: usize = 200;

/// What is on file must be `lines`; with FOX_WRITE_TASKS=1 it is written instead.
fn check(name: &str, lines: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/tasks").join(name);
    if std::env::var_os("FOX_WRITE_TASKS").is_some() {
        fs::write(&path, lines).unwrap();
    }
    let on_file = fs::read_to_string(&path).unwrap();
    assert!(
        on_file == lines,
        "{name} is not what the corpus gives; write it with FOX_WRITE_TASKS=1"
    );
}

#[test]
fn needles() {
    let config = SyntheticConfig::default().held_out();
    let mut lines = String::new();
    for i in 0..NEEDLES {
        let depth = i as f64 / (NEEDLES - 1) as f64;
        let case = NeedleCase::new(&config, i, NEEDLE_CONTEXT, depth);
        let choices: Vec<_> =
            case.candidates.iter().filter_map(|id| SyntheticTokenizer.word(*id)).collect();
        let answer = case.candidates.iter().position(|id| *id == case.answer);
        let text = SyntheticTokenizer.decode(&case.prompt).unwrap();
        lines += &format!("{}\n", json!({ "text": text, "choices": choices, "answer": answer }));
    }
    check("fox_needles.jsonl", &lines);
}

#[test]
fn texts() {
    let config = SyntheticConfig::default().held_out();
    let mut lines = String::new();
    for i in 0..TEXTS {
        let document = SyntheticDocument::new(&config, i).take(TEXT_TOKENS);
        let ids: Vec<u32> = document.map(|token| token.id).collect();
        let (text, last) = ids.split_at(ids.len() - 1);
        let [text, last] = [text, last].map(|ids| SyntheticTokenizer.decode(ids).unwrap());
        lines += &format!("{}\n", json!({ "text": text, "last": last }));
    }
    check("fox_texts.jsonl", &lines);
}
