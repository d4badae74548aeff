//! Limits on tokenizer files, which may be hostile: sizes, and steps that panic or multiply text.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::Value;

use crate::error::{Error, Result};

/// Largest file of a tokenizer. The largest published `tokenizer.json` files have some 35 MB.
pub(crate) const MAX_FILE_BYTES: u64 = 128 << 20;
/// Ids of a vocabulary are below this; published vocabularies have at most some 262,000.
const MAX_VOCAB_SIZE: u64 = 1 << 24;
/// Replacements of a normalizer or decoder may make a text at most so many times as long.
const MAX_GROWTH: u64 = 64;

/// The bytes of a file, if it is not too large.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>> {
    let io = |error| Error::io("read", path)(error);
    let mut bytes = Vec::new();
    File::open(path).map_err(io)?.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(Error::BadTokenizer {
            path: path.to_path_buf(),
            detail: format!("it has more than {MAX_FILE_BYTES} bytes"),
        });
    }
    Ok(bytes)
}

/// Checks a `tokenizer.json`; the error says what is wrong.
pub(super) fn check(file: &Value) -> std::result::Result<(), String> {
    for chain in ["normalizer", "decoder"] {
        let growth = growth(&file[chain]).map_err(|detail| format!("its {chain} {detail}"))?;
        if growth > MAX_GROWTH {
            let most = format!("at most {MAX_GROWTH} is accepted");
            return Err(format!("its {chain} may make a text {growth} times as long; {most}"));
        }
    }
    let added = file["added_tokens"].as_array().into_iter().flatten().map(|token| &token["id"]);
    let vocab = file["model"]["vocab"].as_object().into_iter().flat_map(|vocab| vocab.values());
    match added.chain(vocab).filter_map(Value::as_u64).max() {
        Some(id) if id >= MAX_VOCAB_SIZE => {
            Err(format!("it has the id {id}; ids must be below {MAX_VOCAB_SIZE}"))
        }
        _ => Ok(()),
    }
}

/// By how much the replacements of a normalizer or decoder can lengthen a text. Other steps have small factors that do
/// not multiply.
fn growth(step: &Value) -> std::result::Result<u64, String> {
    if let Some(steps) = ["normalizers", "decoders"].iter().find_map(|key| step[key].as_array()) {
        let multiply = |product: u64, step| Ok(product.saturating_mul(growth(step)?));
        return steps.iter().try_fold(1, multiply);
    }
    if step["type"] != "Replace" {
        return Ok(1);
    }
    let pattern = &step["pattern"];
    let replaced = match (pattern["String"].as_str(), pattern["Regex"].as_str()) {
        (Some(""), _) | (_, Some("")) => return Err("replaces the empty text".into()),
        (Some(text), _) => text.len() as u64,
        _ => 1,
    };
    let content = step["content"].as_str().unwrap_or_default().len() as u64;
    Ok(content.div_ceil(replaced).max(1))
}

/// Runs a function of the tokenizer library; a panic in it, which a malformed file can cause, becomes an error.
#[cfg(feature = "hf-tokenizers")]
pub(super) fn without_panic<T>(
    run: impl FnOnce() -> std::result::Result<T, tokenizers::Error>,
) -> std::result::Result<T, String> {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err("the tokenizer library panicked; the file is damaged or hostile".into()),
    }
}
