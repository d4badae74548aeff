//! Text to token ids and back. Everything between the edges of the system sees ids only.

mod bytes;
#[cfg(feature = "hf-tokenizers")]
mod decoder_chain;
mod detokenizer;
pub(crate) mod file_limits;
mod files;
mod gpt2;
mod gpt2_files;
#[cfg(feature = "hf-tokenizers")]
mod huggingface;
mod json_escape;
mod json_gpt2;
mod token_bytes;

pub use bytes::ByteTokenizer;
pub use detokenizer::Detokenizer;
pub use files::generated_tokenizer_json;
pub use gpt2::Gpt2Tokenizer;
#[cfg(feature = "hf-tokenizers")]
pub use huggingface::HfTokenizer;
pub use json_gpt2::JsonGpt2Tokenizer;

use std::fmt;
use std::path::Path;

use crate::error::{Error, Result};
use crate::synthetic::{START_WORD, SyntheticTokenizer};

/// A tokenizer. Cheap to clone, and safe to share between threads.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Tokenizer {
    /// One token per UTF-8 byte.
    Bytes(ByteTokenizer),
    /// GPT-2's byte-level BPE.
    Gpt2(Gpt2Tokenizer),
    /// GPT-2's BPE around a JSON escape, as LongCrawl64 was tokenized.
    JsonGpt2(JsonGpt2Tokenizer),
    /// The word-level vocabulary of the synthetic corpus.
    Synthetic(SyntheticTokenizer),
    /// A Hugging Face `tokenizer.json`.
    #[cfg(feature = "hf-tokenizers")]
    HuggingFace(HfTokenizer),
}

/// Which tokenizer made some ids. Equal identities mean equal ids for every text.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TokenizerIdentity {
    /// A short name.
    pub name: String,
    /// Hash of everything that decides the ids.
    pub hash: u128,
}

impl fmt::Display for TokenizerIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{:032x}", self.name, self.hash)
    }
}

/// Where a long text may be split such that the concatenated ids of the chunks are the ids of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SafeSplit {
    /// Between any two characters.
    AnyCharacter,
    /// In front of a space that follows something other than white space.
    BeforeSpace,
    /// Nowhere.
    Nowhere,
}

impl Tokenizer {
    /// The tokenizer called `bytes`, `gpt2`, `json-gpt2` or `synthetic`, or the one in the file or folder of
    /// that name.
    ///
    /// # Errors
    /// An unknown name, or a file that is not a tokenizer.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "bytes" => Ok(Self::Bytes(ByteTokenizer)),
            "gpt2" => Ok(Self::Gpt2(Gpt2Tokenizer)),
            "json-gpt2" => Ok(Self::JsonGpt2(JsonGpt2Tokenizer)),
            "synthetic" => Ok(Self::Synthetic(SyntheticTokenizer)),
            path if Path::new(path).exists() => Self::load(Path::new(path)),
            _ => Err(Error::UnknownTokenizer { name: name.to_owned() }),
        }
    }

    /// The ids of `text`, without any marker in front or behind.
    ///
    /// # Errors
    /// Only Hugging Face tokenizers can fail.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match self {
            Self::Bytes(t) => Ok(t.encode(text)),
            Self::Gpt2(t) => Ok(t.encode(text)),
            Self::JsonGpt2(t) => Ok(t.encode_body(text)),
            Self::Synthetic(t) => Ok(t.encode(text)),
            #[cfg(feature = "hf-tokenizers")]
            Self::HuggingFace(t) => t.encode(text),
        }
    }

    /// The ids of a prompt: `text` with the start marker in front.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = vec![self.bos()];
        ids.append(&mut self.encode(text)?);
        Ok(ids)
    }

    /// The text that stands for the marker [`Self::bos`] in chat templates.
    pub fn marker_text(&self) -> &str {
        match self {
            Self::Bytes(_) | Self::Gpt2(_) | Self::JsonGpt2(_) => Gpt2Tokenizer::END_OF_TEXT_TEXT,
            Self::Synthetic(_) => START_WORD,
            #[cfg(feature = "hf-tokenizers")]
            Self::HuggingFace(t) => t.bos_token(),
        }
    }

    /// The ids of a rendered chat template, in which [`Self::marker_text`] stands for the marker. A Hugging Face
    /// tokenizer knows all its markers by their texts.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_marked(&self, text: &str) -> Result<Vec<u32>> {
        if !self.is_built_in() {
            return self.encode(text);
        }
        let mut ids = Vec::new();
        for (i, part) in text.split(self.marker_text()).enumerate() {
            ids.extend((i > 0).then(|| self.bos()));
            ids.append(&mut self.encode(part)?);
        }
        Ok(ids)
    }

    /// Whether the tokenizer is one of those that need no file; these have a single marker.
    pub(crate) fn is_built_in(&self) -> bool {
        match self {
            Self::Bytes(_) | Self::Gpt2(_) | Self::JsonGpt2(_) | Self::Synthetic(_) => true,
            #[cfg(feature = "hf-tokenizers")]
            Self::HuggingFace(_) => false,
        }
    }

    /// The text of `ids`. Ids that do not form valid text give replacement characters.
    ///
    /// A character, or an escape of `json-gpt2`, may span several tokens: decode a list at once, or ids that arrive one
    /// by one with a [`Detokenizer`].
    ///
    /// # Errors
    /// An id outside the vocabulary.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        match self {
            Self::Bytes(t) => t.decode(ids),
            Self::Gpt2(t) => t.decode(ids),
            Self::JsonGpt2(t) => t.decode(ids),
            Self::Synthetic(t) => t.decode(ids),
            #[cfg(feature = "hf-tokenizers")]
            Self::HuggingFace(t) => t.decode(ids),
        }
    }

    /// Number of ids.
    pub fn vocab_size(&self) -> usize {
        match self {
            Self::Bytes(_) => ByteTokenizer::VOCAB_SIZE,
            Self::Gpt2(_) | Self::JsonGpt2(_) => Gpt2Tokenizer::VOCAB_SIZE,
            Self::Synthetic(_) => SyntheticTokenizer::VOCAB_SIZE,
            #[cfg(feature = "hf-tokenizers")]
            Self::HuggingFace(t) => t.vocab_size(),
        }
    }

    /// The id put in front of every sequence; it also marks the end of a document.
    pub fn bos(&self) -> u32 {
        match self {
            Self::Bytes(_) => ByteTokenizer::BOS,
            Self::Gpt2(_) | Self::JsonGpt2(_) => Gpt2Tokenizer::END_OF_TEXT,
            Self::Synthetic(_) => SyntheticTokenizer::BOS,
            #[cfg(feature = "hf-tokenizers")]
            Self::HuggingFace(t) => t.bos(),
        }
    }

    /// Which tokenizer this is.
    pub fn identity(&self) -> TokenizerIdentity {
        let (name, hash) = match self {
            Self::Bytes(_) => ("bytes", hash_of(b"one id per byte, 255 marks the start")),
            Self::Gpt2(t) => ("gpt2", t.vocabulary_hash()),
            Self::JsonGpt2(_) => ("json-gpt2", !Gpt2Tokenizer.vocabulary_hash()),
            Self::Synthetic(t) => {
                let words: Vec<_> = (0..).map_while(|id| t.word(id)).collect();
                ("synthetic", hash_of(words.join(" ").as_bytes()))
            }
            #[cfg(feature = "hf-tokenizers")]
            Self::HuggingFace(t) => ("hf", t.hash()),
        };
        TokenizerIdentity { name: name.to_owned(), hash }
    }

    /// Where a long text may be split for this tokenizer.
    pub fn safe_split(&self) -> SafeSplit {
        match self {
            Self::Bytes(_) => SafeSplit::AnyCharacter,
            Self::Gpt2(_) | Self::JsonGpt2(_) | Self::Synthetic(_) => SafeSplit::BeforeSpace,
            #[cfg(feature = "hf-tokenizers")]
            Self::HuggingFace(_) => SafeSplit::Nowhere,
        }
    }
}

pub(crate) fn hash_of(bytes: &[u8]) -> u128 {
    twox_hash::XxHash3_128::oneshot(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_by_name_and_rejects_unknown_names() {
        for (name, vocab, bos) in [
            ("bytes", 256, 255),
            ("gpt2", 50257, 50256),
            ("json-gpt2", 50257, 50256),
            ("synthetic", 90, 0),
        ] {
            let tokenizer = Tokenizer::from_name(name).unwrap();
            assert_eq!(tokenizer.vocab_size(), vocab);
            assert_eq!(tokenizer.bos(), bos);
            assert_eq!(tokenizer.identity().name, name);
        }
        let error = Tokenizer::from_name("gpt5").unwrap_err().to_string();
        assert!(error.contains("gpt5") && error.contains("tokenizer.json"));
    }

    #[test]
    fn identities_are_pinned() {
        let of = |name| Tokenizer::from_name(name).unwrap().identity().to_string();
        assert_eq!(of("bytes"), "bytes:90e3ef0393b5687dc64630aed09c15f5");
        assert_eq!(of("gpt2"), "gpt2:2c2c26d97c5a8315c70ac8c2e0e3e6ae");
        assert_eq!(of("json-gpt2"), "json-gpt2:d3d3d92683a57cea38f5373d1f1c1951");
        assert_eq!(of("synthetic"), "synthetic:46d75e93739a1f304a1776aa98e9b19b");
    }

    #[test]
    fn marker_text_becomes_the_marker() {
        let of = |name| Tokenizer::from_name(name).unwrap();
        assert_eq!(
            of("bytes").encode_marked("<|endoftext|>a<|endoftext|>").unwrap(),
            [255, 97, 255]
        );
        assert_eq!(of("gpt2").encode_marked("a<|endoftext|>b").unwrap(), [64, 50256, 65]);
        assert_eq!(of("json-gpt2").encode_marked("<|endoftext|>a").unwrap(), [50256, 64]);
        let words = of("synthetic");
        let ids = words.encode("Ann sings.").unwrap();
        assert_eq!(
            words.encode_marked("<doc>Ann sings.<doc>").unwrap(),
            [&[0], &ids[..], &[0]].concat()
        );
        // The letter that stands for byte 255 in tokenizer.json is an ordinary letter in a text.
        assert_eq!(of("bytes").encode_marked("ÿ").unwrap(), [195, 191]);
    }

    #[test]
    fn prompts_start_with_the_marker() {
        let tokenizer = Tokenizer::from_name("bytes").unwrap();
        assert_eq!(tokenizer.encode_prompt("ab").unwrap(), [255, 97, 98]);
    }
}
