//! Changes to the logits before a choice: what was asked for, and what is due to the tokens so far.

use std::collections::{HashMap, HashSet};

use crate::Request;

/// The changes of one request.
#[derive(Debug)]
pub(crate) struct Penalties {
    repetition: f32,
    presence: f32,
    frequency: f32,
    bias: Vec<(i32, f32)>,
    /// Ids that may not be chosen before there are `min_tokens`.
    held_off: Vec<i32>,
    min_tokens: usize,
    chosen: usize,
    /// Ids of prompt and answer, when repetition counts.
    seen: HashSet<i32>,
    /// How often the ids of the answer occurred.
    counts: HashMap<i32, u32>,
}

impl Penalties {
    /// `None` when the request asks for no changes.
    pub fn new(request: &Request) -> Option<Self> {
        let sampling = &request.sampling;
        let repeats = sampling.repetition_penalty != 1.0;
        let none = !repeats
            && sampling.presence_penalty == 0.0
            && sampling.frequency_penalty == 0.0
            && request.logit_bias.is_empty()
            && request.min_tokens == 0;
        let prompt = request.prompt.iter().copied().filter(|_| repeats);
        (!none).then(|| Penalties {
            repetition: sampling.repetition_penalty,
            presence: sampling.presence_penalty,
            frequency: sampling.frequency_penalty,
            bias: request.logit_bias.clone(),
            held_off: request.stop_ids.clone(),
            min_tokens: request.min_tokens,
            chosen: 0,
            seen: prompt.collect(),
            counts: HashMap::new(),
        })
    }

    /// The logits, changed.
    pub fn apply(&self, logits: &[f32]) -> Vec<f32> {
        let mut logits = logits.to_vec();
        for &(id, bias) in &self.bias {
            logits[id as usize] += bias;
        }
        for &id in &self.seen {
            repeated(&mut logits[id as usize], self.repetition);
        }
        for (&id, &count) in &self.counts {
            logits[id as usize] -= self.presence + self.frequency * count as f32;
        }
        if self.chosen < self.min_tokens {
            for &id in &self.held_off {
                if let Some(logit) = logits.get_mut(id as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        logits
    }

    /// A token was chosen.
    pub fn note(&mut self, id: i32) {
        self.chosen += 1;
        if self.repetition != 1.0 {
            self.seen.insert(id);
        }
        if self.presence != 0.0 || self.frequency != 0.0 {
            *self.counts.entry(id).or_default() += 1;
        }
    }
}

fn repeated(logit: &mut f32, penalty: f32) {
    let penalised = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
    // An extreme penalty must leave something to choose from.
    *logit = penalised.clamp(f32::MIN, f32::MAX);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Sampling;

    fn request(sampling: Sampling) -> Request {
        Request { sampling, ..Request::greedy(vec![1, 1], 8) }
    }

    #[test]
    fn a_plain_request_changes_nothing() {
        assert!(Penalties::new(&request(Sampling::default())).is_none());
    }

    #[test]
    fn repetition_counts_the_prompt_and_pulls_down_whatever_the_sign() {
        let sampling = Sampling { repetition_penalty: 2.0, ..Sampling::default() };
        let mut penalties = Penalties::new(&request(sampling)).unwrap();
        assert_eq!(penalties.apply(&[1.0, 3.0, -2.0]), [1.0, 1.5, -2.0]);
        penalties.note(2);
        assert_eq!(penalties.apply(&[1.0, 3.0, -2.0]), [1.0, 1.5, -4.0]);
    }

    #[test]
    fn presence_counts_once_and_frequency_every_time_in_the_answer_alone() {
        let sampling =
            Sampling { presence_penalty: 0.5, frequency_penalty: 0.25, ..Sampling::default() };
        let mut penalties = Penalties::new(&request(sampling)).unwrap();
        assert_eq!(penalties.apply(&[1.0, 1.0]), [1.0, 1.0], "the prompt does not count");
        penalties.note(0);
        assert_eq!(penalties.apply(&[1.0, 1.0]), [0.25, 1.0]);
        penalties.note(0);
        assert_eq!(penalties.apply(&[1.0, 1.0]), [0.0, 1.0]);
    }

    #[test]
    fn biases_are_added_and_stops_are_held_off_for_a_while() {
        let plain = request(Sampling::default());
        let biased =
            Request { logit_bias: vec![(0, 2.0)], min_tokens: 1, stop_ids: vec![1, 900], ..plain };
        let mut penalties = Penalties::new(&biased).unwrap();
        assert_eq!(penalties.apply(&[1.0, 5.0]), [3.0, f32::NEG_INFINITY]);
        penalties.note(0);
        assert_eq!(penalties.apply(&[1.0, 5.0]), [3.0, 5.0]);
    }

    /// A penalty so small or so large that logits overflow.
    #[test]
    fn extreme_penalties_leave_a_choice() {
        for penalty in [f32::MIN_POSITIVE, 1e-45, f32::MAX] {
            let sampling = Sampling { repetition_penalty: penalty, ..Sampling::default() };
            let penalties = Penalties::new(&request(sampling)).unwrap();
            for logits in [[3.0, 2.0, -1.0], [-1.0, -2.0, -3.0]] {
                assert!(penalties.apply(&logits).iter().all(|x| x.is_finite()), "{penalty}");
            }
        }
    }
}
