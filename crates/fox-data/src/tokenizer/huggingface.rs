//! Any Hugging Face `tokenizer.json`, through the `tokenizers` crate.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use super::decoder_chain::{self, DecoderChain, Stage};
use super::file_limits::{self, without_panic};
use super::hash_of;
use crate::error::{Error, Result};

/// Tokens that mark the start or end of text, in the order in which they are looked for.
const USUAL_MARKERS: [&str; 6] =
    ["<|begin_of_text|>", "<|endoftext|>", "<s>", "<bos>", "[CLS]", "</s>"];

/// A tokenizer read from a `tokenizer.json`.
#[derive(Clone)]
pub struct HfTokenizer {
    inner: Arc<tokenizers::Tokenizer>,
    stages: Arc<[Stage]>,
    file: Arc<[u8]>,
    hash: u128,
    vocab_size: usize,
    bos: u32,
    bos_token: Arc<str>,
}

impl fmt::Debug for HfTokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HfTokenizer")
            .field("hash", &self.hash)
            .field("bos_token", &self.bos_token)
            .finish_non_exhaustive()
    }
}

impl HfTokenizer {
    /// From the bytes of `path`. The start marker is `bos_token` (or `eos_token`) of the
    /// `tokenizer_config.json` beside it, or the first usual marker in the vocabulary.
    pub(super) fn from_file(path: &Path, bytes: Vec<u8>) -> Result<Self> {
        let bad = |detail: String| Error::BadTokenizer { path: path.to_path_buf(), detail };
        let mut inner =
            without_panic(|| tokenizers::Tokenizer::from_bytes(&bytes)).map_err(&bad)?;
        // Padding and cutting are the loader's business; a file that asks for them would lose text.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| bad(error.to_string()))?;
        let bos_token = configured_marker(path)
            .into_iter()
            .chain(USUAL_MARKERS.map(str::to_owned))
            .find(|token| inner.token_to_id(token).is_some())
            .ok_or_else(|| {
                bad("no token marks the start of text; set \"bos_token\" in tokenizer_config.json beside it".into())
            })?;
        let bos = inner.token_to_id(&bos_token).unwrap_or_default();
        // The library copies its vocabulary to list the ids, so this is done once.
        let vocab_size = inner.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1);
        Ok(Self {
            stages: decoder_chain::stages(inner.get_decoder()).into(),
            inner: Arc::new(inner),
            hash: hash_of(&bytes),
            file: bytes.into(),
            vocab_size,
            bos,
            bos_token: bos_token.into(),
        })
    }

    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = without_panic(|| self.inner.encode_fast(text, false));
        let failed =
            |detail| Error::Tokenize { tokenizer: format!("hf:{:032x}", self.hash), detail };
        Ok(encoding.map_err(failed)?.get_ids().to_vec())
    }

    pub(super) fn decode(&self, ids: &[u32]) -> Result<String> {
        let mut chain = self.decoder_chain();
        let mut text = String::new();
        for &id in ids {
            if let Some(token) = self.token(id)? {
                chain.push(token, &mut text)?;
            }
        }
        chain.finish(&mut text)?;
        Ok(text)
    }

    /// The decoder at the start of a sequence.
    pub(super) fn decoder_chain(&self) -> DecoderChain {
        DecoderChain::new(self.stages.clone())
    }

    /// The token of an id, `None` for an unused id below the vocabulary's size.
    pub(super) fn token(&self, id: u32) -> Result<Option<String>> {
        if id as usize >= self.vocab_size {
            return Err(Error::UnknownToken { id, vocab_size: self.vocab_size });
        }
        Ok(self.inner.id_to_token(id))
    }

    /// The bytes of every id; see [`Tokenizer::token_bytes`](super::Tokenizer::token_bytes).
    pub(super) fn token_bytes(&self) -> Result<Vec<Option<Vec<u8>>>> {
        let added = self.inner.get_added_tokens_decoder();
        let is_special = |id: u32| added.get(&id).is_some_and(|token| token.special);
        let mut all = Vec::with_capacity(self.vocab_size);
        for id in 0..self.vocab_size as u32 {
            let token = self.token(id)?.filter(|_| !is_special(id) && id != self.bos);
            let Some(token) = token else {
                all.push(None);
                continue;
            };
            let bytes = decoder_chain::bytes_of(&self.stages, token)?;
            all.push(Some(bytes.ok_or_else(|| Error::Tokenize {
                tokenizer: format!("hf:{:032x}", self.hash),
                detail: "the text of its tokens depends on their neighbours".to_owned(),
            })?));
        }
        Ok(all)
    }

    /// One more than the largest id: ids may have holes, and the embedding table must cover all of them.
    pub(super) fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    pub(super) fn bos(&self) -> u32 {
        self.bos
    }

    pub(super) fn bos_token(&self) -> &str {
        &self.bos_token
    }

    /// The bytes of the file.
    pub(super) fn file(&self) -> &[u8] {
        &self.file
    }

    pub(super) fn hash(&self) -> u128 {
        self.hash
    }
}

/// `bos_token`, then `eos_token`, of the `tokenizer_config.json` beside `path`, where there are any.
fn configured_marker(path: &Path) -> Vec<String> {
    let config: Value = file_limits::read(&path.with_file_name("tokenizer_config.json"))
        .ok()
        .and_then(|bytes| serde_json::from_slice(&bytes).ok())
        .unwrap_or_default();
    ["bos_token", "eos_token"]
        .iter()
        .filter_map(|key| {
            let token = &config[*key];
            token.as_str().or_else(|| token["content"].as_str())
        })
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::Tokenizer;

    /// Loads the `tokenizer.json` that `name` saves through this library instead of as itself.
    fn through_the_library(name: &str) -> (Tokenizer, HfTokenizer) {
        let folder = tempfile::tempdir().unwrap();
        let tokenizer = Tokenizer::from_name(name).unwrap();
        tokenizer.save(folder.path()).unwrap();
        let path = folder.path().join("tokenizer.json");
        let bytes = std::fs::read(&path).unwrap();
        let library = HfTokenizer::from_file(&path, bytes).unwrap();
        (tokenizer, library)
    }

    #[test]
    fn exported_files_agree_with_the_library() {
        let text = "It's 3  o'clock,\n\n naïve — “yes”!\t we'll see 😀 1234 ";
        for name in ["bytes", "gpt2"] {
            let (ours, library) = through_the_library(name);
            let ids = ours.encode(text).unwrap();
            assert_eq!(library.encode(text).unwrap(), ids, "{name}");
            assert_eq!(library.decode(&ids).unwrap(), text, "{name}");
            assert_eq!(library.bos(), ours.bos(), "{name}");
            assert_eq!(library.vocab_size(), ours.vocab_size(), "{name}");
        }
        let (ours, library) = through_the_library("synthetic");
        let text = "Ann sings. A xyzzy. begins.";
        assert_eq!(library.encode(text).unwrap(), ours.encode(text).unwrap());
        assert_eq!(library.bos(), ours.bos());
    }

    #[test]
    fn foreign_tokenizers_save_and_load() {
        let folder = tempfile::tempdir().unwrap();
        Tokenizer::from_name("synthetic").unwrap().save(folder.path()).unwrap();
        std::fs::remove_file(folder.path().join("fox_tokenizer.json")).unwrap();
        let loaded = Tokenizer::load(folder.path()).unwrap();
        assert_eq!(loaded.identity().name, "hf");
        let again = tempfile::tempdir().unwrap();
        loaded.save(again.path()).unwrap();
        let reloaded = Tokenizer::load(again.path()).unwrap();
        assert_eq!(reloaded.identity(), loaded.identity());
        assert_eq!(reloaded.bos(), 0);
    }
}
