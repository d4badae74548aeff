//! Generated ids to text, token by token, and stop strings.

use fox_data::{Detokenizer, Tokenizer};

use crate::Result;

/// Prompt ids that the detokenizer is given as context: more than the longest character or escape.
const CONTEXT: usize = 16;

/// Text that became certain with a token.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TextDelta {
    /// The new text, often empty: incomplete characters and possible stop strings are withheld.
    pub text: String,
    /// Whether a stop string was found. The text ends before it, and nothing follows.
    pub stopped: bool,
}

/// Turns the ids of one answer into text and stops at stop strings.
///
/// A character may span several tokens, and so may a stop string; neither is given out incomplete. The cost per token
/// depends neither on the size of the vocabulary nor on the text so far.
#[derive(Clone, Debug)]
pub struct TextDecoder {
    detokenizer: Detokenizer,
    stops: Vec<String>,
    /// Text that may be the beginning of a stop string.
    withheld: String,
    stopped: bool,
}

impl TextDecoder {
    /// A decoder of text that follows `prompt` (whose text is not given out) and ends at any of `stops`.
    ///
    /// # Errors
    /// A prompt id outside the tokenizer's vocabulary.
    pub fn new(tokenizer: &Tokenizer, prompt: &[i32], stops: &[String]) -> Result<Self> {
        let context = &prompt[prompt.len().saturating_sub(CONTEXT)..];
        let context: Vec<u32> = context.iter().map(|&id| id as u32).collect();
        Ok(TextDecoder {
            detokenizer: Detokenizer::after(tokenizer, &context)?,
            stops: stops.iter().filter(|stop| !stop.is_empty()).cloned().collect(),
            withheld: String::new(),
            stopped: false,
        })
    }

    /// Takes the next id.
    ///
    /// # Errors
    /// An id outside the tokenizer's vocabulary.
    pub fn push(&mut self, id: i32) -> Result<TextDelta> {
        if !self.stopped {
            self.detokenizer.push(id as u32, &mut self.withheld)?;
        }
        Ok(self.release(false))
    }

    /// Ends the answer and gives out what was withheld.
    ///
    /// # Errors
    /// As [`TextDecoder::push`].
    pub fn finish(&mut self) -> Result<TextDelta> {
        if !self.stopped {
            self.detokenizer.finish(&mut self.withheld)?;
        }
        Ok(self.release(true))
    }

    /// Text that is withheld because it may be the beginning of a stop string.
    pub fn withheld(&self) -> &str {
        &self.withheld
    }

    /// Gives out the text before the earliest stop string, or what cannot be part of one.
    fn release(&mut self, all: bool) -> TextDelta {
        if self.stopped {
            return TextDelta { text: String::new(), stopped: true };
        }
        let found = self.stops.iter().filter_map(|stop| self.withheld.find(stop.as_str())).min();
        self.stopped = found.is_some();
        let end = found.unwrap_or_else(|| match all {
            true => self.withheld.len(),
            false => self.withheld.len() - self.stop_prefix(),
        });
        let text = self.withheld.drain(..end).collect();
        TextDelta { text, stopped: self.stopped }
    }

    /// Length of the longest suffix of the withheld text that begins a stop string.
    fn stop_prefix(&self) -> usize {
        let withheld = self.withheld.as_bytes();
        let begins = |stop: &String| {
            let most = withheld.len().min(stop.len() - 1);
            (1..=most).rev().find(|&n| {
                let start = withheld.len() - n;
                withheld[start..] == stop.as_bytes()[..n] && self.withheld.is_char_boundary(start)
            })
        };
        self.stops.iter().filter_map(begins).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<i32> {
        tokenizer.encode(text).unwrap().into_iter().map(|id| id as i32).collect()
    }

    /// Deltas of `text` after `prompt`, the last one from `finish`.
    fn deltas(name: &str, prompt: &str, text: &str, stops: &[&str]) -> (Vec<String>, bool) {
        let tokenizer = Tokenizer::from_name(name).unwrap();
        let stops: Vec<String> = stops.iter().map(|s| s.to_string()).collect();
        let mut decoder = TextDecoder::new(&tokenizer, &ids(&tokenizer, prompt), &stops).unwrap();
        let mut all = Vec::new();
        for id in ids(&tokenizer, text) {
            let delta = decoder.push(id).unwrap();
            all.push(delta.text);
            if delta.stopped {
                return (all, true);
            }
        }
        let last = decoder.finish().unwrap();
        all.push(last.text);
        (all, last.stopped)
    }

    #[test]
    fn incomplete_characters_are_withheld() {
        let (deltas, _) = deltas("bytes", "x", "aé😀b", &[]);
        assert_eq!(deltas, ["a", "", "é", "", "", "", "😀", "b", ""]);
    }

    /// Found by fuzzing: the text came out with a backslash too many.
    #[test]
    fn backslashes_split_inside_escapes_round_trip() {
        for count in 1..130 {
            let text = format!(" \t {}can't", "\\".repeat(count));
            assert_eq!(deltas("json-gpt2", "x", &text, &[]).0.concat(), text, "{count}");
        }
    }

    /// Found by fuzzing: a space was lost behind an id without text.
    #[test]
    fn ids_without_text_do_not_join_words() {
        let tokenizer = Tokenizer::from_name("synthetic").unwrap();
        let word = tokenizer.encode("unheard-of").unwrap();
        let ids = [&word[..], &tokenizer.encode("<doc>").unwrap(), &word].concat();
        let whole = tokenizer.decode(&ids).unwrap();
        let mut decoder = TextDecoder::new(&tokenizer, &[], &[]).unwrap();
        let parts = ids.iter().map(|&id| decoder.push(id as i32).unwrap().text);
        assert_eq!(parts.collect::<String>(), whole);
        assert_eq!(whole, "<unk> <unk>");
    }

    #[test]
    fn every_tokenizer_round_trips() {
        for (name, text) in [
            ("bytes", "naïve ≤ 𝔸\n end"),
            ("gpt2", "naïve ≤ 𝔸\n  the end 😀😀"),
            ("json-gpt2", "a\n\"quoted\" naïve 😀 \\ end"),
            ("synthetic", "Ann sings. The rain falls. A"),
        ] {
            let tokenizer = Tokenizer::from_name(name).unwrap();
            let whole = tokenizer.decode(&tokenizer.encode(text).unwrap()).unwrap();
            let (parts, stopped) = deltas(name, "", text, &[]);
            assert_eq!((parts.concat(), stopped), (whole, false), "{name}");
        }
    }

    #[test]
    fn continuation_keeps_the_space_after_the_prompt() {
        let (parts, _) = deltas("synthetic", "Ann", "sings. The", &[]);
        let tokenizer = Tokenizer::from_name("synthetic").unwrap();
        let all = tokenizer.decode(&tokenizer.encode("Ann sings. The").unwrap()).unwrap();
        assert_eq!(format!("Ann{}", parts.concat()), all);
    }

    #[test]
    fn stop_strings_across_tokens_are_never_shown() {
        let (parts, stopped) = deltas("bytes", "", "one two three", &["two", "wo t"]);
        assert!(stopped);
        assert_eq!(parts, ["o", "n", "e", " ", "", "", ""]);
        let (parts, stopped) = deltas("bytes", "", "abab abc", &["abc"]);
        assert_eq!((parts.concat().as_str(), stopped), ("abab ", true));
        // A prefix of a stop string that is not completed is given out at the end.
        let (parts, stopped) = deltas("bytes", "", "abab", &["abc"]);
        assert_eq!((parts.concat().as_str(), stopped), ("abab", false));
        let (parts, stopped) = deltas("gpt2", "", "Hello world\n\nand more", &["\n\n"]);
        assert_eq!((parts.concat().as_str(), stopped), ("Hello world", true));
        let (parts, stopped) = deltas("bytes", "", "aé!", &["é!", ""]);
        assert_eq!((parts.concat().as_str(), stopped), ("a", true));
    }

    /// Both stop strings are complete in one token; the earliest in the text counts, not the first in the list.
    #[test]
    fn earliest_stop_string_wins() {
        let tokenizer = Tokenizer::from_name("synthetic").unwrap();
        let sings = ids(&tokenizer, "sings.");
        for stops in [["gs", "in"], ["in", "gs"]] {
            let mut decoder =
                TextDecoder::new(&tokenizer, &[], &stops.map(str::to_string)).unwrap();
            let delta = decoder.push(sings[0]).unwrap();
            assert_eq!((delta.text.as_str(), delta.stopped), ("s", true), "{stops:?}");
        }
    }

    #[test]
    fn invalid_utf8_does_not_withhold_text() {
        let tokenizer = Tokenizer::from_name("bytes").unwrap();
        let mut decoder = TextDecoder::new(&tokenizer, &[97], &[]).unwrap();
        let mut text = String::new();
        for _ in 0..20 {
            text.push_str(&decoder.push(0x80).unwrap().text);
        }
        assert!(text.chars().count() >= 12, "{text:?}");
        assert!(decoder.push(300).is_err());
    }
}
