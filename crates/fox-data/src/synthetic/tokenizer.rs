//! The word-level tokenizer of the synthetic corpus.

use std::collections::HashMap;
use std::sync::OnceLock;

use super::words::{self, START_WORD, UNKNOWN_WORD};
use crate::error::{Error, Result};

/// Word-level tokenizer over the 256 words of the synthetic corpus.
///
/// Text is split at white space, and `.` and `?` at the end of a word stand alone. A word outside the
/// vocabulary becomes [`SyntheticTokenizer::UNKNOWN`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SyntheticTokenizer;

impl SyntheticTokenizer {
    /// Number of token ids.
    pub const VOCAB_SIZE: usize = 256;
    /// The id put in front of every model input.
    pub const BOS: u32 = 0;
    /// The id of every word outside the vocabulary.
    pub const UNKNOWN: u32 = 1;

    /// The ids of the words of `text`.
    pub fn encode(self, text: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        for word in text.split_whitespace() {
            let bare = word.trim_end_matches(['.', '?']);
            if !bare.is_empty() {
                ids.push(self.id(bare).unwrap_or(Self::UNKNOWN));
            }
            for mark in word[bare.len()..].chars() {
                ids.push(if mark == '.' { 2 } else { 3 });
            }
        }
        ids
    }

    /// The text of `ids`: words joined by spaces, `.` and `?` attached to the word before. The start
    /// marker is left out.
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
            if !text.is_empty() && word != "." && word != "?" {
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

    /// The id of a word that the grammar uses; words outside the vocabulary become unknown, which the
    /// tests rule out for the grammar.
    pub(super) fn grammar_id(self, word: &str) -> u32 {
        debug_assert!(word != UNKNOWN_WORD);
        self.id(word).unwrap_or(Self::UNKNOWN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips() {
        let text = "recall captain Abel? meet the new doctor Zora.";
        let ids = SyntheticTokenizer.encode(text);
        assert_eq!(ids.len(), 10);
        assert_eq!(SyntheticTokenizer.decode(&ids).unwrap(), text);
    }

    #[test]
    fn unknown_words_and_ids_are_said() {
        assert_eq!(SyntheticTokenizer.encode("meet xyzzy."), [6, 1, 2]);
        let error = SyntheticTokenizer.decode(&[256]).unwrap_err();
        assert!(error.to_string().contains("256"), "{error}");
    }

    #[test]
    fn every_word_keeps_its_id() {
        for id in 0..256 {
            let word = SyntheticTokenizer.word(id).unwrap();
            assert_eq!(SyntheticTokenizer.id(word), Some(id));
        }
    }
}
