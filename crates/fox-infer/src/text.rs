//! Ids to text as they come, and the strings that end an answer.

use fox_data::{Gpt2Tokenizer, Tokenizer};

use crate::Result;

/// Ids that are kept for what they say about the text that follows, at most.
const LONGEST: usize = 256;

/// Text that became certain with a token.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextDelta {
    /// The new text, often empty: characters, escapes and possible stop strings are held back until
    /// they are whole.
    pub text: String,
    /// Whether a stop string was found. The text ends before it, and nothing follows.
    pub stopped: bool,
}

/// Turns the ids of one answer into text.
///
/// A character may span several tokens, and so may a stop string; neither is given out in part.
#[derive(Clone, Debug)]
pub struct TextDecoder {
    tokenizer: Tokenizer,
    stops: Vec<String>,
    /// Ids whose text was decoded last, for what they say about the text that follows, and then those
    /// not decoded yet.
    ids: Vec<u32>,
    decoded: usize,
    /// Text that may be the beginning of a stop string.
    held: String,
    stopped: bool,
}

impl TextDecoder {
    /// A stream that follows `prompt` (which is not given out) and ends at any of `stops`.
    pub fn new(tokenizer: &Tokenizer, prompt: &[i32], stops: &[String]) -> Self {
        // More than the longest character or escape.
        let context = &prompt[prompt.len().saturating_sub(16)..];
        TextDecoder {
            tokenizer: tokenizer.clone(),
            stops: stops.iter().filter(|stop| !stop.is_empty()).cloned().collect(),
            ids: context.iter().map(|&id| id as u32).collect(),
            decoded: context.len(),
            held: String::new(),
            stopped: false,
        }
    }

    /// Takes the next id.
    ///
    /// # Errors
    /// An id outside the tokenizer's vocabulary.
    pub fn push(&mut self, id: i32) -> Result<TextDelta> {
        if self.stopped {
            return Ok(TextDelta { text: String::new(), stopped: true });
        }
        self.ids.push(id as u32);
        let text = self.decode(false)?;
        Ok(self.give(&text, false))
    }

    /// The answer is over: what was held back.
    ///
    /// # Errors
    /// As [`TextDecoder::push`].
    pub fn finish(&mut self) -> Result<TextDelta> {
        if self.stopped {
            return Ok(TextDelta { text: String::new(), stopped: true });
        }
        let text = self.decode(true)?;
        Ok(self.give(&text, true))
    }

    /// Text that is held back because it may be the beginning of a stop string.
    pub fn held(&self) -> &str {
        &self.held
    }

    /// The text of the ids not decoded yet, if it is whole or `all` is wanted.
    fn decode(&mut self, all: bool) -> Result<String> {
        let text = self.tokenizer.decode(&self.ids)?;
        if self.decoded == self.ids.len() || (!all && self.is_open(&text)?) {
            return Ok(String::new());
        }
        let before = self.tokenizer.decode(&self.ids[..self.decoded])?;
        let same = before.chars().zip(text.chars()).take_while(|(a, b)| a == b);
        let skip: usize = same.map(|(c, _)| c.len_utf8()).sum();
        let new = text[skip..].to_string();
        // Ids without text say nothing about what follows them; those before them do.
        if !new.is_empty() || self.ids.len() > LONGEST {
            self.ids.drain(..self.decoded);
        }
        self.decoded = self.ids.len();
        Ok(new)
    }

    /// Whether the last ids end inside a character or an escape.
    fn is_open(&self, text: &str) -> Result<bool> {
        let open = match &self.tokenizer {
            Tokenizer::JsonGpt2(_) => {
                let body = Gpt2Tokenizer.decode(&self.ids)?;
                // However many tokens: each of a run of backslashes may end inside an escape.
                if ends_inside_escape(&body) {
                    return Ok(true);
                }
                body.ends_with('\u{fffd}')
            }
            _ => text.ends_with('\u{fffd}'),
        };
        // A character has at most 4 bytes and a surrogate pair 12: what is longer is no character.
        Ok(open && self.ids.len() - self.decoded < 12)
    }

    /// Gives out what cannot be part of a stop string.
    fn give(&mut self, text: &str, all: bool) -> TextDelta {
        self.held.push_str(text);
        let found = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        let end = match found {
            Some(at) => {
                self.stopped = true;
                at
            }
            None if all => self.held.len(),
            None => self.held.len() - self.open_stop(),
        };
        let text = self.held[..end].to_string();
        self.held.drain(..end);
        TextDelta { text, stopped: self.stopped }
    }

    /// Length of the longest end of `held` that begins a stop string.
    fn open_stop(&self) -> usize {
        let begins = |stop: &String| {
            let most = self.held.len().min(stop.len() - 1);
            (1..=most).rev().find(|&n| {
                self.held.as_bytes()[self.held.len() - n..] == stop.as_bytes()[..n]
                    && self.held.is_char_boundary(self.held.len() - n)
            })
        };
        self.stops.iter().filter_map(begins).max().unwrap_or(0)
    }
}

/// Whether a JSON string's body ends inside an escape, or after the first half of a surrogate pair.
fn ends_inside_escape(body: &str) -> bool {
    let bytes = body.as_bytes();
    let (mut at, mut half) = (0, false);
    while at < bytes.len() {
        if bytes[at] != b'\\' {
            (at, half) = (at + 1, false);
            continue;
        }
        let length = if bytes.get(at + 1) == Some(&b'u') { 6 } else { 2 };
        if at + length > bytes.len() {
            return true;
        }
        let high = bytes[at + 2..at + length].first_chunk::<2>().map(|c| c.to_ascii_lowercase());
        half = matches!(high.as_deref(), Some([b'd', b'8'..=b'b']));
        at += length;
    }
    half
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<i32> {
        tokenizer.encode(text).unwrap().into_iter().map(|id| id as i32).collect()
    }

    /// Pieces of `text` after `prompt`, the last one from `finish`.
    fn pieces(name: &str, prompt: &str, text: &str, stops: &[&str]) -> (Vec<String>, bool) {
        let tokenizer = Tokenizer::from_name(name).unwrap();
        let stops: Vec<String> = stops.iter().map(|s| s.to_string()).collect();
        let mut stream = TextDecoder::new(&tokenizer, &ids(&tokenizer, prompt), &stops);
        let mut all = Vec::new();
        for id in ids(&tokenizer, text) {
            let piece = stream.push(id).unwrap();
            all.push(piece.text);
            if piece.stopped {
                return (all, true);
            }
        }
        let last = stream.finish().unwrap();
        all.push(last.text);
        (all, last.stopped)
    }

    #[test]
    fn characters_come_whole() {
        let (pieces, _) = pieces("bytes", "x", "aé😀b", &[]);
        assert_eq!(pieces, ["a", "", "é", "", "", "", "😀", "b", ""]);
    }

    /// Found by fuzzing: the text came out with a backslash too many.
    #[test]
    fn a_run_of_backslashes_that_tokens_cut_inside_escapes_comes_back() {
        for count in 1..130 {
            let text = format!(" \t {}can't", "\\".repeat(count));
            assert_eq!(pieces("json-gpt2", "x", &text, &[]).0.concat(), text, "{count}");
        }
    }

    /// Found by fuzzing: a space was lost behind an id without text.
    #[test]
    fn ids_without_text_do_not_join_words() {
        let tokenizer = Tokenizer::from_name("synthetic").unwrap();
        let word = tokenizer.encode("unheard-of").unwrap();
        let ids = [&word[..], &tokenizer.encode("<doc>").unwrap(), &word].concat();
        let whole = tokenizer.decode(&ids).unwrap();
        let mut stream = TextDecoder::new(&tokenizer, &[], &[]);
        let parts = ids.iter().map(|&id| stream.push(id as i32).unwrap().text);
        assert_eq!(parts.collect::<String>(), whole);
        assert_eq!(whole, "<unk> <unk>");
    }

    #[test]
    fn every_tokenizer_gives_the_text_back() {
        for (name, text) in [
            ("bytes", "naïve ≤ 𝔸\n end"),
            ("gpt2", "naïve ≤ 𝔸\n  the end 😀😀"),
            ("json-gpt2", "a\n\"quoted\" naïve 😀 \\ end"),
            ("synthetic", "Ann sings. The rain falls. A"),
        ] {
            let tokenizer = Tokenizer::from_name(name).unwrap();
            let whole = tokenizer.decode(&tokenizer.encode(text).unwrap()).unwrap();
            let (parts, stopped) = pieces(name, "", text, &[]);
            assert_eq!((parts.concat(), stopped), (whole, false), "{name}");
        }
    }

    #[test]
    fn words_are_set_off_from_the_prompt() {
        let (parts, _) = pieces("synthetic", "Ann", "sings. The", &[]);
        let tokenizer = Tokenizer::from_name("synthetic").unwrap();
        let all = tokenizer.decode(&tokenizer.encode("Ann sings. The").unwrap()).unwrap();
        assert_eq!(format!("Ann{}", parts.concat()), all);
    }

    #[test]
    fn stop_strings_are_found_across_tokens_and_never_shown() {
        let (parts, stopped) = pieces("bytes", "", "one two three", &["two", "wo t"]);
        assert!(stopped);
        assert_eq!(parts, ["o", "n", "e", " ", "", "", ""]);
        let (parts, stopped) = pieces("bytes", "", "abab abc", &["abc"]);
        assert_eq!((parts.concat().as_str(), stopped), ("abab ", true));
        // What only looked like the beginning comes out, at the latest at the end.
        let (parts, stopped) = pieces("bytes", "", "abab", &["abc"]);
        assert_eq!((parts.concat().as_str(), stopped), ("abab", false));
        let (parts, stopped) = pieces("gpt2", "", "Hello world\n\nand more", &["\n\n"]);
        assert_eq!((parts.concat().as_str(), stopped), ("Hello world", true));
        let (parts, stopped) = pieces("bytes", "", "aé!", &["é!", ""]);
        assert_eq!((parts.concat().as_str(), stopped), ("a", true));
    }

    #[test]
    fn bytes_that_are_no_text_do_not_block_the_stream() {
        let tokenizer = Tokenizer::from_name("bytes").unwrap();
        let mut stream = TextDecoder::new(&tokenizer, &[97], &[]);
        let mut text = String::new();
        for _ in 0..20 {
            text.push_str(&stream.push(0x80).unwrap().text);
        }
        assert!(text.chars().count() >= 12, "{text:?}");
        assert!(stream.push(300).is_err());
    }
}
