//! Changes to the logits before sampling: biases and penalties for tokens that occurred.

use std::collections::{HashMap, HashSet};

use crate::Request;

/// Biases and penalties of one request.
#[derive(Debug)]
pub(crate) struct Penalties {
    repetition: f32,
    presence: f32,
    frequency: f32,
    bias: Vec<(i32, f32)>,
    /// Ids that are not sampled before `min_tokens`.
    suppressed: Vec<i32>,
    min_tokens: usize,
    sampled: usize,
    /// Ids of prompt and answer, if there is a repetition penalty.
    seen: HashSet<i32>,
    /// Occurrences of ids in the answer.
    counts: HashMap<i32, u32>,
}

impl Penalties {
    /// `None` when the request changes no logits.
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
            suppressed: request.stop_ids.clone(),
            min_tokens: request.min_tokens,
            sampled: 0,
            seen: prompt.collect(),
            counts: HashMap::new(),
        })
    }

    /// The changed logits `[V]`.
    pub fn apply(&self, logits: &[f32]) -> Vec<f32> {
        let mut logits = logits.to_vec();
        for &(id, bias) in &self.bias {
            logits[id as usize] += bias;
        }
        for &id in &self.seen {
            penalize(&mut logits[id as usize], self.repetition);
        }
        for (&id, &count) in &self.counts {
            logits[id as usize] -= self.presence + self.frequency * count as f32;
        }
        if self.sampled < self.min_tokens {
            for &id in &self.suppressed {
                if let Some(logit) = logits.get_mut(id as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        logits
    }

    /// Records a sampled token.
    pub fn record(&mut self, id: i32) {
        self.sampled += 1;
        if self.repetition != 1.0 {
            self.seen.insert(id);
        }
        if self.presence != 0.0 || self.frequency != 0.0 {
            *self.counts.entry(id).or_default() += 1;
        }
    }
}

fn penalize(logit: &mut f32, penalty: f32) {
    let penalised = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
    // An extreme penalty must leave finite logits.
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
    fn plain_request_has_no_penalties() {
        assert!(Penalties::new(&request(Sampling::default())).is_none());
    }

    #[test]
    fn repetition_penalty_includes_the_prompt() {
        let sampling = Sampling { repetition_penalty: 2.0, ..Sampling::default() };
        let mut penalties = Penalties::new(&request(sampling)).unwrap();
        assert_eq!(penalties.apply(&[1.0, 3.0, -2.0]), [1.0, 1.5, -2.0]);
        penalties.record(2);
        assert_eq!(penalties.apply(&[1.0, 3.0, -2.0]), [1.0, 1.5, -4.0]);
    }

    #[test]
    fn presence_and_frequency_count_the_answer_only() {
        let sampling =
            Sampling { presence_penalty: 0.5, frequency_penalty: 0.25, ..Sampling::default() };
        let mut penalties = Penalties::new(&request(sampling)).unwrap();
        assert_eq!(penalties.apply(&[1.0, 1.0]), [1.0, 1.0], "the prompt does not count");
        penalties.record(0);
        assert_eq!(penalties.apply(&[1.0, 1.0]), [0.25, 1.0]);
        penalties.record(0);
        assert_eq!(penalties.apply(&[1.0, 1.0]), [0.0, 1.0]);
    }

    #[test]
    fn min_tokens_suppresses_stop_ids() {
        let plain = request(Sampling::default());
        let biased =
            Request { logit_bias: vec![(0, 2.0)], min_tokens: 1, stop_ids: vec![1, 900], ..plain };
        let mut penalties = Penalties::new(&biased).unwrap();
        assert_eq!(penalties.apply(&[1.0, 5.0]), [3.0, f32::NEG_INFINITY]);
        penalties.record(0);
        assert_eq!(penalties.apply(&[1.0, 5.0]), [3.0, 5.0]);
    }

    #[test]
    fn extreme_penalties_leave_finite_logits() {
        for penalty in [f32::MIN_POSITIVE, 1e-45, f32::MAX] {
            let sampling = Sampling { repetition_penalty: penalty, ..Sampling::default() };
            let penalties = Penalties::new(&request(sampling)).unwrap();
            for logits in [[3.0, 2.0, -1.0], [-1.0, -2.0, -3.0]] {
                assert!(penalties.apply(&logits).iter().all(|x| x.is_finite()), "{penalty}");
            }
        }
    }
}
