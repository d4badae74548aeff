//! One synthetic document as a stream of tokens.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use fox_base::random::SplitMix64;

use super::config::SyntheticConfig;
use super::grammar::{self, FILLERS, Part, QUESTIONS, STATEMENTS, Template};
use super::tokenizer::SyntheticTokenizer;
use super::words::{THINGS, TITLES, names_of};
use crate::random::stream;

/// Sentences that pass before a document begins.
const SENTENCES_BEFORE_THE_START: usize = 32;

/// A token and what the generator knows about it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SyntheticToken {
    /// The id, in the vocabulary of [`SyntheticTokenizer`].
    pub id: u32,
    /// What kind of token it is.
    pub kind: TokenKind,
}

/// What can be known about a token before it is read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TokenKind {
    /// A word of the grammar, with its surprise in nats for a reader who knows the grammar.
    Grammar {
        /// Negative log-probability.
        surprise: f32,
    },
    /// A title; which one comes cannot be known.
    Title,
    /// The name in a statement; it cannot be known.
    Stated,
    /// The name in a question.
    Asked {
        /// Tokens back to the name's previous mention, if that is inside the document.
        distance: Option<u64>,
    },
}

/// What a document knows about one title.
#[derive(Debug, Clone, Copy)]
struct Fact {
    /// Index of the name among those of the title.
    name: usize,
    /// Position of the name's last mention in this document.
    mentioned: Option<u64>,
}

/// One document as an endless stream of tokens: a function of the configuration and the document's index.
#[derive(Debug, Clone)]
pub struct SyntheticDocument {
    config: SyntheticConfig,
    random: SplitMix64,
    /// When each title is due, earliest first.
    due: BinaryHeap<Reverse<(u64, usize)>>,
    /// The fact of each title.
    facts: Vec<Fact>,
    /// Tokens of the current sentence not yet handed out.
    sentence: VecDeque<SyntheticToken>,
    /// Tokens produced so far, those in `sentence` and those before the start included.
    produced: u64,
    mention_share: f64,
}

impl SyntheticDocument {
    /// The document with this index.
    pub fn new(config: &SyntheticConfig, index: u64) -> Self {
        Self::build(config, index, None)
    }

    /// The document with this index in a world without one of the titles (by its index in
    /// [`super::TITLES`]): the haystack of a needle test.
    pub fn without_title(config: &SyntheticConfig, index: u64, title: usize) -> Self {
        Self::build(config, index, Some(title))
    }

    fn build(config: &SyntheticConfig, index: u64, left_out: Option<usize>) -> Self {
        let config = config.in_range();
        let mut random = stream(config.seed, index);
        let facts = (0..config.titles)
            .map(|_| Fact {
                name: random.below(config.names_per_title as u64) as usize,
                mentioned: None,
            })
            .collect();
        let due = (0..config.titles)
            .map(|title| (config.residual_gap(&mut random), title))
            .filter(|&(_, title)| Some(title) != left_out)
            .map(Reverse)
            .collect();
        let mention_share = config.mention_share();
        let mut document = Self {
            config,
            random,
            due,
            facts,
            sentence: VecDeque::new(),
            produced: 0,
            mention_share,
        };
        document.open_in_the_middle();
        document
    }

    /// Throws away the first sentences, so that the queue of due titles is as long at the start as later on.
    fn open_in_the_middle(&mut self) {
        for _ in 0..SENTENCES_BEFORE_THE_START {
            self.produce_sentence();
        }
        self.sentence.clear();
        for fact in &mut self.facts {
            fact.mentioned = None;
        }
    }

    /// Whether the next token starts a sentence.
    pub fn at_sentence_start(&self) -> bool {
        self.sentence.is_empty()
    }

    /// Produces the next sentence: about the title that is due longest, or about nothing if none is.
    fn produce_sentence(&mut self) {
        match self.due.peek() {
            Some(&Reverse((due, title))) if due <= self.produced => {
                self.due.pop();
                let stated = self.random.below(self.config.mentions_per_fact) == 0;
                let stated_share = 1.0 / self.config.mentions_per_fact as f64;
                if stated {
                    self.facts[title].name =
                        self.random.below(self.config.names_per_title as u64) as usize;
                    self.produce(&STATEMENTS, self.mention_share * stated_share, title, true);
                } else {
                    let share = self.mention_share * (1.0 - stated_share);
                    self.produce(&QUESTIONS, share, title, false);
                }
                let next = self.produced + self.config.gap(&mut self.random);
                self.due.push(Reverse((next, title)));
            }
            // No filler mentions its title, so any will do.
            _ => self.produce(&FILLERS, 1.0 - self.mention_share, 0, false),
        }
    }

    /// Produces a sentence from one of the templates, which together make up `share` of all sentences.
    fn produce(&mut self, templates: &[Template], share: f64, title: usize, stated: bool) {
        let template = templates[self.random.below(templates.len() as u64) as usize];
        // A share of nothing happens only where rounding or a crowded queue makes the estimate miss.
        let first = -(share.max(1e-3) / templates.len() as f64).ln() as f32;
        let mut thing = 0;
        for (i, part) in template.iter().enumerate() {
            let (word, kind) = self.part(*part, title, stated, &mut thing);
            let kind = match kind {
                TokenKind::Grammar { .. } if i == 0 => TokenKind::Grammar { surprise: first },
                other => other,
            };
            let id = SyntheticTokenizer.grammar_id(word);
            self.sentence.push_back(SyntheticToken { id, kind });
            self.produced += 1;
        }
    }

    /// One word of a sentence; `thing` remembers the thing a verb has to fit.
    fn part(
        &mut self,
        part: Part,
        title: usize,
        stated: bool,
        thing: &mut usize,
    ) -> (&'static str, TokenKind) {
        let grammar = |choices: usize| TokenKind::Grammar { surprise: (choices as f32).ln() };
        match part {
            Part::Word(word) => (word, grammar(1)),
            Part::Any(list) => {
                let drawn = self.random.below(list.len() as u64) as usize;
                if list == THINGS {
                    *thing = drawn;
                }
                (list[drawn], grammar(list.len()))
            }
            Part::VerbOfThing => {
                let drawn = self.random.below(2) as usize;
                (grammar::verbs_of(*thing)[drawn], grammar(2))
            }
            Part::Title => (TITLES[title], TokenKind::Title),
            Part::Name => {
                let here = self.produced;
                let fact = &mut self.facts[title];
                let before = fact.mentioned.replace(here);
                let kind = if stated {
                    TokenKind::Stated
                } else {
                    TokenKind::Asked { distance: before.map(|position| here - position) }
                };
                (names_of(title)[fact.name], kind)
            }
        }
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
    fn a_question_is_answered_by_the_last_mention() {
        let tokens: Vec<_> =
            SyntheticDocument::new(&SyntheticConfig::default(), 9).take(30_000).collect();
        let mut last: HashMap<u32, (u32, usize)> = HashMap::new();
        let mut answered = 0;
        for (i, token) in tokens.iter().enumerate() {
            match token.kind {
                TokenKind::Asked { distance } => {
                    let title = tokens[i - 1].id;
                    match last.get(&title) {
                        Some(&(name, at)) => {
                            assert_eq!(distance, Some((i - at) as u64));
                            assert_eq!(name, token.id);
                            answered += 1;
                        }
                        None => assert_eq!(distance, None),
                    }
                    last.insert(title, (token.id, i));
                }
                TokenKind::Stated => {
                    last.insert(tokens[i - 1].id, (token.id, i));
                }
                _ => {}
            }
        }
        assert!(answered > 1500, "{answered}");
    }

    #[test]
    fn the_left_out_title_never_comes() {
        let title = SyntheticTokenizer.id(TITLES[5]).unwrap();
        let config = SyntheticConfig::default();
        let mut haystack = SyntheticDocument::without_title(&config, 1, 5).take(30_000);
        assert!(haystack.all(|t| t.id != title));
    }

    #[test]
    fn the_first_sentences_never_change() {
        let text = SyntheticTokenizer.decode(&ids(0, 24)).unwrap();
        assert_eq!(
            text,
            "it was bright. then port Bexley spoke. meet the new uncle Frida. \
             ask for painter Asa. then sister Jenny spoke"
        );
    }

    #[test]
    fn absurd_configurations_still_give_tokens() {
        let config = SyntheticConfig {
            titles: 0,
            names_per_title: 1000,
            nearby_percent: 100,
            nearby_gap: 0,
            min_gap: 0,
            octaves: 99,
            mentions_per_fact: 0,
            ..SyntheticConfig::default()
        };
        assert_eq!(SyntheticDocument::new(&config, 0).take(1000).count(), 1000);
    }
}
