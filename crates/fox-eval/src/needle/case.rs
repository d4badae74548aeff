//! One needle in one haystack, as token ids.

use fox_data::{NeedleCase, SyntheticConfig, SyntheticTokenizer};
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// What is hidden, and how it is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The needle contains the question: the words before the answer are those of the question.
    Easy,
    /// The needle states the fact in other words than the question.
    Standard,
}

/// A question about a long text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    /// Haystack, needle and question, the start marker first.
    pub prompt: Vec<u32>,
    /// The right answer.
    pub answer: Vec<u32>,
    /// Wrong answers to compare with; may be empty.
    pub wrong: Vec<Vec<u32>>,
    /// Text that the generated answer must contain; without text, the answer's ids must come first.
    pub expected: Option<String>,
}

/// Where cases come from.
pub trait Cases {
    /// The case number `index` of about `length` tokens with the needle at `depth` (0 = first, 1 = last).
    fn case(&self, length: usize, depth: f64, index: u64) -> Result<Case>;

    /// What the cases are, in words: results on file belong to exactly these.
    fn identity(&self) -> String;

    /// Number of token ids a model must know.
    fn vocab_size(&self) -> usize;

    /// Tokens an answer may take.
    fn answer_tokens(&self) -> usize;

    /// Fraction of right answers of a model that knows nothing but the form of an answer.
    fn chance(&self) -> f64;
}

/// The facts of the synthetic corpus: the answer is one token, and an older answer is void.
#[derive(Clone, Copy, Debug)]
pub struct SyntheticCases {
    /// The corpus of the haystacks.
    pub config: SyntheticConfig,
}

impl Cases for SyntheticCases {
    fn case(&self, length: usize, depth: f64, index: u64) -> Result<Case> {
        if length < NeedleCase::MIN_CONTEXT + 1 {
            return Err(Error::Argument(format!(
                "a needle and its question need {} tokens, not {length}",
                NeedleCase::MIN_CONTEXT + 1
            )));
        }
        // One token is the start marker.
        let case = NeedleCase::new(&self.config, index, length - 1, depth);
        let prompt = [&[SyntheticTokenizer::BOS], &case.prompt[..]].concat();
        let wrong = case.candidates.iter().filter(|id| **id != case.answer).map(|id| vec![*id]);
        Ok(Case { prompt, answer: vec![case.answer], wrong: wrong.collect(), expected: None })
    }

    fn identity(&self) -> String {
        format!("synthetic-v2 {:?}", self.config)
    }

    fn vocab_size(&self) -> usize {
        SyntheticTokenizer::VOCAB_SIZE
    }

    fn answer_tokens(&self) -> usize {
        1
    }

    fn chance(&self) -> f64 {
        let candidates = NeedleCase::new(&self.config, 0, NeedleCase::MIN_CONTEXT, 0.0).candidates;
        1.0 / candidates.len() as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn synthetic_case_asks_for_the_current_fact() {
        let cases = SyntheticCases { config: SyntheticConfig::default() };
        for index in 0..20 {
            let case = cases.case(300, 0.5, index).unwrap();
            assert!((295..=300).contains(&case.prompt.len()) && case.prompt[0] == 0);
            assert_eq!((case.answer.len(), case.wrong.len()), (1, 15));
            let text = SyntheticTokenizer.decode(&case.prompt).unwrap();
            let (before, chapter) = text.split_once(" A new chapter begins. ").unwrap();
            let (haystack, person) = chapter.rsplit_once(' ').unwrap();
            let fact = format!("{person} {}", SyntheticTokenizer.decode(&case.answer).unwrap());
            assert_eq!(haystack.matches(&fact).count(), 1, "{fact} in {text}");
            assert!(before.starts_with(person) && before != fact, "{text}");
        }
        assert_eq!(cases.chance(), 1.0 / 16.0);
        assert!(cases.case(5, 0.5, 0).is_err());
    }
}
