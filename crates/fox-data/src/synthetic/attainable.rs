//! The loss that the rules of the corpus leave, position by position.

use super::config::SyntheticConfig;
use super::document::SyntheticDocument;
use super::tokenizer::SyntheticTokenizer;
use super::words::{ACTIONS, CHAPTER, DOES, FILLER, PEOPLE, THINGS};

impl SyntheticConfig {
    /// The loss in nats at each of the first `len` positions, averaged over the documents `0..documents`, of the
    /// [`IdealReader`] who recalls a fact when it was said at most `reach` tokens ago.
    ///
    /// With `reach = u64::MAX` nothing has a lower loss over enough documents: the mean is the entropy of the corpus
    /// at that position. With a shorter reach it is what forgetting older facts costs.
    pub fn attainable_loss(&self, documents: u64, len: usize, reach: u64) -> Vec<f64> {
        let mut losses = vec![0.0; len];
        for index in 0..documents {
            let mut reader = IdealReader::new(self, reach);
            for (loss, token) in losses.iter_mut().zip(SyntheticDocument::new(self, index)) {
                *loss += reader.read(token.id);
            }
        }
        for loss in &mut losses {
            *loss /= documents.max(1) as f64;
        }
        losses
    }
}

/// What a sentence goes on with.
#[derive(Debug, Clone, Copy)]
enum Next {
    /// Any sentence.
    Start,
    /// The words of the chapter sentence from this index on.
    Chapter(usize),
    /// A thing.
    Thing,
    /// What the thing does.
    Does(usize),
    /// What the person does.
    Action(usize),
}

/// A reader who knows the rules of the corpus and reads a document from its start: the probability of every token is
/// the exact one given all tokens before it.
///
/// Hidden from the reader are the length of the chapter, what has not been said yet, and who the main characters
/// are. The chapter is only known to be longer than it was before the last sentence. Of all sets of main characters,
/// each counts as much as it explains the mentions so far.
#[derive(Debug, Clone)]
pub struct IdealReader {
    config: SyntheticConfig,
    reach: u64,
    next: Next,
    /// Action and position of the last mention of each person in this chapter.
    facts: Vec<Option<(u32, u64)>>,
    /// How often each person was mentioned in the document.
    mentions: Vec<u32>,
    /// Tokens of the chapter so far.
    age: u64,
    /// The same before the last sentence.
    age_before: u64,
    position: u64,
}

impl IdealReader {
    /// A reader at the start of a document, who recalls facts for `reach` tokens.
    pub fn new(config: &SyntheticConfig, reach: u64) -> Self {
        let config = config.in_range();
        Self {
            reach,
            next: Next::Start,
            facts: vec![None; config.people],
            mentions: vec![0; config.people],
            age: 0,
            age_before: 0,
            position: 0,
            config,
        }
    }

    /// Reads the next token; returns its negative log-probability in nats, infinite where the rules forbid the token.
    pub fn read(&mut self, id: u32) -> f64 {
        let word = SyntheticTokenizer.word(id).unwrap_or_default();
        let index_in = |list: &[&str]| list.iter().position(|w| *w == word);
        let certain = |yes: bool| if yes { 0.0 } else { f64::INFINITY };
        let surprise = match self.next {
            Next::Start => return self.begin(word),
            Next::Chapter(at) => {
                self.next = if at + 1 < CHAPTER.len() { Next::Chapter(at + 1) } else { Next::Start };
                self.position += 1;
                return certain(word == CHAPTER[at]);
            }
            Next::Thing => {
                let thing = index_in(&THINGS);
                self.next = Next::Does(thing.unwrap_or(0));
                if thing.is_some() { (THINGS.len() as f64).ln() } else { f64::INFINITY }
            }
            Next::Does(thing) => {
                self.next = Next::Start;
                certain(word == DOES[thing])
            }
            Next::Action(person) => {
                self.next = Next::Start;
                let said = self.facts[person].replace((id, self.position));
                match said.filter(|(_, at)| self.position - at <= self.reach) {
                    Some((action, _)) => certain(action == id),
                    None if index_in(&ACTIONS[..self.config.actions]).is_some() => {
                        (self.config.actions as f64).ln()
                    }
                    None => f64::INFINITY,
                }
            }
        };
        self.age += 1;
        self.position += 1;
        surprise
    }

    /// The first word of a sentence.
    fn begin(&mut self, word: &str) -> f64 {
        let [before, now] = [self.age_before, self.age].map(|age| self.config.chapter_within(age));
        let ends = (now - before) / (1.0 - before);
        self.position += 1;
        if word == CHAPTER[0] {
            (self.age, self.age_before, self.next) = (0, 0, Next::Chapter(1));
            self.facts.fill(None);
            return -ends.ln();
        }
        self.age_before = self.age;
        self.age += 1;
        let filler = self.config.filler_percent as f64 / 100.0;
        if word == FILLER {
            self.next = Next::Thing;
            return -((1.0 - ends) * filler).ln();
        }
        let Some(person) = PEOPLE[..self.config.people].iter().position(|w| *w == word) else {
            return f64::INFINITY;
        };
        self.next = Next::Action(person);
        let share = self.share_of(person);
        self.mentions[person] += 1;
        -((1.0 - ends) * (1.0 - filler) * share).ln()
    }

    /// Probability that a fact is about this person.
    ///
    /// A set of main characters explains the mentions in proportion to the product of `(main / other)^mentions` over its
    /// members, so sums over all sets are elementary symmetric polynomials of these powers.
    fn share_of(&self, person: usize) -> f64 {
        let [main, other] = self.config.person_shares();
        let (m, ratio) = (self.config.main_people, (main / other).ln());
        let logs: Vec<f64> = self.mentions.iter().map(|n| f64::from(*n) * ratio).collect();
        // Relative to the m-th largest, so that the sum neither overflows nor vanishes.
        let mut sorted = logs.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let powers: Vec<f64> = logs.iter().map(|l| (l - sorted[m - 1]).exp()).collect();
        let all = symmetric(&powers, m);
        let others: Vec<f64> = [&powers[..person], &powers[person + 1..]].concat();
        let is_main = powers[person] * symmetric(&others, m - 1) / all;
        is_main * main + (1.0 - is_main) * other
    }
}

/// The elementary symmetric polynomial of this degree: the sum over all products of `degree` different values.
fn symmetric(values: &[f64], degree: usize) -> f64 {
    let mut sums = vec![0.0; degree + 1];
    sums[0] = 1.0;
    for value in values {
        for d in (1..=degree).rev() {
            sums[d] += value * sums[d - 1];
        }
    }
    sums[degree]
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::super::document::TokenKind;
    use super::*;

    /// Everything the generator hides: tokens left of the chapter, what each person does, a bit for each main character.
    type Hidden = (i64, Vec<usize>, u32);

    /// The generator as a hidden Markov model over whole sentences: the probability of all texts that begin with
    /// `ids` (whole sentences and at most one broken one), by summing over every chapter length, every assignment
    /// of actions to people and every set of main characters.
    fn probability(config: &SyntheticConfig, ids: &[u32]) -> f64 {
        let words: Vec<&str> = ids.iter().map(|id| SyntheticTokenizer.word(*id).unwrap()).collect();
        let sets = (0..1_u32 << config.people)
            .filter(|set| set.count_ones() as usize == config.main_people);
        let count = sets.clone().count() as f64;
        let mut states: HashMap<Hidden, f64> = sets
            .flat_map(|set| new_chapter(config, set))
            .map(|(state, p)| (state, p / count))
            .collect();
        let mut at = 0;
        while at < words.len() {
            let mut after: HashMap<Hidden, f64> = HashMap::new();
            let rest = &words[at..];
            let mut len = 0;
            for ((left, actions, main), p) in &states {
                for (sentence, q, ends) in sentences(config, *left, actions, *main) {
                    if !sentence.iter().zip(rest).all(|(a, b)| a == b) {
                        continue;
                    }
                    len = sentence.len();
                    if ends {
                        for (state, r) in new_chapter(config, *main) {
                            *after.entry(state).or_default() += p * q * r;
                        }
                    } else {
                        let left = left - sentence.len() as i64;
                        *after.entry((left, actions.clone(), *main)).or_default() += p * q;
                    }
                }
            }
            states = after;
            at += len.max(1);
        }
        states.values().sum()
    }

    /// What may come next, with its probability and whether it opens a chapter.
    fn sentences(
        config: &SyntheticConfig,
        left: i64,
        actions: &[usize],
        main: u32,
    ) -> Vec<(Vec<&'static str>, f64, bool)> {
        if left <= 0 {
            return vec![(CHAPTER.to_vec(), 1.0, true)];
        }
        let filler = config.filler_percent as f64 / 100.0;
        let main_share = config.main_percent as f64 / 100.0;
        let fillers =
            THINGS.iter().zip(DOES).map(|(t, d)| (vec![FILLER, *t, d], filler / 10.0, false));
        let facts = actions.iter().enumerate().map(|(p, action)| {
            let share = match main >> p & 1 {
                1 => main_share / config.main_people as f64,
                _ => (1.0 - main_share) / (config.people - config.main_people) as f64,
            };
            (vec![PEOPLE[p], ACTIONS[*action]], (1.0 - filler) * share, false)
        });
        fillers.chain(facts).collect()
    }

    /// All beginnings of a chapter with their probabilities.
    fn new_chapter(config: &SyntheticConfig, main: u32) -> HashMap<Hidden, f64> {
        let mut states = HashMap::new();
        for octave in 0..config.octaves {
            let low = config.shortest_chapter << octave;
            for len in low..2 * low {
                for mut code in 0..config.actions.pow(config.people as u32) {
                    let actions = (0..config.people)
                        .map(|_| {
                            let action = code % config.actions;
                            code /= config.actions;
                            action
                        })
                        .collect();
                    let p = 1.0 / (f64::from(config.octaves) * low as f64);
                    let q = p / (config.actions as f64).powi(config.people as i32);
                    states.insert((len as i64, actions, main), q);
                }
            }
        }
        states
    }

    #[test]
    fn the_surprise_of_every_token_is_that_of_the_summed_up_generator() {
        let config = SyntheticConfig {
            people: 4,
            main_people: 2,
            actions: 2,
            shortest_chapter: 4,
            octaves: 2,
            ..SyntheticConfig::default()
        };
        let mut chapters = 0;
        for index in 0..6 {
            let tokens: Vec<_> = SyntheticDocument::new(&config, index).take(36).collect();
            let ids: Vec<u32> = tokens.iter().map(|t| t.id).collect();
            let mut before = 1.0;
            let mut reader = IdealReader::new(&config, u64::MAX);
            for (i, token) in tokens.iter().enumerate() {
                let here = probability(&config, &ids[..=i]);
                let (got, want) = (reader.read(token.id), -(here / before).ln());
                assert!((got - want).abs() < 1e-9, "{index} {i}: {token:?} {got} {want}");
                before = here;
                chapters += u32::from(token.kind == TokenKind::Chapter);
            }
        }
        assert!(chapters > 8, "{chapters}");
    }

    #[test]
    fn probabilities_of_all_next_tokens_add_up_to_one() {
        let config = SyntheticConfig::default();
        for index in 0..3 {
            let mut reader = IdealReader::new(&config, u64::MAX);
            for token in SyntheticDocument::new(&config, index).take(700) {
                let all = 0..SyntheticTokenizer::VOCAB_SIZE as u32;
                let total: f64 = all.map(|id| (-reader.clone().read(id)).exp()).sum();
                assert!((total - 1.0).abs() < 1e-9, "{token:?}: {total}");
                reader.read(token.id);
            }
        }
    }

    #[test]
    fn symmetric_polynomials_by_hand() {
        assert_eq!(symmetric(&[2.0, 3.0, 5.0], 2), 31.0);
        assert_eq!((symmetric(&[2.0, 3.0], 0), symmetric(&[2.0], 3)), (1.0, 0.0));
    }

    #[test]
    fn longer_memory_lowers_the_loss_far_beyond_any_training_length() {
        let config = SyntheticConfig::default();
        let mean = |range: std::ops::Range<usize>, reach: u64| {
            let losses = config.attainable_loss(512, 1024, reach);
            losses[range.clone()].iter().sum::<f64>() / range.len() as f64
        };
        let early = mean(128..256, u64::MAX);
        let late = mean(512..1024, u64::MAX);
        assert!(early - late > 0.05, "{early} {late}");
        assert!(mean(512..1024, 256) - late > 0.01);
        assert!(mean(512..1024, 0) - late > 0.3);
    }
}
