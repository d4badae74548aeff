//! GPT-2's byte-level BPE. The vocabulary is embedded in the binary by `tiktoken-rs` (`r50k_base`).

use std::sync::OnceLock;

use tiktoken_rs::CoreBPE;

use super::hash_of;
use crate::error::{Error, Result};

/// GPT-2's byte-level BPE: 50,257 ids, of which 50256 is `<|endoftext|>`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Gpt2Tokenizer;

impl Gpt2Tokenizer {
    /// Number of ids.
    pub const VOCAB_SIZE: usize = 50_257;
    /// `<|endoftext|>`: start marker and end marker.
    pub(crate) const END_OF_TEXT: u32 = 50_256;
    /// The text of that marker.
    pub const END_OF_TEXT_TEXT: &'static str = "<|endoftext|>";

    fn bpe(self) -> &'static CoreBPE {
        tiktoken_rs::r50k_base_singleton()
    }

    /// The ids of `text` taken as ordinary text: `<|endoftext|>` in it is not the marker.
    pub fn encode(self, text: &str) -> Vec<u32> {
        self.bpe().encode_ordinary(text)
    }

    /// The ids of `text`, in which every `<|endoftext|>` is the marker.
    pub(crate) fn encode_with_marker(self, text: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        for (i, part) in text.split(Self::END_OF_TEXT_TEXT).enumerate() {
            if i > 0 {
                ids.push(Self::END_OF_TEXT);
            }
            ids.extend(self.bpe().encode_ordinary(part));
        }
        ids
    }

    /// The text of `ids`; invalid UTF-8 is replaced.
    ///
    /// # Errors
    /// An id outside the vocabulary.
    pub fn decode(self, ids: &[u32]) -> Result<String> {
        Ok(String::from_utf8_lossy(&self.decode_bytes(ids)?).into_owned())
    }

    /// The bytes of `ids`.
    ///
    /// # Errors
    /// An id outside the vocabulary.
    pub fn decode_bytes(self, ids: &[u32]) -> Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for &id in ids {
            let token = self
                .tokens()
                .get(id as usize)
                .ok_or(Error::UnknownToken { id, vocab_size: Self::VOCAB_SIZE })?;
            bytes.extend_from_slice(token);
        }
        Ok(bytes)
    }

    /// The bytes of every token, by id.
    pub fn tokens(self) -> &'static [Vec<u8>] {
        static TOKENS: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
        TOKENS.get_or_init(|| {
            (0..Self::VOCAB_SIZE as u32)
                // Every id below the vocabulary's size is in the embedded table; a test says so.
                .map(|id| self.bpe().decode_bytes(&[id]).unwrap_or_default())
                .collect()
        })
    }

    /// Hash of the vocabulary in the order of the ids.
    pub(super) fn vocabulary_hash(self) -> u128 {
        static HASH: OnceLock<u128> = OnceLock::new();
        *HASH.get_or_init(|| {
            let mut bytes = Vec::new();
            for token in self.tokens() {
                bytes.extend_from_slice(&(token.len() as u32).to_le_bytes());
                bytes.extend_from_slice(token);
            }
            hash_of(&bytes)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn known_texts_have_known_ids() {
        assert_eq!(Gpt2Tokenizer.encode("Hello world"), [15496, 995]);
        assert_eq!(Gpt2Tokenizer.encode("<|endoftext|>"), [27, 91, 437, 1659, 5239, 91, 29]);
        assert_eq!(Gpt2Tokenizer.encode_with_marker("a<|endoftext|>"), [64, 50256]);
        assert_eq!(Gpt2Tokenizer.encode("a  b\n\n\nc"), [64, 220, 275, 628, 198, 66]);
    }

    #[test]
    fn embedded_vocabulary_is_complete() {
        let tokens = Gpt2Tokenizer.tokens();
        assert_eq!(tokens.len(), 50_257);
        assert!(tokens.iter().all(|t| !t.is_empty()));
        assert_eq!(tokens[50_256], b"<|endoftext|>");
        assert_eq!(tokens[15_496], b"Hello");
    }

    #[test]
    fn rejects_ids_outside_the_vocabulary() {
        let error = Gpt2Tokenizer.decode(&[50_257]).unwrap_err();
        assert!(error.to_string().contains("50257"), "{error}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn any_text_round_trips(text in "\\PC{0,80}|[ -~\\s]{0,80}") {
            prop_assert_eq!(Gpt2Tokenizer.decode(&Gpt2Tokenizer.encode(&text)).unwrap(), text);
        }
    }
}
