//! Text to token ids, as lm-evaluation-harness does it (`lm_eval/api/model.py`, `_encode_pair`, and
//! `lm_eval/utils.py`, `get_rolling_token_windows`).

use fox_base::Setting;
use fox_data::Tokenizer;

use super::likelihood::Request;
use crate::{Error, Result};

/// How texts become ids.
#[derive(Clone, Copy, Debug)]
pub struct Encoder<'a> {
    /// Makes the ids.
    pub tokenizer: &'a Tokenizer,
    /// Whether the start marker is put in front of every context.
    pub bos: bool,
    /// Tokens a model is given at most.
    pub max_length: usize,
}

/// What to leave out of a prompt that is too long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Truncation {
    /// The start.
    Left,
    /// The middle, as LongBench does: instructions stand at both ends.
    #[default]
    Middle,
}

impl Encoder<'_> {
    /// A continuation after a context. White space at the end of the context belongs to the continuation; the
    /// whole is encoded at once and split behind as many ids as the context alone has. Too long a context
    /// loses its start.
    ///
    /// # Errors
    /// A continuation that adds no tokens to the context, or with more than the model is given.
    pub fn pair(&self, context: &str, continuation: &str) -> Result<Request> {
        let trimmed = context.trim_end();
        let text = format!("{context}{continuation}");
        let whole = self.tokenizer.encode(&text)?;
        let alone = self.tokenizer.encode(trimmed)?;
        // Ids of the context alone come first even where the whole would begin otherwise.
        let continuation = whole.get(alone.len()..).unwrap_or_default().to_vec();
        if continuation.is_empty() {
            return Err(Error::Argument(format!(
                "the continuation {:?} adds no tokens to the context",
                &text[trimmed.len()..]
            )));
        }
        if continuation.len() > self.max_length {
            return Err(Error::of_setting(
                Setting::MaxLength,
                format!(
                    "a continuation of {} tokens does not fit the length of {}; allow a longer one",
                    continuation.len(),
                    self.max_length
                ),
            ));
        }
        let mut context = alone;
        if self.bos || context.is_empty() {
            context.insert(0, self.tokenizer.bos());
        }
        // The last token is only judged, never read.
        let room = self.max_length + 1 - continuation.len();
        let surplus = context.len().saturating_sub(room);
        Ok(Request { context: context.split_off(surplus), continuation })
    }

    /// The windows of a whole text: each token is judged once, the first after the start marker, the others
    /// after the token before them; the last window reads as much as fits.
    pub fn rolling(&self, text: &str) -> Result<Vec<Request>> {
        let ids = self.tokenizer.encode(text)?;
        let mut windows = Vec::new();
        let mut judged = 0;
        while judged < ids.len() {
            let end = ids.len().min(judged + self.max_length);
            let context = if judged == 0 {
                vec![self.tokenizer.bos()]
            } else {
                // Input `end - max_length - 1 .. end - 1` ends with all but one of the judged tokens.
                ids[end - self.max_length - 1..judged].to_vec()
            };
            windows.push(Request { context, continuation: ids[judged..end].to_vec() });
            judged = end;
        }
        Ok(windows)
    }

    /// A prompt that leaves room for `answer` tokens.
    pub fn prompt(&self, text: &str, answer: usize, truncation: Truncation) -> Result<Vec<u32>> {
        let mut ids = self.tokenizer.encode(text)?;
        let room = self.max_length.saturating_sub(answer + usize::from(self.bos));
        if room == 0 {
            return Err(Error::of_setting(
                Setting::MaxLength,
                format!(
                    "an answer of {answer} tokens leaves no room in a length of {}; allow a longer one",
                    self.max_length
                ),
            ));
        }
        if ids.len() > room {
            match truncation {
                Truncation::Left => ids = ids.split_off(ids.len() - room),
                Truncation::Middle => {
                    let tail = ids.split_off(ids.len() - room / 2);
                    ids.truncate(room / 2);
                    // The halves are joined as text, as LongBench does.
                    let text = self.tokenizer.decode(&ids)? + &self.tokenizer.decode(&tail)?;
                    ids = self.tokenizer.encode(&text)?;
                }
            }
        }
        if self.bos || ids.is_empty() {
            ids.insert(0, self.tokenizer.bos());
        }
        Ok(ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoder(tokenizer: &Tokenizer, bos: bool, max_length: usize) -> Encoder<'_> {
        Encoder { tokenizer, bos, max_length }
    }

    fn ids(text: &str) -> Vec<u32> {
        text.bytes().map(u32::from).collect()
    }

    #[test]
    fn trailing_spaces_belong_to_the_continuation() {
        let tokenizer = Tokenizer::from_name("bytes").unwrap();
        let request = encoder(&tokenizer, false, 99).pair("a b \n", "c").unwrap();
        assert_eq!(request, Request { context: ids("a b"), continuation: ids(" \nc") });
        let request = encoder(&tokenizer, true, 99).pair("a", "c").unwrap();
        assert_eq!(request.context, [255, 97]);
        // An empty context is the start marker, also one of spaces alone.
        for context in ["", " "] {
            let request = encoder(&tokenizer, false, 99).pair(context, "c").unwrap();
            assert_eq!(request.context, [255]);
            assert_eq!(request.continuation, ids(&format!("{context}c")));
        }
        let said = encoder(&tokenizer, false, 9).pair("a", "").unwrap_err().to_string();
        assert!(said.contains("adds no tokens to the context"), "{said}");
    }

    #[test]
    fn merges_across_the_boundary_match_the_harness() {
        let tokenizer = Tokenizer::from_name("gpt2").unwrap();
        let request = encoder(&tokenizer, false, 99).pair("Question: x\nAnswer:", " yes").unwrap();
        assert_eq!(request.context, tokenizer.encode("Question: x\nAnswer:").unwrap());
        assert_eq!(request.continuation, tokenizer.encode(" yes").unwrap());
    }

    #[test]
    fn long_contexts_lose_their_start() {
        let tokenizer = Tokenizer::from_name("bytes").unwrap();
        // Three tokens are read, "cdX"; the "Y" behind them is only judged.
        let request = encoder(&tokenizer, false, 3).pair("abcd", "XY").unwrap();
        assert_eq!(request, Request { context: ids("cd"), continuation: ids("XY") });
        let said = encoder(&tokenizer, false, 1).pair("abcd", "XY").unwrap_err().to_string();
        assert!(said.contains("allow a longer one"), "{said}");
    }

    /// The example in the documentation of the harness's `loglikelihood_rolling`.
    #[test]
    fn rolling_windows_score_every_token_once() {
        let tokenizer = Tokenizer::from_name("bytes").unwrap();
        let windows = encoder(&tokenizer, false, 4).rolling("0123456789").unwrap();
        let expected = [(vec![255], "0123"), (ids("3"), "4567"), (ids("567"), "89")];
        assert_eq!(windows.len(), 3);
        for (window, (context, continuation)) in windows.iter().zip(expected) {
            assert_eq!(*window, Request { context, continuation: ids(continuation) });
        }
        assert!(encoder(&tokenizer, false, 4).rolling("").unwrap().is_empty());
    }

    #[test]
    fn prompts_lose_their_middle_or_their_start() {
        let tokenizer = Tokenizer::from_name("bytes").unwrap();
        let prompt = |bos, length, cut| {
            encoder(&tokenizer, bos, length).prompt("0123456789", 2, cut).unwrap()
        };
        assert_eq!(prompt(false, 12, Truncation::Middle), ids("0123456789"));
        assert_eq!(prompt(false, 8, Truncation::Middle), ids("012789"));
        assert_eq!(prompt(false, 9, Truncation::Middle), ids("012789"));
        assert_eq!(prompt(false, 8, Truncation::Left), ids("456789"));
        assert_eq!(prompt(true, 9, Truncation::Left), [vec![255], ids("456789")].concat());
        assert!(encoder(&tokenizer, true, 3).prompt("x", 2, Truncation::Left).is_err());
    }
}
