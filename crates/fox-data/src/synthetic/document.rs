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
    /// Its negative log-probability in nats, given all tokens before it and the rules of the corpus: no
    /// predictor has a lower mean.
    pub surprise: f64,
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
struct Fact {
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
    /// What was said about each person in this chapter.
    facts: Vec<Option<Fact>>,
    /// Tokens of the chapter, those still to come included; `None` for a chapter without end.
    chapter_len: Option<u64>,
    /// Tokens of the chapter so far.
    age: u64,
    /// The same before the last sentence.
    age_before: u64,
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
        random: SplitMix64,
        chapter_len: Option<u64>,
        left_out: Option<usize>,
    ) -> Self {
        Self {
            facts: vec![None; config.people],
            config,
            random,
            chapter_len,
            age: 0,
            age_before: 0,
            left_out,
            sentence: VecDeque::new(),
            produced: 0,
        }
    }

    /// Whether the next token starts a sentence.
    pub fn at_sentence_start(&self) -> bool {
        self.sentence.is_empty()
    }

    fn produce_sentence(&mut self) {
        let ends = self.probability_of_end();
        if self.chapter_len.is_some_and(|len| self.age >= len) {
            return self.open_chapter(-ends.ln());
        }
        self.age_before = self.age;
        let start = self.produced;
        let goes_on = -(1.0 - ends).ln();
        let filler_share = self.config.filler_percent as f64 / 100.0;
        if self.random.below(100) < self.config.filler_percent {
            self.fill(goes_on - filler_share.ln());
        } else {
            self.mention(goes_on - (1.0 - filler_share).ln());
        }
        self.age += self.produced - start;
    }

    /// Probability that the chapter ends here, given that it did not end before the last sentence.
    fn probability_of_end(&self) -> f64 {
        let [before, now] = [self.age_before, self.age].map(|age| self.config.chapter_within(age));
        (now - before) / (1.0 - before)
    }

    fn open_chapter(&mut self, surprise: f64) {
        for (i, word) in CHAPTER.iter().enumerate() {
            self.produce(word, TokenKind::Chapter, if i == 0 { surprise } else { 0.0 });
        }
        self.facts.fill(None);
        (self.age, self.age_before) = (0, 0);
        self.chapter_len = Some(self.config.chapter_len(&mut self.random));
    }

    fn fill(&mut self, surprise: f64) {
        let thing = self.random.below(THINGS.len() as u64) as usize;
        self.produce(FILLER, TokenKind::Filler, surprise);
        self.produce(THINGS[thing], TokenKind::Filler, (THINGS.len() as f64).ln());
        self.produce(DOES[thing], TokenKind::Filler, 0.0);
    }

    fn mention(&mut self, surprise: f64) {
        let mut person = self.config.person(&mut self.random);
        while Some(person) == self.left_out {
            person = self.config.person(&mut self.random);
        }
        let share = self.config.person_share(person);
        self.produce(PEOPLE[person], TokenKind::Person, surprise - share.ln());
        let here = self.produced;
        let (action, distance, surprise) = match self.facts[person] {
            Some(fact) => (fact.action, Some(here - fact.mentioned), 0.0),
            None => {
                let actions = self.config.actions;
                (self.random.below(actions as u64) as usize, None, (actions as f64).ln())
            }
        };
        self.facts[person] = Some(Fact { action, mentioned: here });
        self.produce(ACTIONS[action], TokenKind::Action { distance }, surprise);
    }

    fn produce(&mut self, word: &str, kind: TokenKind, surprise: f64) {
        let id = SyntheticTokenizer.document_id(word);
        self.sentence.push_back(SyntheticToken { id, kind, surprise });
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
    fn a_document_is_a_function_of_its_index() {
        assert_eq!(ids(3, 500), ids(3, 500));
        assert_eq!(ids(3, 500)[..100], ids(3, 100)[..]);
        assert_ne!(ids(3, 100), ids(4, 100));
    }

    #[test]
    fn no_word_is_unknown_and_none_is_the_start_marker() {
        assert!(ids(0, 20_000).iter().all(|&id| id >= 2));
    }

    #[test]
    fn a_fact_holds_in_its_chapter_and_is_void_after_it() {
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
                    assert_eq!(token.surprise, 0.0);
                    recalled += 1;
                }
                None => {
                    assert_eq!(distance, None);
                    assert_eq!(token.surprise, 16f64.ln());
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
    fn the_left_out_person_never_comes_and_no_chapter_either() {
        let config = SyntheticConfig::default();
        let [person, chapter] = [PEOPLE[0], CHAPTER[2]].map(|w| SyntheticTokenizer.id(w).unwrap());
        let mut haystack = SyntheticDocument::chapter_without(&config, stream(1, 2), 0);
        assert!(haystack.by_ref().take(30_000).all(|t| t.id != person && t.id != chapter));
    }

    #[test]
    fn the_first_sentences_never_change() {
        let text = SyntheticTokenizer.decode(&ids(0, 24)).unwrap();
        assert_eq!(
            text,
            "The fire burns. Ben cooks. The fire burns. The snow melts. Ann writes. The wind turns. \
             Ann writes. Dan cooks. Eva digs. Max dances."
        );
    }

    #[test]
    fn absurd_configurations_still_give_tokens() {
        let config = SyntheticConfig {
            people: 0,
            actions: 1000,
            filler_percent: 100,
            shortest_chapter: 0,
            octaves: 99,
            ..SyntheticConfig::default()
        };
        assert_eq!(SyntheticDocument::new(&config, 0).take(1000).count(), 1000);
    }
}
