//! The needle test in the words of the synthetic corpus.

use fox_base::random::mix;

use super::config::SyntheticConfig;
use super::document::SyntheticDocument;
use super::tokenizer::SyntheticTokenizer;
use super::words::{TITLES, names_of};
use crate::random::stream;

/// A haystack with one fact in it and a question for that fact at its end.
///
/// The haystack is a document of the corpus in which the needle's title never occurs, the needle is a statement
/// of the corpus's own, and the prompt ends with the title, so the answer is the one token that must come next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NeedleCase {
    /// Ids of haystack, needle and question, without the start marker; a few tokens fewer than asked for,
    /// so that every sentence is whole.
    pub prompt: Vec<u32>,
    /// The id that answers the question.
    pub answer: u32,
    /// Every id that could have been the answer: chance is one in this many.
    pub candidates: Vec<u32>,
    /// Position of the answer inside the needle: the token to be found again.
    pub needle_position: usize,
}

impl NeedleCase {
    /// Shortest context in which a needle and its question fit.
    pub const MIN_CONTEXT: usize = 16;

    /// The case number `index` with a prompt of at most `context` tokens and the needle at `depth` (0 = first
    /// sentence, 1 = last sentence before the question).
    ///
    /// A context below [`Self::MIN_CONTEXT`] is treated as that, a depth outside 0..=1 as the nearer end.
    pub fn new(config: &SyntheticConfig, index: u64, context: usize, depth: f64) -> Self {
        let config = &config.in_range();
        let context = context.max(Self::MIN_CONTEXT);
        let mut random = stream(mix(config.seed ^ 0x6e65_6564_6c65), index);
        let title = random.below(config.titles as u64) as usize;
        let names = &names_of(title)[..config.names_per_title];
        let name = names[random.below(names.len() as u64) as usize];
        let statement =
            SyntheticTokenizer.encode(&format!("meet the new {} {name}.", TITLES[title]));
        let question = SyntheticTokenizer.encode(&format!("recall {}", TITLES[title]));
        // The last word before the full stop.
        let answer_in_statement = statement.len() - 2;

        let room = context - statement.len() - question.len();
        let haystack = Haystack::new(config, index, title, room);
        let at = haystack.boundary_near(depth);

        let mut prompt = Vec::with_capacity(context);
        prompt.extend_from_slice(&haystack.ids[..at]);
        prompt.extend_from_slice(&statement);
        prompt.extend_from_slice(&haystack.ids[at..]);
        prompt.extend_from_slice(&question);
        Self {
            answer: statement[answer_in_statement],
            candidates: names.iter().filter_map(|name| SyntheticTokenizer.id(name)).collect(),
            needle_position: at + answer_in_statement,
            prompt,
        }
    }
}

/// Whole sentences of a document without one title.
struct Haystack {
    ids: Vec<u32>,
    /// Where a sentence starts or the text ends, in order.
    boundaries: Vec<usize>,
}

impl Haystack {
    fn new(config: &SyntheticConfig, index: u64, title: usize, room: usize) -> Self {
        let mut document = SyntheticDocument::without_title(config, index, title);
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
        let target = (depth.clamp(0.0, 1.0) * self.ids.len() as f64).round() as usize;
        self.boundaries.iter().copied().min_by_key(|b| b.abs_diff(target)).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_needle_lies_where_it_should_and_is_asked_for() {
        let config = SyntheticConfig::default();
        for (index, depth) in [(0, 0.0), (1, 0.25), (2, 0.5), (3, 1.0)] {
            let case = NeedleCase::new(&config, index, 1000, depth);
            assert!((980..=1000).contains(&case.prompt.len()));
            assert_eq!(case.prompt[case.needle_position], case.answer);
            let title = *case.prompt.last().unwrap();
            assert_eq!(case.prompt[case.needle_position - 1], title);
            assert_eq!(case.prompt.iter().filter(|&&id| id == title).count(), 2);
            let found = case.needle_position as f64 / case.prompt.len() as f64;
            assert!((found - depth).abs() < 0.03, "{found} for {depth}");
            assert!(case.candidates.contains(&case.answer));
        }
    }

    #[test]
    fn a_tiny_context_still_holds_needle_and_question() {
        let case = NeedleCase::new(&SyntheticConfig::default(), 5, 0, 7.0);
        assert!((8..=16).contains(&case.prompt.len()), "{case:?}");
    }
}
