//! The loss that the rules of the corpus leave, position by position.

use super::config::SyntheticConfig;
use super::document::SyntheticDocument;
use super::tokenizer::SyntheticTokenizer;
use super::words::{ACTIONS, CHAPTER, DOES, FILLER, PEOPLE, THINGS};

impl SyntheticConfig {
    /// The loss in nats at each of the first `len` positions, averaged over the documents `0..documents`, of the
    /// [`OptimalPredictor`] who recalls a fact when it was said at most `reach` tokens ago.
    ///
    /// With `reach = u64::MAX` nothing has a lower loss over enough documents: the mean is the entropy of the corpus
    /// at that position. With a shorter reach it is what forgetting older facts costs.
    pub fn attainable_loss(&self, documents: u64, len: usize, reach: u64) -> Vec<f64> {
        let mut losses = vec![0.0; len];
        for index in 0..documents {
            let mut reader = OptimalPredictor::new(self, reach);
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

/// The next token of a sentence.
#[derive(Debug, Clone, Copy)]
enum Next {
    /// Any sentence.
    Start,
    /// The words of the chapter sentence from this index on.
    Chapter(usize),
    /// A noun of a filler sentence.
    Thing,
    /// What the thing does.
    Does(usize),
    /// What the person does.
    Action(usize),
}

/// A reader who knows the rules of the corpus and reads a document from its start: the probability of every token is
/// the exact one given all tokens before it.
///
/// Hidden from the reader are the length of the chapter, what has not been said yet, and who belongs to
/// which circle. The chapter is only known to be longer than it was before the last sentence. Of all ways to assign
/// people to circles, each counts as much as it explains the mentions so far.
#[derive(Debug, Clone)]
pub struct OptimalPredictor {
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

impl OptimalPredictor {
    /// A reader at the start of a document, who recalls facts for `reach` tokens.
    pub fn new(config: &SyntheticConfig, reach: u64) -> Self {
        let config = config.in_range();
        Self {
            reach,
            next: Next::Start,
            facts: vec![None; config.people()],
            mentions: vec![0; config.people()],
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
                self.next =
                    if at + 1 < CHAPTER.len() { Next::Chapter(at + 1) } else { Next::Start };
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
        let Some(person) = PEOPLE[..self.config.people()].iter().position(|w| *w == word) else {
            return f64::INFINITY;
        };
        self.next = Next::Action(person);
        let share = self.share_of(person);
        self.mentions[person] += 1;
        -((1.0 - ends) * (1.0 - filler) * share).ln()
    }

    /// Probability that a fact is about this person: the mean share of a person of each circle, weighted by how
    /// likely the person belongs to it.
    ///
    /// A fact is about a given person of circle c with probability `2^-c / circles`, so an assignment of people to
    /// circles explains the mentions in proportion to the product of `2^(-c * mentions)` over all people. The sum over
    /// all assignments of the others is made person by person, over the numbers of places taken in the circles.
    fn share_of(&self, person: usize) -> f64 {
        let circles = self.config.circles as usize;
        let weight =
            |p: usize, circle: usize| (-((circle as u32 * self.mentions[p]) as f64)).exp2();
        let places = Places::new(circles);
        let mut sums = vec![0.0; places.states];
        sums[0] = 1.0;
        for other in (0..self.mentions.len()).filter(|p| *p != person) {
            let mut after = vec![0.0; places.states];
            for (state, sum) in sums.iter().enumerate().filter(|(_, sum)| **sum > 0.0) {
                for circle in (0..circles).filter(|c| places.free(state, *c)) {
                    after[state + places.strides[circle]] += sum * weight(other, circle);
                }
            }
            // Only ratios count, so the largest may be 1.
            let largest = after.iter().copied().fold(0.0, f64::max);
            sums = after.iter().map(|sum| sum / largest).collect();
        }
        let full = places.states - 1;
        let (mut total, mut share) = (0.0, 0.0);
        for circle in 0..circles {
            let likely = sums[full - places.strides[circle]] * weight(person, circle);
            total += likely;
            share += likely * (-(circle as f64)).exp2() / circles as f64;
        }
        share / total
    }
}

/// Numbers of places taken in the circles, all in one number: circle c has 2^c places.
struct Places {
    /// What one more place taken in a circle adds to a state.
    strides: Vec<usize>,
    /// How many states there are; the last has all places taken.
    states: usize,
}

impl Places {
    fn new(circles: usize) -> Self {
        let mut strides = vec![1];
        for circle in 0..circles {
            strides.push(strides[circle] * ((1 << circle) + 1));
        }
        let states = strides.pop().unwrap_or(1);
        Places { strides, states }
    }

    fn free(&self, state: usize, circle: usize) -> bool {
        state / self.strides[circle] % ((1 << circle) + 1) < 1 << circle
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::super::document::TokenKind;
    use super::*;

    /// Everything the generator hides: tokens left of the chapter, what each person does, the circle of each person.
    type Hidden = (i64, Vec<usize>, [u32; 3]);

    /// The generator as a hidden Markov model over whole sentences: the probability of all texts that begin with
    /// `ids` (whole sentences and at most one broken one), by summing over every chapter length, every assignment
    /// of actions to people and of people to circles.
    fn probability(config: &SyntheticConfig, ids: &[u32]) -> f64 {
        let words: Vec<&str> = ids.iter().map(|id| SyntheticTokenizer.word(*id).unwrap()).collect();
        // Two circles: one of the three people is alone in the first.
        let sets = [[0, 1, 1], [1, 0, 1], [1, 1, 0]];
        let mut states: HashMap<Hidden, f64> = sets
            .into_iter()
            .flat_map(|circles| new_chapter(config, circles))
            .map(|(state, p)| (state, p / 3.0))
            .collect();
        let mut at = 0;
        while at < words.len() {
            let mut after: HashMap<Hidden, f64> = HashMap::new();
            let rest = &words[at..];
            let mut len = 0;
            for ((left, actions, circles), p) in &states {
                for (sentence, q, ends) in sentences(config, *left, actions, *circles) {
                    if !sentence.iter().zip(rest).all(|(a, b)| a == b) {
                        continue;
                    }
                    len = sentence.len();
                    if ends {
                        for (state, r) in new_chapter(config, *circles) {
                            *after.entry(state).or_default() += p * q * r;
                        }
                    } else {
                        let left = left - sentence.len() as i64;
                        *after.entry((left, actions.clone(), *circles)).or_default() += p * q;
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
        circles: [u32; 3],
    ) -> Vec<(Vec<&'static str>, f64, bool)> {
        if left <= 0 {
            return vec![(CHAPTER.to_vec(), 1.0, true)];
        }
        let filler = config.filler_percent as f64 / 100.0;
        let fillers =
            THINGS.iter().zip(DOES).map(|(t, d)| (vec![FILLER, *t, d], filler / 10.0, false));
        let facts = actions.iter().enumerate().map(|(p, action)| {
            let share = [0.5, 0.25][circles[p] as usize];
            (vec![PEOPLE[p], ACTIONS[*action]], (1.0 - filler) * share, false)
        });
        fillers.chain(facts).collect()
    }

    /// All beginnings of a chapter with their probabilities.
    fn new_chapter(config: &SyntheticConfig, circles: [u32; 3]) -> HashMap<Hidden, f64> {
        let mut states = HashMap::new();
        for octave in 0..config.octaves {
            let low = config.shortest_chapter << octave;
            for len in low..2 * low {
                for mut code in 0..config.actions.pow(3) {
                    let actions = (0..3)
                        .map(|_| {
                            let action = code % config.actions;
                            code /= config.actions;
                            action
                        })
                        .collect();
                    let p = 1.0 / (f64::from(config.octaves) * low as f64);
                    let q = p / (config.actions as f64).powi(3);
                    states.insert((len as i64, actions, circles), q);
                }
            }
        }
        states
    }

    #[test]
    fn surprisal_matches_the_generator() {
        let config = SyntheticConfig {
            circles: 2,
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
            let mut reader = OptimalPredictor::new(&config, u64::MAX);
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
    fn next_token_probabilities_sum_to_one() {
        let config = SyntheticConfig::default();
        for index in 0..3 {
            let mut reader = OptimalPredictor::new(&config, u64::MAX);
            for token in SyntheticDocument::new(&config, index).take(700) {
                let all = 0..SyntheticTokenizer::VOCAB_SIZE as u32;
                let total: f64 = all.map(|id| (-reader.clone().read(id)).exp()).sum();
                assert!((total - 1.0).abs() < 1e-9, "{token:?}: {total}");
                reader.read(token.id);
            }
        }
    }

    /// Three circles, seven people: all 105 assignments one by one.
    #[test]
    fn person_probability_is_the_mean_over_assignments() {
        let config = SyntheticConfig { circles: 3, ..SyntheticConfig::default() };
        let mut reader = OptimalPredictor::new(&config, u64::MAX);
        reader.mentions = vec![5, 0, 2, 1, 0, 3, 1];
        let (mut total, mut shares) = (0.0, [0.0; 7]);
        for code in 0..3_usize.pow(7) {
            let circles: [usize; 7] = std::array::from_fn(|p| code / 3_usize.pow(p as u32) % 3);
            let size = |c: usize| circles.iter().filter(|other| **other == c).count();
            if [size(0), size(1), size(2)] != [1, 2, 4] {
                continue;
            }
            let share = |p: usize| 1.0 / (3 << circles[p]) as f64;
            let likely: f64 = (0..7).map(|p| share(p).powi(reader.mentions[p] as i32)).product();
            total += likely;
            (0..7).for_each(|p| shares[p] += likely * share(p));
        }
        for (person, sum) in shares.iter().enumerate() {
            let (got, want) = (reader.share_of(person), sum / total);
            assert!((got - want).abs() < 1e-12, "{person}: {got} {want}");
        }
    }

    #[test]
    fn longer_memory_lowers_the_attainable_loss() {
        let config = SyntheticConfig::default();
        let mean = |range: std::ops::Range<usize>, reach: u64| {
            let losses = config.attainable_loss(200, 1024, reach);
            losses[range.clone()].iter().sum::<f64>() / range.len() as f64
        };
        let early = mean(128..256, u64::MAX);
        let late = mean(512..1024, u64::MAX);
        assert!(early - late > 0.05, "{early} {late}");
        assert!(mean(512..1024, 256) - late > 0.01);
        assert!(mean(512..1024, 0) - late > 0.3);
    }

    #[test]
    fn facts_are_recalled_within_reach() {
        let config = SyntheticConfig::default();
        let fact = [PEOPLE[0], ACTIONS[1]].map(|word| SyntheticTokenizer.document_id(word));
        // The action comes again two tokens later.
        for (reach, want) in [(2, 0.0), (1, (config.actions as f64).ln())] {
            let mut reader = OptimalPredictor::new(&config, reach);
            let surprises: Vec<f64> = fact.repeat(2).iter().map(|id| reader.read(*id)).collect();
            assert_eq!(surprises[3], want, "a reach of {reach}");
        }
    }
}
