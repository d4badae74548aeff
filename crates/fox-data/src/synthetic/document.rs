//! One synthetic document as a stream of tokens.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use serde::{Deserialize, Serialize};

use super::grammar::{self, FILLERS, OTHER_PLACES, Part, QUESTIONS, STATEMENTS, Template};
use super::tokenizer::SyntheticTokenizer;
use super::words::{NAMES, PLACES, SURNAMES, THINGS};
use crate::random::Random;

/// Sentences that pass before a document begins.
const SENTENCES_BEFORE_THE_START: usize = 32;

/// What the synthetic corpus is like. The default is what `fox demo` trains on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SyntheticConfig {
    /// Every document is a function of this seed and its index.
    pub seed: u64,
    /// How many documents the corpus has.
    pub documents: u64,
    /// Tokens in every document.
    pub document_len: u64,
    /// Shortest gap between two mentions of a name, in tokens; at least 1.
    pub min_gap: u64,
    /// How many times the gap can double: the longest is `min_gap * 2^octaves - 1`. 1 to 40.
    pub octaves: u32,
    /// Mean number of mentions of a fact: one statement, the others questions; at least 1.
    pub mentions_per_fact: u64,
}

impl Default for SyntheticConfig {
    fn default() -> Self {
        Self {
            seed: 0,
            documents: 1 << 32,
            document_len: 1 << 14,
            min_gap: 8,
            octaves: 10,
            mentions_per_fact: 8,
        }
    }
}

impl SyntheticConfig {
    /// The same kind of corpus with other documents, for evaluation.
    pub fn held_out(self) -> Self {
        Self { seed: crate::random::mix(self.seed ^ 0x6865_6c64_6f75_7421), ..self }
    }

    /// This configuration with every number brought into its range, so that generating cannot fail.
    pub(super) fn in_range(self) -> Self {
        Self {
            min_gap: self.min_gap.clamp(1, 1 << 20),
            octaves: self.octaves.clamp(1, 40),
            mentions_per_fact: self.mentions_per_fact.max(1),
            ..self
        }
    }

    /// Mean gap between two mentions of a name, in tokens.
    pub fn mean_gap(&self) -> f64 {
        let config = self.in_range();
        (0..config.octaves)
            .map(|octave| {
                let low = (config.min_gap << octave) as f64;
                low + (low - 1.0) / 2.0
            })
            .sum::<f64>()
            / f64::from(config.octaves)
    }

    /// Part of all sentences that mention a name, when the queue of due names stays short.
    pub fn mention_share(&self) -> f64 {
        let per_token = NAMES.len() as f64 / self.mean_gap();
        let stated = 1.0 / self.in_range().mentions_per_fact as f64;
        let mention_len = stated * grammar::mean_len(&STATEMENTS)
            + (1.0 - stated) * grammar::mean_len(&QUESTIONS);
        let filler_len = grammar::mean_len(&FILLERS);
        let share = per_token * filler_len / (1.0 - per_token * (mention_len - filler_len));
        if (0.0..1.0).contains(&share) { share } else { 1.0 }
    }

    /// A gap between two mentions.
    fn gap(&self, random: &mut Random) -> u64 {
        let low = self.min_gap << random.below(u64::from(self.octaves));
        low + random.below(low)
    }

    /// Time until the next mention of a name at a moment picked at random from an endless document:
    /// a gap is met in proportion to its length, at an even place inside it.
    fn residual_gap(&self, random: &mut Random) -> u64 {
        loop {
            let octave = (1 + random.below((1 << self.octaves) - 1)).ilog2();
            let low = self.min_gap << octave;
            let gap = low + random.below(low);
            if random.below(2 * low) < gap {
                return random.below(gap);
            }
        }
    }
}

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
    /// A word of the grammar, with its surprise in nats for a reader who knows the grammar and the scene.
    Grammar {
        /// Negative log-probability.
        surprise: f32,
    },
    /// A name; which one comes cannot be known.
    Name,
    /// The surname in a statement; it cannot be known.
    Stated,
    /// The surname in a question.
    Asked {
        /// Tokens back to the surname's previous mention, if that is inside the document.
        distance: Option<u64>,
    },
}

/// What a document knows about one name.
#[derive(Debug, Clone, Copy)]
struct Fact {
    surname: usize,
    /// Position of the surname's last mention in this document.
    mentioned: Option<u64>,
}

/// One document as an endless stream of tokens: a function of the configuration and the document's index.
#[derive(Debug, Clone)]
pub struct SyntheticDocument {
    config: SyntheticConfig,
    random: Random,
    /// When each name is due, earliest first.
    due: BinaryHeap<Reverse<(u64, usize)>>,
    facts: Vec<Fact>,
    place: usize,
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

    /// The document with this index in a world without one of the names: the haystack of a needle test.
    pub fn without_name(config: &SyntheticConfig, index: u64, name: usize) -> Self {
        Self::build(config, index, Some(name))
    }

    fn build(config: &SyntheticConfig, index: u64, left_out: Option<usize>) -> Self {
        let config = config.in_range();
        let mut random = Random::new(config.seed, index);
        let facts = (0..NAMES.len())
            .map(|_| Fact {
                surname: random.below(SURNAMES.len() as u64) as usize,
                mentioned: None,
            })
            .collect();
        let due = (0..NAMES.len())
            .map(|name| (config.residual_gap(&mut random), name))
            .filter(|&(_, name)| Some(name) != left_out)
            .map(Reverse)
            .collect();
        let place = random.below(PLACES.len() as u64) as usize;
        let mention_share = config.mention_share();
        let mut document = Self {
            config,
            random,
            due,
            facts,
            place,
            sentence: VecDeque::new(),
            produced: 0,
            mention_share,
        };
        document.open_in_the_middle();
        document
    }

    /// Throws away the first sentences, so that the queue of due names is as long at the start as later on.
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

    /// Produces the next sentence: about the name that is due longest, or about nothing if none is.
    fn produce_sentence(&mut self) {
        match self.due.peek() {
            Some(&Reverse((due, name))) if due <= self.produced => {
                self.due.pop();
                let stated = self.random.below(self.config.mentions_per_fact) == 0;
                let kind_share = 1.0 / self.config.mentions_per_fact as f64;
                if stated {
                    self.facts[name].surname = self.random.below(SURNAMES.len() as u64) as usize;
                    self.produce(&STATEMENTS, self.mention_share * kind_share, Some(name), true);
                } else {
                    let share = self.mention_share * (1.0 - kind_share);
                    self.produce(&QUESTIONS, share, Some(name), false);
                }
                let next = self.produced + self.config.gap(&mut self.random);
                self.due.push(Reverse((next, name)));
            }
            _ => self.produce(&FILLERS, 1.0 - self.mention_share, None, false),
        }
    }

    fn produce(&mut self, templates: &[Template], share: f64, name: Option<usize>, stated: bool) {
        let template = templates[self.random.below(templates.len() as u64) as usize];
        // A share of nothing happens only where rounding or a crowded queue makes the estimate miss.
        let first = -(share.max(1e-3) / templates.len() as f64).ln() as f32;
        let mut thing = 0;
        for (i, part) in template.iter().enumerate() {
            let (word, kind) = self.part(*part, name, stated, &mut thing);
            let kind = match kind {
                TokenKind::Grammar { .. } if i == 0 => TokenKind::Grammar { surprise: first },
                other => other,
            };
            let id = SyntheticTokenizer.grammar_id(word);
            self.sentence.push_back(SyntheticToken { id, kind });
            self.produced += 1;
        }
    }

    fn part(
        &mut self,
        part: Part,
        name: Option<usize>,
        stated: bool,
        thing: &mut usize,
    ) -> (&'static str, TokenKind) {
        let grammar = |choices: usize| TokenKind::Grammar { surprise: (choices as f32).ln() };
        let name = name.unwrap_or(0);
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
            Part::Place => (PLACES[self.place], grammar(1)),
            Part::NewPlace => {
                let step = 1 + self.random.below(OTHER_PLACES as u64) as usize;
                self.place = (self.place + step) % PLACES.len();
                (PLACES[self.place], grammar(OTHER_PLACES))
            }
            Part::Name => (NAMES[name], TokenKind::Name),
            Part::Surname => {
                let here = self.produced;
                let fact = &mut self.facts[name];
                let before = fact.mentioned.replace(here);
                let kind = if stated {
                    TokenKind::Stated
                } else {
                    TokenKind::Asked { distance: before.map(|position| here - position) }
                };
                (SURNAMES[fact.surname], kind)
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
                    let name = tokens[i - 1].id;
                    match last.get(&name) {
                        Some(&(surname, at)) => {
                            assert_eq!(distance, Some((i - at) as u64));
                            assert_eq!(surname, token.id);
                            answered += 1;
                        }
                        None => assert_eq!(distance, None),
                    }
                    last.insert(name, (token.id, i));
                }
                TokenKind::Stated => {
                    last.insert(tokens[i - 1].id, (token.id, i));
                }
                _ => {}
            }
        }
        assert!(answered > 2000, "{answered}");
    }

    #[test]
    fn the_left_out_name_never_comes() {
        let name = SyntheticTokenizer.id(NAMES[85]).unwrap();
        let config = SyntheticConfig::default();
        assert!(SyntheticDocument::without_name(&config, 1, 85).take(30_000).all(|t| t.id != name));
    }

    #[test]
    fn the_first_sentences_never_change() {
        let text = SyntheticTokenizer.decode(&ids(0, 24)).unwrap();
        assert_eq!(
            text,
            "folk spoke of Hector Linden. then we went to the bridge. \
             the tired crow stopped near the bridge. do you recall"
        );
    }

    #[test]
    fn absurd_configurations_still_give_tokens() {
        let config = SyntheticConfig {
            min_gap: 0,
            octaves: 99,
            mentions_per_fact: 0,
            ..SyntheticConfig::default()
        };
        assert_eq!(SyntheticDocument::new(&config, 0).take(1000).count(), 1000);
    }
}
