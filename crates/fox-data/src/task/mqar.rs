//! Multi-query associative recall, and the same with keys that are bound again.
//!
//! Definition: Arora et al. 2023, "Zoology: Measuring and improving recall in efficient language models"
//! (arXiv 2312.04927), section 3. A case begins with pairs of a key and a value; then every key comes once more, in random
//! order, and its value is asked for. The lower half of the vocabulary are keys, the upper half values; no key or value
//! occurs in two pairs of a case. Queries stand at even distances behind the pairs, near ones more often (the published
//! power law k^-0.99 is 1/k here); the rest is noise.
//!
//! Differences from the published generator: the value stands behind its query (there: noise), so that a case can be
//! read as text, and noise is never one of the case's keys, so that every answer follows from the tokens.
//!
//! `mqar-rebound` is our own: twice as many bindings as keys, each key bound twice with different values, in random order.
//! The last value counts, so a reader must forget or overwrite the first.

use fox_base::random::SplitMix64;

use super::draw::{distinct, near_slots, shuffle};
use super::{Case, START, Setting, Task};

/// Recall of values by keys.
pub(super) struct Mqar {
    /// Whether every key is bound twice.
    pub(super) rebound: bool,
}

impl Mqar {
    /// Keys of a case.
    fn keys(&self, setting: &Setting) -> usize {
        if self.rebound { setting.count() / 2 } else { setting.count() }
    }
}

impl Task for Mqar {
    fn name(&self) -> &'static str {
        if self.rebound { "mqar-rebound" } else { "mqar" }
    }

    fn difficulty(&self) -> &'static str {
        if self.rebound { "bindings" } else { "pairs" }
    }

    fn check(&self, vocabulary: u32, setting: &Setting) -> Result<(), String> {
        setting.check_count(self.difficulty())?;
        if self.rebound && !setting.count().is_multiple_of(2) {
            return Err(format!("has {} bindings; every key has two", setting.count()));
        }
        // Noise needs a token that is not a key.
        if vocabulary < 8 || setting.count() > (vocabulary / 2 - 1) as usize {
            let bound = setting.count();
            return Err(format!(
                "has {bound} {}, too many for {vocabulary} ids",
                self.difficulty()
            ));
        }
        setting.check_length(2 * setting.count() + 2 * self.keys(setting))
    }

    fn case(&self, vocabulary: u32, setting: &Setting, random: &mut SplitMix64) -> Case {
        let half = vocabulary / 2;
        let keys = distinct(self.keys(setting), 1, half, random);
        let values = distinct(setting.count(), half, vocabulary, random);
        let mut bound: Vec<usize> = (0..setting.count()).map(|i| i % keys.len()).collect();
        shuffle(&mut bound, random);
        let mut case = Case::blank(setting.length);
        let mut current = vec![START; keys.len()];
        for (i, (key, value)) in bound.iter().zip(&values).enumerate() {
            case.tokens[2 * i] = keys[*key];
            case.tokens[2 * i + 1] = *value;
            current[*key] = *value;
        }
        let context = 2 * setting.count();
        let slots = near_slots(keys.len(), (setting.length - context) / 2, random);
        for (slot, (key, value)) in slots.into_iter().zip(keys.iter().zip(current)) {
            let at = context + 2 * slot;
            case.tokens[at] = *key;
            case.answer(at + 1, value);
        }
        fill(&mut case, vocabulary, &keys, random);
        case
    }

    fn chance(&self, vocabulary: u32) -> f64 {
        1.0 / f64::from(vocabulary - vocabulary / 2)
    }
}

/// Noise wherever nothing stands yet: any token but the start marker and these keys.
fn fill(case: &mut Case, vocabulary: u32, keys: &[u32], random: &mut SplitMix64) {
    let mut is_key = vec![false; vocabulary as usize];
    keys.iter().for_each(|key| is_key[*key as usize] = true);
    for token in case.tokens.iter_mut().filter(|token| **token == START) {
        while *token == START || is_key[*token as usize] {
            *token = 1 + random.below(u64::from(vocabulary) - 1) as u32;
        }
    }
}
