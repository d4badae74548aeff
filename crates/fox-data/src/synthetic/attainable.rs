//! The loss that the rules of the corpus leave, position by position.

use super::config::SyntheticConfig;
use super::document::{SyntheticDocument, TokenKind};

impl SyntheticConfig {
    /// The loss in nats at each of the first `len` positions, averaged over the documents `0..documents`, of a
    /// reader who knows the rules and recalls a fact when it was said at most `reach` tokens ago.
    ///
    /// With `reach = u64::MAX` the reader predicts with the true probabilities of the generator given all that came
    /// before, so over enough documents nothing has a lower loss: the mean is the entropy of the corpus at that
    /// position. With a shorter reach it is what forgetting older facts costs at least.
    pub fn attainable_loss(&self, documents: u64, len: usize, reach: u64) -> Vec<f64> {
        let unknown = (self.in_range().actions as f64).ln();
        let mut losses = vec![0.0; len];
        for index in 0..documents {
            for (loss, token) in losses.iter_mut().zip(SyntheticDocument::new(self, index)) {
                *loss += match token.kind {
                    TokenKind::Action { distance: Some(d) } if d > reach => unknown,
                    _ => token.surprise,
                };
            }
        }
        for loss in &mut losses {
            *loss /= documents.max(1) as f64;
        }
        losses
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::super::words::{ACTIONS, CHAPTER, DOES, FILLER, PEOPLE, THINGS};
    use super::*;
    use crate::SyntheticTokenizer;

    /// Everything the generator hides: tokens left of the chapter, what each person does.
    type Hidden = (i64, Vec<usize>);

    /// The generator as a hidden Markov model over whole sentences: the probability of all texts that begin with
    /// `ids` (whole sentences and at most one broken one), by summing over every chapter length and every assignment
    /// of actions to people.
    fn probability(config: &SyntheticConfig, ids: &[u32]) -> f64 {
        let words: Vec<&str> = ids.iter().map(|id| SyntheticTokenizer.word(*id).unwrap()).collect();
        let mut states: HashMap<Hidden, f64> = new_chapter(config);
        let mut at = 0;
        while at < words.len() {
            let mut after: HashMap<Hidden, f64> = HashMap::new();
            let rest = &words[at..];
            let mut len = 0;
            for ((left, actions), p) in &states {
                for (sentence, q, ends) in sentences(config, *left, actions) {
                    if !sentence.iter().zip(rest).all(|(a, b)| a == b) {
                        continue;
                    }
                    len = sentence.len();
                    if ends {
                        for (state, r) in new_chapter(config) {
                            *after.entry(state).or_default() += p * q * r;
                        }
                    } else {
                        let left = left - sentence.len() as i64;
                        *after.entry((left, actions.clone())).or_default() += p * q;
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
    ) -> Vec<(Vec<&'static str>, f64, bool)> {
        if left <= 0 {
            return vec![(CHAPTER.to_vec(), 1.0, true)];
        }
        let filler = config.filler_percent as f64 / 100.0;
        let total: f64 = (0..config.people).map(|p| 1.0 / (p + 1) as f64).sum();
        let fillers =
            THINGS.iter().zip(DOES).map(|(t, d)| (vec![FILLER, *t, d], filler / 10.0, false));
        let facts = actions.iter().enumerate().map(|(p, action)| {
            let share = (1.0 - filler) / (p + 1) as f64 / total;
            (vec![PEOPLE[p], ACTIONS[*action]], share, false)
        });
        fillers.chain(facts).collect()
    }

    /// All beginnings of a chapter with their probabilities.
    fn new_chapter(config: &SyntheticConfig) -> HashMap<Hidden, f64> {
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
                    states.insert((len as i64, actions), q);
                }
            }
        }
        states
    }

    #[test]
    fn the_surprise_of_every_token_is_that_of_the_summed_up_generator() {
        let config = SyntheticConfig {
            people: 3,
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
            for (i, token) in tokens.iter().enumerate() {
                let here = probability(&config, &ids[..=i]);
                let want = -(here / before).ln();
                assert!((token.surprise - want).abs() < 1e-9, "{index} {i}: {token:?} {want}");
                before = here;
                chapters += u32::from(token.kind == TokenKind::Chapter);
            }
        }
        assert!(chapters > 8, "{chapters}");
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
