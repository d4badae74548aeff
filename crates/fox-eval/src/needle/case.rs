//! One needle in one haystack, as token ids.

use fox_data::{NeedleCase, SyntheticConfig, SyntheticTokenizer, Tokenizer};
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

/// A needle in words, for any tokenizer and any haystack.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Needle {
    /// The sentence that is hidden in the standard mode.
    pub needle: String,
    /// What is asked at the end, up to and including the words before the answer.
    pub question: String,
    /// The answer, as it should continue the question.
    pub answer: String,
    /// What a generated answer must contain; the answer itself by default.
    #[serde(default)]
    pub expected: Option<String>,
    /// Wrong answers of the same form.
    #[serde(default)]
    pub wrong: Vec<String>,
}

impl Default for Needle {
    /// The needle of the well-known test, as the FoX paper used it.
    fn default() -> Self {
        Needle {
            needle: "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.".into(),
            question: "What is the best thing to do in San Francisco? Answer: The best thing to do in San Francisco is".into(),
            answer: " eat a sandwich and sit in Dolores Park on a sunny day.".into(),
            expected: Some("eat a sandwich and sit in Dolores Park on a sunny day".into()),
            wrong: Vec::new(),
        }
    }
}

impl Needle {
    /// Reads a needle from TOML: `needle`, `question`, `answer`, and optionally `expected` and `wrong`.
    pub fn from_file(path: &std::path::Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
        let bad = |detail: String| Error::BadFile { path: path.to_path_buf(), detail };
        let needle: Needle = toml::from_str(&text).map_err(|e| bad(e.message().to_string()))?;
        if needle.answer.trim().is_empty() || needle.question.trim().is_empty() {
            return Err(bad("`question` and `answer` must not be empty".into()));
        }
        Ok(needle)
    }
}

/// A needle in words inside a text.
pub struct TextCases {
    haystack: Vec<u32>,
    hidden: Vec<u32>,
    question: Vec<u32>,
    answer: Vec<u32>,
    wrong: Vec<Vec<u32>>,
    expected: String,
    /// Ids that end a sentence or a line: the needle goes behind one of them.
    breaks: Vec<u32>,
    bos: u32,
    vocab_size: usize,
    identity: String,
}

impl TextCases {
    /// Hides `needle` in `text`.
    pub fn new(text: &str, needle: &Needle, mode: Mode, tokenizer: &Tokenizer) -> Result<Self> {
        let encode = |text: &str| tokenizer.encode(text);
        let haystack = encode(text)?;
        if haystack.is_empty() {
            return Err(Error::Empty { what: "the haystack".into() });
        }
        let hidden = match mode {
            Mode::Standard => format!("\n{}\n", needle.needle),
            Mode::Easy => format!("\n{}{}\n", needle.question, needle.answer),
        };
        let hash = twox_hash::XxHash3_64::oneshot(bytemuck::cast_slice(&haystack));
        let mut breaks = Vec::new();
        for mark in [".", "\n", "?", "!", ".\n"] {
            if let [id] = encode(mark)?[..] {
                breaks.push(id);
            }
        }
        Ok(TextCases {
            hidden: encode(&hidden)?,
            question: encode(&format!("\n{}", needle.question))?,
            answer: encode(&needle.answer)?,
            wrong: needle.wrong.iter().map(|w| encode(w)).collect::<fox_data::Result<_>>()?,
            expected: needle.expected.clone().unwrap_or_else(|| needle.answer.trim().to_string()),
            breaks,
            bos: tokenizer.bos(),
            vocab_size: tokenizer.vocab_size(),
            identity: format!("{mode:?} {needle:?} in {hash:016x} by {}", tokenizer.identity()),
            haystack,
        })
    }
}

impl Cases for TextCases {
    fn case(&self, length: usize, depth: f64, index: u64) -> Result<Case> {
        let needed = 1 + self.hidden.len() + self.question.len();
        let room = length.checked_sub(needed).ok_or_else(|| {
            Error::Argument(format!("needle and question need {needed} tokens, not {length}"))
        })?;
        let available = self.haystack.len();
        if room > available {
            return Err(Error::Argument(format!(
                "the haystack has {available} tokens, but a prompt of {length} needs {room}; give a longer text"
            )));
        }
        // Every case looks at another part of the text, as far as there is one.
        let spare = available - room;
        let start = (index as usize).wrapping_mul(room.max(1)) % (spare + 1);
        let hay = &self.haystack[start..start + room];
        let target = (depth.clamp(0.0, 1.0) * room as f64).round() as usize;
        let at = self.place(hay, target);
        let prompt =
            [&[self.bos], &hay[..at], &self.hidden[..], &hay[at..], &self.question[..]].concat();
        Ok(Case {
            prompt,
            answer: self.answer.clone(),
            wrong: self.wrong.clone(),
            expected: Some(self.expected.clone()),
        })
    }

    fn identity(&self) -> String {
        self.identity.clone()
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn answer_tokens(&self) -> usize {
        self.answer.len() + 8
    }

    fn chance(&self) -> f64 {
        0.0
    }
}

impl TextCases {
    /// The break before `target`, or `target` itself when there is none nearby.
    fn place(&self, hay: &[u32], target: usize) -> usize {
        let nearby = 256.min(hay.len() / 4);
        let from = target.saturating_sub(nearby);
        let found = hay[from..target].iter().rposition(|id| self.breaks.contains(id));
        // At the very ends the needle belongs exactly there.
        match found {
            Some(at) if target < hay.len() => from + at + 1,
            _ => target,
        }
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

    #[test]
    fn text_needle_follows_a_sentence_at_its_depth() {
        let tokenizer = Tokenizer::from_name("bytes").unwrap();
        let text = "The sun rose. ".repeat(400);
        let needle = Needle::default();
        let cases = TextCases::new(&text, &needle, Mode::Standard, &tokenizer).unwrap();
        for depth in [0.0, 0.3, 1.0] {
            let case = cases.case(2000, depth, 1).unwrap();
            assert_eq!(case.prompt.len(), 2000);
            let text = tokenizer.decode(&case.prompt).unwrap();
            let at = text.find(&needle.needle).unwrap();
            let room = 2000.0 - 1.0 - (needle.needle.len() + needle.question.len() + 3) as f64;
            assert!((at as f64 / room - depth).abs() < 0.02, "{depth}: {at}");
            assert!(text.ends_with(&needle.question));
        }
        let easy = TextCases::new(&text, &needle, Mode::Easy, &tokenizer).unwrap();
        let prompt = tokenizer.decode(&easy.case(2000, 0.5, 0).unwrap().prompt).unwrap();
        assert_eq!(prompt.matches(&needle.question).count(), 2);
    }

    #[test]
    fn rejects_haystack_that_is_too_small() {
        let tokenizer = Tokenizer::from_name("bytes").unwrap();
        let needle = Needle::default();
        let error = TextCases::new("", &needle, Mode::Easy, &tokenizer).err().unwrap().to_string();
        assert_eq!(error, "the haystack is empty");
        let cases = TextCases::new("short", &needle, Mode::Easy, &tokenizer).unwrap();
        let error = cases.case(4000, 0.5, 0).unwrap_err().to_string();
        assert!(error.contains("the haystack has 5 tokens"), "{error}");
        let error = cases.case(20, 0.5, 0).unwrap_err().to_string();
        assert!(error.contains("not 20"), "{error}");
    }

    #[test]
    fn needles_come_from_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("n.toml");
        std::fs::write(&path, "needle = \"N\"\nquestion = \"Q\"\nanswer = \" a\"").unwrap();
        assert_eq!(Needle::from_file(&path).unwrap().answer, " a");
        std::fs::write(&path, "needle = \"N\"\nquestion = \"Q\"").unwrap();
        let error = Needle::from_file(&path).unwrap_err().to_string();
        assert!(error.contains("answer"), "{error}");
        let error = Needle::from_file(&folder.path().join("none")).unwrap_err().to_string();
        assert!(error.starts_with("cannot read"), "{error}");
    }
}
