//! Sampling of the next token.

use fox_base::random::SplitMix64;
use fox_tensor::TokenDraw;

use crate::filtered_draw::{FilteredWeights, Threshold};
use crate::grammar::GrammarState;
use crate::penalties::Penalties;
use crate::scores::{largest, weights};
use crate::{FinishReason, Grammar, Request, Sampling};

/// Samples the tokens of one request.
#[derive(Debug)]
pub(crate) struct Sampler {
    sampling: Sampling,
    rng: SplitMix64,
    penalties: Option<Penalties>,
    grammar: Option<GrammarState>,
    /// Ids that end the answer.
    stop_ids: Vec<i32>,
    /// Weights of the last draw; a reused allocation.
    weights: Vec<f32>,
}

impl Sampler {
    pub fn new(request: &Request) -> Self {
        let sampling = request.sampling;
        // Neighbouring seeds give independent sequences.
        let mut rng = SplitMix64::new(sampling.seed ^ 0x5eed_f0c5);
        rng.bits();
        Sampler {
            sampling,
            rng,
            penalties: Penalties::new(request),
            grammar: request.grammar.as_ref().map(Grammar::start),
            stop_ids: request.stop_ids.clone(),
            weights: Vec::new(),
        }
    }

    /// Whether a device can sample: it implements neither penalties nor grammars.
    pub fn is_plain(&self) -> bool {
        self.penalties.is_none() && self.grammar.is_none()
    }

    /// Whether the grammar allows nothing more.
    pub fn is_complete(&self) -> bool {
        self.grammar.as_ref().is_some_and(GrammarState::is_complete)
    }

    /// Sampling parameters for a device; `None` for greedy decoding.
    pub fn draw_on_device(&mut self) -> Option<TokenDraw> {
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.sampling;
        let draws = self.is_plain() && temperature > 0.0;
        draws.then(|| TokenDraw { temperature, top_k, top_p, min_p, uniform: self.rng.uniform() })
    }

    /// The next id, or why there is none: a logit is NaN, all are minus infinity, or the grammar is complete.
    pub fn sample(&mut self, logits: &[f32]) -> Result<i32, FinishReason> {
        let top = largest(logits).ok_or_else(broken_logits)?;
        if self.is_plain() {
            return self.draw(logits, top).ok_or_else(broken_logits);
        }
        let mut row = match &self.penalties {
            Some(penalties) => penalties.apply(logits),
            None => logits.to_vec(),
        };
        let may_end = match &mut self.grammar {
            Some(grammar) => {
                grammar.mask(&mut row, &self.stop_ids).map_err(FinishReason::Grammar)?
            }
            None => false,
        };
        let Some(top) = largest(&row) else {
            return Err(match (&self.grammar, may_end) {
                (None, _) => broken_logits(),
                (Some(_), true) => FinishReason::Stop,
                (Some(_), false) => {
                    FinishReason::Grammar("no token of the vocabulary may follow".into())
                }
            });
        };
        let id = self.draw(&row, top).ok_or_else(broken_logits)?;
        if let Some(penalties) = &mut self.penalties {
            penalties.record(id);
        }
        if let Some(grammar) = &mut self.grammar
            && !self.stop_ids.contains(&id)
        {
            grammar.push(id).map_err(FinishReason::Grammar)?;
        }
        Ok(id)
    }

    /// Draws an id; `top` is the largest logit.
    fn draw(&mut self, logits: &[f32], top: f32) -> Option<i32> {
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.sampling;
        if temperature == 0.0 {
            return logits.iter().position(|&logit| logit == top).map(|id| id as i32);
        }
        // A temperature that is next to nothing must not make the likeliest 0 times infinity.
        let inverse_temperature = (1.0 / temperature).min(f32::MAX);
        weights(logits, top, inverse_temperature, &mut self.weights);
        let threshold = match top_k {
            0 => Threshold::ALL,
            count => Threshold::largest(&self.weights, count),
        };
        // The largest weight is 1, so min-p is a threshold on weights.
        let id =
            FilteredWeights::new(&self.weights, threshold).draw_within(top_p, min_p, &mut self.rng);
        id.map(|id| id as i32)
    }
}

/// The end of a request whose logits are NaN or all minus infinity.
pub(crate) fn broken_logits() -> FinishReason {
    FinishReason::Failed("the model's logits are not numbers".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [1.0, 3.0, 2.0, f32::NEG_INFINITY, 3.0];

    fn sampler_of(sampling: Sampling, prompt: &[i32]) -> Sampler {
        Sampler::new(&Request { sampling, ..Request::greedy(prompt.to_vec(), 8) })
    }

    #[test]
    fn penalties_are_not_sampled_on_a_device() {
        let mut plain = sampler_of(Sampling { temperature: 1.0, ..Sampling::default() }, &[]);
        assert!(plain.is_plain() && plain.draw_on_device().is_some());
        let penalty = Sampling { presence_penalty: 1.0, temperature: 1.0, ..Sampling::default() };
        let mut penalized = sampler_of(penalty, &[]);
        assert!(!penalized.is_plain() && penalized.draw_on_device().is_none());
    }

    /// Frequencies of the ids in many draws.
    fn frequencies(sampling: Sampling, prompt: &[i32]) -> Vec<f64> {
        let (mut counts, draws) = (vec![0.0; LOGITS.len()], 20_000);
        for seed in 0..draws {
            let mut sampler = sampler_of(Sampling { seed, ..sampling }, prompt);
            counts[sampler.sample(&LOGITS).unwrap() as usize] += 1.0 / draws as f64;
        }
        counts
    }

    fn softmax(logits: &[f64]) -> Vec<f64> {
        let sum: f64 = logits.iter().map(|x| x.exp()).sum();
        logits.iter().map(|x| x.exp() / sum).collect()
    }

    fn assert_close(got: &[f64], want: &[f64]) {
        // Four standard deviations of a frequency of one half in 20,000 draws.
        let close = got.iter().zip(want).all(|(a, b)| (a - b).abs() < 0.015);
        assert!(close, "{got:?} {want:?}");
    }

    #[test]
    fn draws_follow_the_softmax_at_every_temperature() {
        let none = f64::NEG_INFINITY;
        for temperature in [0.5f32, 1.0, 2.0] {
            let got = frequencies(Sampling { temperature, ..Sampling::default() }, &[]);
            let t = f64::from(temperature);
            assert_close(&got, &softmax(&[1.0 / t, 3.0 / t, 2.0 / t, none, 3.0 / t]));
        }
    }

    #[test]
    fn filters_keep_the_proportions_of_the_rest() {
        let none = f64::NEG_INFINITY;
        let want = softmax(&[none, 3.0, 2.0, none, 3.0]);
        assert_close(&frequencies(Sampling { top_k: 3, ..Sampling::default() }, &[]), &want);
        // Probabilities are 0.05, 0.40, 0.15, 0, 0.40.
        assert_close(&frequencies(Sampling { top_p: 0.9, ..Sampling::default() }, &[]), &want);
        assert_close(&frequencies(Sampling { min_p: 0.3, ..Sampling::default() }, &[]), &want);
        let two = softmax(&[none, 3.0, none, none, 3.0]);
        assert_close(&frequencies(Sampling { top_p: 0.7, ..Sampling::default() }, &[]), &two);
        let one = frequencies(Sampling { top_p: 0.3, ..Sampling::default() }, &[]);
        assert_eq!(one, [0.0, one[1], 0.0, 0.0, 0.0], "the lowest id among equals stays");
        assert_close(&frequencies(Sampling { top_k: 1, ..Sampling::default() }, &[]), &one);
    }

    #[test]
    fn prompt_and_drawn_tokens_are_penalized() {
        let sampling = Sampling { repetition_penalty: 3.0, ..Sampling::default() };
        let none = f64::NEG_INFINITY;
        assert_close(&frequencies(sampling, &[1, 1]), &softmax(&[1.0, 1.0, 2.0, none, 3.0]));
        let greedy = Sampling { repetition_penalty: 3.0, ..Sampling::greedy() };
        let mut sampler = sampler_of(greedy, &[]);
        let drawn: Vec<i32> = (0..4).filter_map(|_| sampler.sample(&LOGITS).ok()).collect();
        assert_eq!(drawn, [1, 4, 2, 0]);
    }

    #[test]
    fn greedy_breaks_ties_by_id() {
        let mut sampler = sampler_of(Sampling::greedy(), &[]);
        assert_eq!(sampler.sample(&LOGITS), Ok(1));
        assert_eq!(sampler.sample(&[f32::NEG_INFINITY; 5]), Err(broken_logits()));
        let penalised = Sampling { repetition_penalty: 3.0, ..Sampling::default() };
        for sampling in [Sampling::greedy(), Sampling::default(), penalised] {
            let mut sampler = sampler_of(sampling, &[0, 2]);
            assert_eq!(sampler.sample(&[0.25, 0.5, f32::NAN]), Err(broken_logits()));
            assert_eq!(sampler.sample(&[f32::NAN; 3]), Err(broken_logits()));
        }
    }

    #[test]
    fn seed_determines_all_draws() {
        let sampling = Sampling { seed: 7, ..Sampling::default() };
        let draws = || {
            let mut sampler = sampler_of(sampling, &[]);
            (0..50).map(|_| sampler.sample(&LOGITS).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(draws(), draws());
    }
}
