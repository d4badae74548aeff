//! The word-level tokenizer of the synthetic corpus.

use std::collections::HashMap;
use std::sync::OnceLock;

use super::words::{self, START_WORD, UNKNOWN_WORD};
use crate::error::{Error, Result};

/// Word-level tokenizer over the 90 words of the synthetic corpus.
///
/// Text is split at white space; the last word of a sentence includes its full stop. A word outside the vocabulary
/// becomes [`SyntheticTokenizer::UNKNOWN`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SyntheticTokenizer;

impl SyntheticTokenizer {
    /// Number of token ids.
    pub const VOCAB_SIZE: usize = 90;
    /// The id put in front of every model input.
    pub const BOS: u32 = 0;
    /// The id of every word outside the vocabulary.
    pub const UNKNOWN: u32 = 1;

    /// The ids of the words of `text`.
    pub fn encode(self, text: &str) -> Vec<u32> {
        text.split_whitespace().map(|word| self.id(word).unwrap_or(Self::UNKNOWN)).collect()
    }

    /// The text of `ids`: words joined by spaces. The start marker is left out.
    ///
    /// # Errors
    /// An id outside the vocabulary.
    pub fn decode(self, ids: &[u32]) -> Result<String> {
        let mut text = String::new();
        for &id in ids {
            let word =
                self.word(id).ok_or(Error::UnknownToken { id, vocab_size: Self::VOCAB_SIZE })?;
            if word == START_WORD {
                continue;
            }
            if !text.is_empty() {
                text.push(' ');
            }
            text.push_str(word);
        }
        Ok(text)
    }

    /// The id of a word of the vocabulary.
    pub fn id(self, word: &str) -> Option<u32> {
        static IDS: OnceLock<HashMap<&'static str, u32>> = OnceLock::new();
        IDS.get_or_init(|| (0..).zip(words::vocabulary()).map(|(i, w)| (w, i)).collect())
            .get(word)
            .copied()
    }

    /// The word of an id.
    pub fn word(self, id: u32) -> Option<&'static str> {
        static WORDS: OnceLock<Vec<&'static str>> = OnceLock::new();
        WORDS.get_or_init(|| words::vocabulary().collect()).get(id as usize).copied()
    }

    /// The id of a word of a document; words outside the vocabulary become unknown, which the tests rule out.
    pub(super) fn document_id(self, word: &str) -> u32 {
        debug_assert!(word != UNKNOWN_WORD);
        self.id(word).unwrap_or(Self::UNKNOWN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips() {
        let text = "Ann sings. The rain falls. A new chapter begins. Ann";
        let ids = SyntheticTokenizer.encode(text);
        assert_eq!(ids.len(), 10);
        assert_eq!(SyntheticTokenizer.decode(&ids).unwrap(), text);
    }

    #[test]
    fn rejects_unknown_words_and_ids() {
        assert_eq!(SyntheticTokenizer.encode("A xyzzy begins."), [2, 1, 5]);
        let error = SyntheticTokenizer.decode(&[90]).unwrap_err();
        assert!(error.to_string().contains("90"), "{error}");
    }

    #[test]
    fn word_ids_are_pinned() {
        for id in 0..90 {
            let word = SyntheticTokenizer.word(id).unwrap();
            assert_eq!(SyntheticTokenizer.id(word), Some(id));
        }
    }
}
