//! Held-out text in pieces of one length, taken from all held-out documents in turn.
//!
//! A few whole books are few documents, and the first sequences of one are no fair sample. Pieces of all of them are
//! what every model is evaluated on, during training and after it.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use fox_data::{Dataset, HeldOut, PrepareOptions, Tokenizer, prepare};
use fox_eval::files::write_whole;
use fox_train::data::RunData;
use fox_train::reproduce::ScalePlan;
use serde_json::json;

/// Tokens beyond the length of a piece: tokenizing its text again may give a few less.
const MARGIN: u64 = 16;

/// The pieces as text, one JSON object a line.
pub fn text(out: &Path) -> PathBuf {
    out.join("held-out.jsonl")
}

/// The pieces as prepared data.
pub fn prepared(out: &Path) -> PathBuf {
    out.join("held-out")
}

/// The pieces.
pub struct Pieces {
    texts: Vec<String>,
    tokenizer: Tokenizer,
}

impl Pieces {
    /// Cuts the held-out documents; `None` for the embedded corpus, which has pieces of any length.
    pub fn find(data: &RunData, path: Option<&Path>, scale: &ScalePlan) -> Result<Option<Pieces>> {
        let Some(path) = path else { return Ok(None) };
        let shown = path.display();
        let Some(held_out) = &data.heldout else {
            bail!(
                "{shown} has no held-out documents; prepare it with --heldout-corpus, or from more documents \
                 with --heldout"
            );
        };
        let Some(tokenizer) = data.tokenizer.clone() else {
            bail!("the tokenizer of {shown} is not known; prepare it with fox prepare");
        };
        let (longest, needed) = (held_out.lengths().longest(), scale.length as u64 + MARGIN);
        if longest < needed {
            bail!(
                "the longest held-out document of {shown} has {longest} tokens, but the scale {} evaluates on \
                 {needed}; give longer documents or a smaller --scale",
                scale.name
            );
        }
        let texts = cut(&**held_out, &tokenizer, needed, scale.documents as usize)?;
        Ok(Some(Pieces { texts, tokenizer }))
    }

    /// Writes them as text and as prepared data.
    pub fn write(&self, out: &Path) -> Result<()> {
        let lines: String =
            self.texts.iter().map(|t| format!("{}\n", json!({ "text": t }))).collect();
        let file = text(out);
        if std::fs::read(&file).ok().as_deref() != Some(lines.as_bytes()) {
            write_whole(&file, lines.as_bytes())?;
        }
        let mut options = PrepareOptions::new(&file, prepared(out), self.tokenizer.clone());
        options.held_out = HeldOut::Path(file.clone());
        prepare(&options, |_| ControlFlow::Continue(()))?;
        Ok(())
    }
}

/// First pieces of all documents, then second ones, until there are enough.
fn cut(
    data: &dyn Dataset,
    tokenizer: &Tokenizer,
    length: u64,
    count: usize,
) -> Result<Vec<String>> {
    let lengths = data.lengths();
    let (mut texts, mut start) = (Vec::new(), 0);
    while texts.len() < count && start + length <= lengths.longest() {
        for document in 0..lengths.documents() {
            let fits = lengths.len_of(document).is_some_and(|len| start + length <= len);
            if fits && texts.len() < count {
                let mut ids = vec![0; length as usize];
                data.read(document, start, &mut ids)?;
                let text = tokenizer.decode(&ids)?;
                // A character that the cut went through.
                texts.push(text.trim_matches('\u{fffd}').to_string());
            }
        }
        start += length;
    }
    Ok(texts)
}
