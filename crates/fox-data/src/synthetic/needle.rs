//! The needle test in the words of the synthetic corpus.

use fox_base::random::mix;

use super::config::SyntheticConfig;
use super::document::SyntheticDocument;
use super::tokenizer::SyntheticTokenizer;
use super::words::{ACTIONS, CHAPTER, PEOPLE};
use crate::random::stream;

/// A long chapter with one fact about a person in it and a question for that fact at its end.
///
/// The prompt begins with a stale fact about the person and the sentence that opens a chapter. The rest is one chapter
/// of the corpus in which the person occurs only in the needle, and at the end: the next token is the answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NeedleCase {
    /// Ids of stale fact, chapter sentence, haystack with needle, and question, without the start marker; a few tokens
    /// fewer than asked for, so that every sentence is whole.
    pub prompt: Vec<u32>,
    /// The id that answers the question.
    pub answer: u32,
    /// What the stale fact says instead; never the answer.
    pub stale: u32,
    /// Every id that could have been the answer: chance is one in this many.
    pub candidates: Vec<u32>,
    /// Position of the answer inside the needle: the token to be found again.
    pub needle_position: usize,
}

impl NeedleCase {
    /// Shortest context in which a needle and its question fit.
    pub const MIN_CONTEXT: usize = 16;

    /// The case number `index` with a prompt of at most `context` tokens and the needle at `depth` (0 = right
    /// behind the chapter sentence, 1 = last sentence before the question). Cases of another context or depth
    /// have another text, too.
    ///
    /// A context below [`Self::MIN_CONTEXT`] is treated as that, a depth outside 0..=1 as the nearer end.
    pub fn new(config: &SyntheticConfig, index: u64, context: usize, depth: f64) -> Self {
        let config = &config.in_range();
        let context = context.max(Self::MIN_CONTEXT);
        let depth = if depth.is_finite() { depth.clamp(0.0, 1.0) } else { 0.0 };
        let cell = mix(mix(context as u64) ^ depth.to_bits());
        let mut random = stream(mix(config.seed ^ 0x6e65_6564_6c65) ^ cell, index);
        let person = random.below(config.people() as u64) as usize;
        let answer = random.below(config.actions as u64) as usize;
        // Any other action.
        let other = 1 + random.below(config.actions as u64 - 1) as usize;
        let stale = (answer + other) % config.actions;

        let id = |word: &str| SyntheticTokenizer.document_id(word);
        let person_id = id(PEOPLE[person]);
        let mut prompt = vec![person_id, id(ACTIONS[stale])];
        prompt.extend(CHAPTER.iter().map(|word| id(word)));
        let needle = [person_id, id(ACTIONS[answer])];
        let room = context - prompt.len() - needle.len() - 1;
        let haystack =
            Haystack::new(SyntheticDocument::chapter_without(config, random, person), room);
        let at = haystack.boundary_near(depth);
        prompt.extend_from_slice(&haystack.ids[..at]);
        prompt.extend(needle);
        let needle_position = prompt.len() - 1;
        prompt.extend_from_slice(&haystack.ids[at..]);
        prompt.push(person_id);
        Self {
            prompt,
            answer: needle[1],
            stale: id(ACTIONS[stale]),
            candidates: ACTIONS[..config.actions].iter().map(|action| id(action)).collect(),
            needle_position,
        }
    }
}

/// Whole sentences of a document.
struct Haystack {
    ids: Vec<u32>,
    /// Where a sentence starts or the text ends, in order.
    boundaries: Vec<usize>,
}

impl Haystack {
    fn new(mut document: SyntheticDocument, room: usize) -> Self {
        let mut ids = Vec::with_capacity(room);
        let mut boundaries = vec![0];
        while ids.len() < room {
            ids.extend(document.next().map(|token| token.id));
            if document.at_sentence_start() {
                boundaries.push(ids.len());
            }
        }
        ids.truncate(boundaries.last().copied().unwrap_or(0));
        Self { ids, boundaries }
    }

    fn boundary_near(&self, depth: f64) -> usize {
        let target = (depth * self.ids.len() as f64).round() as usize;
        self.boundaries.iter().copied().min_by_key(|b| b.abs_diff(target)).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn needle_depth_and_unique_answer() {
        let config = SyntheticConfig::default();
        let chapter = SyntheticTokenizer.encode("A new chapter begins.");
        for (index, depth) in [(0, 0.0), (1, 0.25), (2, 0.5), (3, 1.0), (4, 1.0)] {
            let case = NeedleCase::new(&config, index, 1000, depth);
            assert!((995..=1000).contains(&case.prompt.len()), "{}", case.prompt.len());
            let person = *case.prompt.last().unwrap();
            // Before the chapter: the stale fact. In it: the needle and the question, and no other chapter.
            assert_eq!(case.prompt[..2], [person, case.stale]);
            assert_eq!(case.prompt[2..6], chapter);
            assert!(case.prompt[6..].iter().all(|id| !chapter.contains(id)));
            let said: Vec<usize> =
                (6..case.prompt.len()).filter(|i| case.prompt[*i] == person).collect();
            assert_eq!(said, [case.needle_position - 1, case.prompt.len() - 1]);
            assert_eq!(case.prompt[case.needle_position], case.answer);
            let found = (case.needle_position - 7) as f64 / (case.prompt.len() - 9) as f64;
            assert!((found - depth).abs() < 0.01, "{found} for {depth}");
            assert!(case.candidates.contains(&case.answer) && case.candidates.len() == 16);
        }
    }

    #[test]
    fn stale_actions_are_never_the_answer() {
        let config = SyntheticConfig { actions: 3, ..SyntheticConfig::default() };
        let pairs: HashSet<(u32, u32)> = (0..200)
            .map(|index| NeedleCase::new(&config, index, 32, 0.5))
            .map(|case| (case.answer, case.stale))
            .collect();
        assert_eq!(pairs.len(), 6);
        assert!(pairs.iter().all(|(answer, stale)| answer != stale));
    }

    #[test]
    fn needle_cases_differ_by_cell() {
        let config = SyntheticConfig::default();
        let mut texts = HashSet::new();
        for context in [128, 129, 256] {
            for depth in [0.0, 0.5, 1.0] {
                for index in 0..10 {
                    let case = NeedleCase::new(&config, index, context, depth);
                    assert_eq!(case, NeedleCase::new(&config, index, context, depth));
                    // The haystack without the needle, which may lie at the same place.
                    texts.insert(case.prompt[case.prompt.len() - 40..].to_vec());
                }
            }
        }
        assert_eq!(texts.len(), 90);
    }

    #[test]
    fn tiny_contexts_hold_needle_and_question() {
        for (context, depth) in [(0, 7.0), (16, f64::NAN)] {
            let case = NeedleCase::new(&SyntheticConfig::default(), 5, context, depth);
            assert!((9..=16).contains(&case.prompt.len()), "{case:?}");
        }
    }
}
