//! Held-out text in segments of one length, taken from all held-out documents in turn.
//!
//! A held-out set may be a few long books. The beginning of one book is not a fair sample, so all models are evaluated
//! on segments of all books, during training and after it.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use fox_data::{Dataset, HeldOut, PrepareOptions, Tokenizer, prepare};
use fox_eval::files::write_whole;
use fox_train::data::RunData;
use serde_json::json;

use super::ScaleConfig;

/// Extra tokens of a segment: tokenizing its text again may give a few tokens less.
const MARGIN: u64 = 16;

/// The segments as text, one JSON object per line.
pub fn text(out: &Path) -> PathBuf {
    out.join("held-out.jsonl")
}

/// The segments as prepared data.
pub fn prepared(out: &Path) -> PathBuf {
    out.join("held-out")
}

/// Held-out segments.
pub struct HeldOutSegments {
    texts: Vec<String>,
    tokenizer: Tokenizer,
}

impl HeldOutSegments {
    /// Cuts the held-out documents; `None` for the embedded corpus, which has documents of any length.
    ///
    /// # Errors
    /// Data without held-out documents, without a tokenizer, or with documents that are too short.
    pub fn cut(
        data: &RunData,
        path: Option<&Path>,
        scale: &ScaleConfig,
    ) -> Result<Option<HeldOutSegments>> {
        let Some(path) = path else { return Ok(None) };
        let shown = path.display();
        let Some(held_out) = &data.heldout else {
            bail!(
                "{shown} has no held-out documents; prepare it with --heldout-corpus, or from more documents \
                 with --heldout"
            );
        };
        let Some(tokenizer) = data.tokenizer.clone() else {
            bail!("the tokenizer of {shown} is unknown; prepare it with fox prepare");
        };
        let (longest, needed) = (held_out.lengths().longest(), scale.length as u64 + MARGIN);
        if longest < needed {
            bail!(
                "the longest held-out document of {shown} has {longest} tokens, but the scale {} evaluates on \
                 {needed}; give longer documents or a smaller --scale",
                scale.name
            );
        }
        let texts = segments(&**held_out, &tokenizer, needed, scale.documents as usize)?;
        Ok(Some(HeldOutSegments { texts, tokenizer }))
    }

    /// Writes the segments as text and as prepared data.
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

/// The first segment of every document, then the second ones, until there are `count`.
fn segments(
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
                // A cut inside a character leaves replacement characters.
                texts.push(text.trim_matches('\u{fffd}').to_string());
            }
        }
        start += length;
    }
    Ok(texts)
}
