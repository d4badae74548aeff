//! Needles in words, in any text and with any tokenizer.

use fox_base::random::{SplitMix64, mix};
use fox_data::Tokenizer;
use serde::Deserialize;

use super::case::{Case, Cases, Mode};
use crate::words::{PLACES, WORDS};
use crate::{Error, Result};

/// A needle in words, for any tokenizer and any haystack.
///
/// With `words`, every case asks for another one of them: `{word}` in the other fields stands for the case's word and
/// `{key}` for one of `keys`; the remaining words are the wrong answers.
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
    /// Candidates for `{word}`.
    #[serde(default)]
    pub words: Vec<String>,
    /// Candidates for `{key}`.
    #[serde(default)]
    pub keys: Vec<String>,
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
            words: Vec::new(),
            keys: Vec::new(),
        }
    }
}

impl Needle {
    /// A fact whose answer is one word out of `candidates`, which differs from case to case. The words have the same
    /// number of letters, so their log-probabilities compare without normalization by length.
    ///
    /// # Errors
    /// Fewer than 2 candidates, or more than there are words.
    pub fn one_word(candidates: usize) -> Result<Self> {
        let Some(words) = WORDS.get(..candidates).filter(|words| words.len() > 1) else {
            return Err(Error::Argument(format!(
                "{candidates} candidates are not from 2 to {}",
                WORDS.len()
            )));
        };
        Ok(Needle {
            needle: "Whenever they came to the {key}, they had to say {word} to be let in.".into(),
            question: "The password of the {key} is".into(),
            answer: " {word}.".into(),
            expected: Some("{word}".into()),
            wrong: Vec::new(),
            words: words.iter().map(|word| word.to_string()).collect(),
            keys: PLACES.iter().map(|place| place.to_string()).collect(),
        })
    }

    /// Reads a needle from TOML: `needle`, `question`, `answer`, and optionally `expected`, `wrong`, `words` and `keys`.
    pub fn from_file(path: &std::path::Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
        let bad = |detail: String| Error::BadFile { path: path.to_path_buf(), detail };
        let needle: Needle = toml::from_str(&text).map_err(|e| bad(e.message().to_string()))?;
        if needle.answer.trim().is_empty() || needle.question.trim().is_empty() {
            return Err(bad("`question` and `answer` must not be empty".into()));
        }
        let fields = [&needle.needle, &needle.question, &needle.answer];
        if needle.words.is_empty() && fields.iter().any(|text| text.contains("{word}")) {
            return Err(bad("`{word}` needs `words`, a list of two words or more".into()));
        }
        if !needle.words.is_empty() && (needle.words.len() < 2 || !needle.answer.contains("{word}"))
        {
            return Err(bad("`words` needs two words or more, and `{word}` in `answer`".into()));
        }
        Ok(needle)
    }

    /// The needle of a case: one of the words is right, the others are wrong.
    fn of_case(&self, random: &mut SplitMix64) -> Needle {
        if self.words.is_empty() {
            return self.clone();
        }
        let right = random.below(self.words.len() as u64) as usize;
        let key = match &self.keys[..] {
            [] => String::new(),
            keys => random.pick(keys),
        };
        let with = |text: &str, word: &str| text.replace("{key}", &key).replace("{word}", word);
        let word = &self.words[right];
        let others = self.words.iter().enumerate().filter(|(i, _)| *i != right);
        Needle {
            needle: with(&self.needle, word),
            question: with(&self.question, word),
            answer: with(&self.answer, word),
            expected: self.expected.as_ref().map(|text| with(text, word)),
            wrong: others.map(|(_, other)| with(&self.answer, other)).collect(),
            words: Vec::new(),
            keys: Vec::new(),
        }
    }
}

/// A needle in words inside a text.
pub struct TextCases {
    haystack: Vec<u32>,
    needle: Needle,
    mode: Mode,
    tokenizer: Tokenizer,
    /// Ids that end a sentence or a line: the needle goes behind one of them.
    breaks: Vec<u32>,
    answer_tokens: usize,
    identity: String,
}

impl TextCases {
    /// Hides `needle` in `text`.
    pub fn new(text: &str, needle: &Needle, mode: Mode, tokenizer: &Tokenizer) -> Result<Self> {
        let haystack = tokenizer.encode(text)?;
        if haystack.is_empty() {
            return Err(Error::Empty { what: "the haystack".into() });
        }
        let hash = twox_hash::XxHash3_64::oneshot(bytemuck::cast_slice(&haystack));
        let mut answer_tokens = tokenizer.encode(&needle.answer)?.len();
        for word in &needle.words {
            let answer = needle.answer.replace("{word}", word);
            answer_tokens = answer_tokens.max(tokenizer.encode(&answer)?.len());
        }
        Ok(TextCases {
            breaks: sentence_ends(tokenizer)?,
            identity: format!("{mode:?} {needle:?} in {hash:016x} by {}", tokenizer.identity()),
            haystack,
            needle: needle.clone(),
            mode,
            tokenizer: tokenizer.clone(),
            answer_tokens: answer_tokens + 8,
        })
    }
}

/// Ids of one token that end a sentence or a line.
pub(crate) fn sentence_ends(tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let mut ends = Vec::new();
    for mark in [".", "\n", "?", "!", ".\n"] {
        if let [id] = tokenizer.encode(mark)?[..] {
            ends.push(id);
        }
    }
    Ok(ends)
}

impl Cases for TextCases {
    fn case(&self, length: usize, depth: f64, index: u64) -> Result<Case> {
        let seed = mix(mix(index) ^ mix(length as u64) ^ depth.to_bits());
        let needle = self.needle.of_case(&mut SplitMix64::new(seed));
        let encode = |text: &str| self.tokenizer.encode(text);
        let hidden = encode(&match self.mode {
            Mode::Standard => format!("\n{}\n", needle.needle),
            Mode::Easy => format!("\n{}{}\n", needle.question, needle.answer),
        })?;
        let question = encode(&format!("\n{}", needle.question))?;
        let needed = 1 + hidden.len() + question.len();
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
        let at = break_before(&self.breaks, hay, target);
        let bos = self.tokenizer.bos();
        let prompt = [&[bos], &hay[..at], &hidden[..], &hay[at..], &question[..]].concat();
        Ok(Case {
            prompt,
            answer: encode(&needle.answer)?,
            wrong: needle.wrong.iter().map(|w| encode(w)).collect::<fox_data::Result<_>>()?,
            expected: Some(needle.expected.unwrap_or_else(|| needle.answer.trim().to_string())),
        })
    }

    fn identity(&self) -> String {
        self.identity.clone()
    }

    fn vocab_size(&self) -> usize {
        self.tokenizer.vocab_size()
    }

    fn answer_tokens(&self) -> usize {
        self.answer_tokens
    }

    fn chance(&self) -> f64 {
        match self.needle.words.len() {
            0 => 0.0,
            words => 1.0 / words as f64,
        }
    }
}

/// The sentence end before `target`, or `target` itself when there is none nearby.
pub(crate) fn break_before(breaks: &[u32], hay: &[u32], target: usize) -> usize {
    let nearby = 256.min(hay.len() / 4);
    let from = target.saturating_sub(nearby);
    let found = hay[from..target].iter().rposition(|id| breaks.contains(id));
    // At the very ends the needle belongs exactly there.
    match found {
        Some(at) if target < hay.len() => from + at + 1,
        _ => target,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn word_differs_between_cases() {
        let tokenizer = Tokenizer::from_name("bytes").unwrap();
        let text = "The sun rose. ".repeat(400);
        let needle = Needle::one_word(16).unwrap();
        for mode in [Mode::Easy, Mode::Standard] {
            let cases = TextCases::new(&text, &needle, mode, &tokenizer).unwrap();
            assert_eq!((cases.chance(), cases.answer_tokens()), (1.0 / 16.0, 16));
            let mut seen = std::collections::BTreeSet::new();
            for index in 0..40 {
                let case = cases.case(600, 0.5, index).unwrap();
                let prompt = tokenizer.decode(&case.prompt).unwrap();
                let word = case.expected.unwrap();
                assert_eq!(prompt.matches(&word).count(), 1, "{prompt}");
                assert_eq!(
                    prompt.matches("password").count(),
                    if mode == Mode::Easy { 2 } else { 1 }
                );
                assert_eq!(tokenizer.decode(&case.answer).unwrap(), format!(" {word}."));
                assert!(case.wrong.len() == 15 && !case.wrong.contains(&case.answer));
                assert!(case.wrong.iter().all(|wrong| wrong.len() == case.answer.len()));
                assert!(!prompt.contains('{'));
                seen.insert(word);
            }
            assert!(seen.len() > 10, "{seen:?}");
        }
        for candidates in [0, 1, 65] {
            let error = Needle::one_word(candidates).unwrap_err().to_string();
            assert_eq!(error, format!("{candidates} candidates are not from 2 to 64"));
        }
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
        let fields = "needle = \"{word}\"\nquestion = \"Q\"\nanswer = \"{word}\"";
        for (words, said) in
            [("", "`{word}` needs `words`"), ("\nwords = [\"a\"]", "two words or more")]
        {
            std::fs::write(&path, format!("{fields}{words}")).unwrap();
            let error = Needle::from_file(&path).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
        let error = Needle::from_file(&folder.path().join("none")).unwrap_err().to_string();
        assert!(error.starts_with("cannot read"), "{error}");
    }
}
