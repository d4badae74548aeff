//! The items of the small tasks in `bench/tasks`, from the held-out part of the synthetic corpus.
//!
//! `cargo run -p fox-data --example task_items -- bench/tasks` writes
//!
//! - `fox_needles.jsonl`: a text with a fact and a question for it, the actions that may answer, the right one;
//! - `fox_texts.jsonl`: documents, each as a text and its last word.

use std::error::Error;
use std::fs;
use std::path::PathBuf;

use fox_data::synthetic::SyntheticDocument;
use fox_data::{NeedleCase, SyntheticConfig, SyntheticTokenizer};
use serde_json::json;

const NEEDLES: u64 = 100;
const NEEDLE_CONTEXT: usize = 64;
const TEXTS: u64 = 50;
const TEXT_TOKENS: usize = 200;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = PathBuf::from(std::env::args().nth(1).ok_or("name a folder to write to")?);
    let config = SyntheticConfig::default().held_out();
    let mut lines = String::new();
    for i in 0..NEEDLES {
        let depth = i as f64 / (NEEDLES - 1) as f64;
        let case = NeedleCase::new(&config, i, NEEDLE_CONTEXT, depth);
        let choices: Vec<_> =
            case.candidates.iter().filter_map(|id| SyntheticTokenizer.word(*id)).collect();
        let answer = case.candidates.iter().position(|id| *id == case.answer);
        let text = SyntheticTokenizer.decode(&case.prompt)?;
        let item = json!({ "text": text, "choices": choices, "answer": answer });
        lines.push_str(&format!("{item}\n"));
    }
    fs::write(folder.join("fox_needles.jsonl"), lines)?;
    let mut lines = String::new();
    for i in 0..TEXTS {
        let document = SyntheticDocument::new(&config, i).take(TEXT_TOKENS);
        let ids: Vec<u32> = document.map(|token| token.id).collect();
        let (text, last) = ids.split_at(ids.len() - 1);
        let (text, last) = (SyntheticTokenizer.decode(text)?, SyntheticTokenizer.decode(last)?);
        lines.push_str(&format!("{}\n", json!({ "text": text, "last": last })));
    }
    fs::write(folder.join("fox_texts.jsonl"), lines)?;
    Ok(())
}
