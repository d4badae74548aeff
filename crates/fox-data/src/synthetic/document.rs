//! One synthetic document as a stream of tokens.

use std::collections::VecDeque;

use fox_base::random::SplitMix64;

use super::config::SyntheticConfig;
use super::tokenizer::SyntheticTokenizer;
use super::words::{ACTIONS, CHAPTER, DOES, FILLER, PEOPLE, THINGS};
use crate::random::stream;

/// A token and what the generator knows about it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SyntheticToken {
    /// The id, in the vocabulary of [`SyntheticTokenizer`].
    pub id: u32,
    /// What kind of token it is.
    pub kind: TokenKind,
}

/// What a token is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenKind {
    /// A word of the sentence that opens a chapter.
    Chapter,
    /// A word of a sentence without a fact.
    Filler,
    /// A person.
    Person,
    /// What the person does.
    Action {
        /// Tokens back to the last time this was said, if it was in this chapter.
        distance: Option<u64>,
    },
}

/// What a person does in this chapter.
#[derive(Debug, Clone, Copy)]
struct StatedAction {
    /// Index of the action.
    action: usize,
    /// Position of the last mention.
    mentioned: u64,
}

/// One document as an endless stream of tokens: a function of the configuration and the document's index.
#[derive(Debug, Clone)]
pub struct SyntheticDocument {
    config: SyntheticConfig,
    random: SplitMix64,
    /// The people, circle after circle.
    cast: Vec<usize>,
    /// What was said about each person in this chapter.
    facts: Vec<Option<StatedAction>>,
    /// Tokens of the chapter, those still to come included; `None` for a chapter without end.
    chapter_len: Option<u64>,
    /// Tokens of the chapter so far.
    age: u64,
    /// A person who is never mentioned.
    left_out: Option<usize>,
    /// Tokens of the current sentence not yet handed out.
    sentence: VecDeque<SyntheticToken>,
    /// Tokens produced so far, those in `sentence` included.
    produced: u64,
}

impl SyntheticDocument {
    /// The document with this index.
    pub fn new(config: &SyntheticConfig, index: u64) -> Self {
        let config = config.in_range();
        let mut random = stream(config.seed, index);
        let chapter_len = Some(config.chapter_len(&mut random));
        Self::build(config, random, chapter_len, None)
    }

    /// A chapter without end in which one of the people (by index in [`super::PEOPLE`]) is never mentioned: the
    /// haystack of a needle test.
    pub(super) fn chapter_without(
        config: &SyntheticConfig,
        random: SplitMix64,
        person: usize,
    ) -> Self {
        Self::build(config.in_range(), random, None, Some(person))
    }

    fn build(
        config: SyntheticConfig,
        mut random: SplitMix64,
        chapter_len: Option<u64>,
        left_out: Option<usize>,
    ) -> Self {
        Self {
            cast: config.cast(&mut random),
            facts: vec![None; config.people()],
            config,
            random,
            chapter_len,
            age: 0,
            left_out,
            sentence: VecDeque::new(),
            produced: 0,
        }
    }

    /// Whether the next token starts a sentence.
    pub(crate) fn at_sentence_start(&self) -> bool {
        self.sentence.is_empty()
    }

    fn produce_sentence(&mut self) {
        if self.chapter_len.is_some_and(|len| self.age >= len) {
            return self.open_chapter();
        }
        let start = self.produced;
        if self.random.below(100) < self.config.filler_percent {
            self.fill();
        } else {
            self.mention();
        }
        self.age += self.produced - start;
    }

    fn open_chapter(&mut self) {
        for word in CHAPTER {
            self.produce(word, TokenKind::Chapter);
        }
        self.facts.fill(None);
        self.age = 0;
        self.chapter_len = Some(self.config.chapter_len(&mut self.random));
    }

    fn fill(&mut self) {
        let thing = self.random.below(THINGS.len() as u64) as usize;
        for word in [FILLER, THINGS[thing], DOES[thing]] {
            self.produce(word, TokenKind::Filler);
        }
    }

    fn mention(&mut self) {
        let mut person = self.config.person(&self.cast, &mut self.random);
        while Some(person) == self.left_out {
            person = self.config.person(&self.cast, &mut self.random);
        }
        self.produce(PEOPLE[person], TokenKind::Person);
        let here = self.produced;
        let (action, distance) = match self.facts[person] {
            Some(fact) => (fact.action, Some(here - fact.mentioned)),
            None => (self.random.below(self.config.actions as u64) as usize, None),
        };
        self.facts[person] = Some(StatedAction { action, mentioned: here });
        self.produce(ACTIONS[action], TokenKind::Action { distance });
    }

    fn produce(&mut self, word: &str, kind: TokenKind) {
        let id = SyntheticTokenizer.document_id(word);
        self.sentence.push_back(SyntheticToken { id, kind });
        self.produced += 1;
    }
}

impl Iterator for SyntheticDocument {
    type Item = SyntheticToken;

    fn next(&mut self) -> Option<SyntheticToken> {
        if self.sentence.is_empty() {
            self.produce_sentence();
        }
        self.sentence.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn ids(index: u64, n: usize) -> Vec<u32> {
        SyntheticDocument::new(&SyntheticConfig::default(), index).take(n).map(|t| t.id).collect()
    }

    #[test]
    fn documents_are_functions_of_their_index() {
        assert_eq!(ids(3, 500), ids(3, 500));
        assert_eq!(ids(3, 500)[..100], ids(3, 100)[..]);
        assert_ne!(ids(3, 100), ids(4, 100));
    }

    #[test]
    fn documents_have_no_special_tokens() {
        assert!(ids(0, 20_000).iter().all(|&id| id >= 2));
    }

    #[test]
    fn facts_hold_within_their_chapter() {
        let mut last: HashMap<u32, (u32, usize)> = HashMap::new();
        let (mut recalled, mut chapters, mut rebound, mut kept) = (0, 0, 0, 0);
        let mut old: HashMap<u32, u32> = HashMap::new();
        let tokens: Vec<_> =
            SyntheticDocument::new(&SyntheticConfig::default(), 9).take(60_000).collect();
        let opens = SyntheticTokenizer.id(CHAPTER[0]).unwrap();
        for (i, token) in tokens.iter().enumerate() {
            if token.id == opens {
                chapters += 1;
                old = last.drain().map(|(person, (action, _))| (person, action)).collect();
            }
            let TokenKind::Action { distance } = token.kind else { continue };
            let person = tokens[i - 1].id;
            match last.insert(person, (token.id, i)) {
                Some((action, at)) => {
                    assert_eq!((token.id, distance), (action, Some((i - at) as u64)));
                    recalled += 1;
                }
                None => {
                    assert_eq!(distance, None);
                    match old.get(&person) {
                        Some(action) if *action == token.id => kept += 1,
                        Some(_) => rebound += 1,
                        None => {}
                    }
                }
            }
        }
        assert!(recalled > 10_000 && chapters > 80, "{recalled} {chapters}");
        // What a person does in a new chapter has nothing to do with the old one: the same by chance, 1 in 16.
        let share = f64::from(kept) / f64::from(kept + rebound);
        assert!((0.03..0.1).contains(&share) && rebound > 400, "{kept} {rebound}");
    }

    #[test]
    fn haystacks_omit_the_person_and_chapters() {
        let config = SyntheticConfig::default();
        let [person, chapter] = [PEOPLE[0], CHAPTER[2]].map(|w| SyntheticTokenizer.id(w).unwrap());
        let mut haystack = SyntheticDocument::chapter_without(&config, stream(1, 2), 0);
        assert!(haystack.by_ref().take(30_000).all(|t| t.id != person && t.id != chapter));
    }

    #[test]
    fn first_sentences_are_pinned() {
        let text = SyntheticTokenizer.decode(&ids(0, 24)).unwrap();
        assert_eq!(
            text,
            "Finn digs. The snow melts. Dan hunts. Finn digs. The moon shines. The moon shines. Kai dances. \
             Finn digs. Nina waits. Nina waits. Finn"
        );
    }

    #[test]
    fn extreme_configurations_generate_tokens() {
        let config = SyntheticConfig {
            circles: 0,
            actions: 1000,
            filler_percent: 100,
            shortest_chapter: 0,
            octaves: 99,
            ..SyntheticConfig::default()
        };
        assert_eq!(SyntheticDocument::new(&config, 0).take(1000).count(), 1000);
    }
}
