//! The choice of the next token.

use std::collections::HashSet;

use fox_tensor::cases::Rng;

use crate::Sampling;
use crate::scores::argmax;

/// Chooses the tokens of one request.
#[derive(Debug)]
pub(crate) struct Sampler {
    sampling: Sampling,
    rng: Rng,
    /// Ids that occurred, when they are penalised.
    seen: Option<HashSet<i32>>,
}

impl Sampler {
    pub fn new(sampling: Sampling, prompt: &[i32]) -> Self {
        let penalised = sampling.repetition_penalty != 1.0;
        let seen = penalised.then(|| prompt.iter().copied().collect());
        // Neighbouring seeds give unrelated streams.
        let mut rng = Rng::new(sampling.seed ^ 0x5eed_f0c5);
        rng.bits();
        Sampler { sampling, rng, seen }
    }

    /// The next id; `None` when a logit is NaN, because a model that gives one is broken and the rest of the row with it,
    /// or when all are minus infinity.
    pub fn choose(&mut self, logits: &[f32]) -> Option<i32> {
        if logits.iter().any(|logit| logit.is_nan()) {
            return None;
        }
        let id = match &self.seen {
            None => draw(&self.sampling, &mut self.rng, logits),
            Some(seen) => {
                let mut logits = logits.to_vec();
                for &id in seen {
                    penalise(&mut logits[id as usize], self.sampling.repetition_penalty);
                }
                draw(&self.sampling, &mut self.rng, &logits)
            }
        }?;
        if let Some(seen) = &mut self.seen {
            seen.insert(id);
        }
        Some(id)
    }
}

fn penalise(logit: &mut f32, penalty: f32) {
    let penalised = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
    // An extreme penalty must leave something to choose from.
    *logit = penalised.clamp(f32::MIN, f32::MAX);
}

fn draw(sampling: &Sampling, rng: &mut Rng, logits: &[f32]) -> Option<i32> {
    let best = argmax(logits)?;
    if sampling.temperature == 0.0 {
        return Some(best as i32);
    }
    let (top, heat) = (logits[best], 1.0 / f64::from(sampling.temperature));
    let weight = |logit: f32| (f64::from(logit - top) * heat).exp();
    let mut kept: Vec<(usize, f64)> = logits
        .iter()
        .enumerate()
        .map(|(id, &logit)| (id, weight(logit)))
        .filter(|(_, weight)| *weight > 0.0)
        .collect();
    let descending = |a: &(usize, f64), b: &(usize, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if sampling.top_k > 0 && sampling.top_k < kept.len() {
        kept.select_nth_unstable_by(sampling.top_k - 1, descending);
        kept.truncate(sampling.top_k);
    }
    if sampling.top_p < 1.0 {
        kept.sort_unstable_by(descending);
        let enough = f64::from(sampling.top_p) * kept.iter().map(|(_, w)| w).sum::<f64>();
        let mut sum = 0.0;
        let count = kept.iter().take_while(|(_, w)| {
            let before = sum;
            sum += w;
            before < enough
        });
        let count = count.count();
        kept.truncate(count);
    }
    // The likeliest weighs 1, so a weight is its share of the likeliest one's.
    kept.retain(|(_, weight)| *weight >= f64::from(sampling.min_p));
    // A draw must not depend on how the selection above left the order.
    kept.sort_unstable_by_key(|(id, _)| *id);
    let mut left = rng.uniform() * kept.iter().map(|(_, w)| w).sum::<f64>();
    for (id, weight) in &kept {
        left -= weight;
        if left < 0.0 {
            return Some(*id as i32);
        }
    }
    kept.last().map(|(id, _)| *id as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [1.0, 3.0, 2.0, f32::NEG_INFINITY, 3.0];

    /// Shares of the ids in many draws.
    fn shares(sampling: Sampling, prompt: &[i32]) -> Vec<f64> {
        let (mut counts, draws) = (vec![0.0; LOGITS.len()], 20_000);
        for seed in 0..draws {
            let mut sampler = Sampler::new(Sampling { seed, ..sampling }, prompt);
            counts[sampler.choose(&LOGITS).unwrap() as usize] += 1.0 / draws as f64;
        }
        counts
    }

    fn softmax(logits: &[f64]) -> Vec<f64> {
        let sum: f64 = logits.iter().map(|x| x.exp()).sum();
        logits.iter().map(|x| x.exp() / sum).collect()
    }

    fn assert_close(got: &[f64], want: &[f64]) {
        // Four standard deviations of a share of one half in 20,000 draws.
        let close = got.iter().zip(want).all(|(a, b)| (a - b).abs() < 0.015);
        assert!(close, "{got:?} {want:?}");
    }

    #[test]
    fn draws_follow_the_softmax_at_any_temperature() {
        let none = f64::NEG_INFINITY;
        for heat in [0.5f32, 1.0, 2.0] {
            let got = shares(Sampling { temperature: heat, ..Sampling::default() }, &[]);
            let t = f64::from(heat);
            assert_close(&got, &softmax(&[1.0 / t, 3.0 / t, 2.0 / t, none, 3.0 / t]));
        }
    }

    #[test]
    fn filters_cut_and_what_is_left_keeps_its_proportions() {
        let none = f64::NEG_INFINITY;
        let want = softmax(&[none, 3.0, 2.0, none, 3.0]);
        assert_close(&shares(Sampling { top_k: 3, ..Sampling::default() }, &[]), &want);
        // Shares are 0.05, 0.40, 0.15, 0, 0.40.
        assert_close(&shares(Sampling { top_p: 0.9, ..Sampling::default() }, &[]), &want);
        assert_close(&shares(Sampling { min_p: 0.3, ..Sampling::default() }, &[]), &want);
        let two = softmax(&[none, 3.0, none, none, 3.0]);
        assert_close(&shares(Sampling { top_p: 0.7, ..Sampling::default() }, &[]), &two);
        let one = shares(Sampling { top_p: 0.3, ..Sampling::default() }, &[]);
        assert_eq!(one, [0.0, one[1], 0.0, 0.0, 0.0], "the lowest id among equals stays");
        assert_close(&shares(Sampling { top_k: 1, ..Sampling::default() }, &[]), &one);
    }

    #[test]
    fn what_occurred_is_penalised_also_what_was_drawn() {
        let sampling = Sampling { repetition_penalty: 3.0, ..Sampling::default() };
        let none = f64::NEG_INFINITY;
        assert_close(&shares(sampling, &[1, 1]), &softmax(&[1.0, 1.0, 2.0, none, 3.0]));
        let greedy = Sampling { repetition_penalty: 3.0, ..Sampling::greedy() };
        let mut sampler = Sampler::new(greedy, &[]);
        let drawn: Vec<i32> = (0..4).filter_map(|_| sampler.choose(&LOGITS)).collect();
        assert_eq!(drawn, [1, 4, 2, 0]);
    }

    /// A penalty so small or so large that logits overflow.
    #[test]
    fn extreme_penalties_leave_a_choice() {
        for penalty in [f32::MIN_POSITIVE, 1e-45, f32::MAX] {
            let sampling = Sampling { repetition_penalty: penalty, ..Sampling::default() };
            for logits in [[3.0, 2.0, -1.0], [-1.0, -2.0, -3.0]] {
                let mut sampler = Sampler::new(sampling, &[0, 1, 2]);
                assert!(sampler.choose(&logits).is_some(), "{penalty} {logits:?}");
            }
        }
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest_and_a_nan_gives_nothing() {
        let mut sampler = Sampler::new(Sampling::greedy(), &[]);
        assert_eq!(sampler.choose(&LOGITS), Some(1));
        let penalised = Sampling { repetition_penalty: 3.0, ..Sampling::default() };
        for sampling in [Sampling::greedy(), Sampling::default(), penalised] {
            let mut sampler = Sampler::new(sampling, &[0, 2]);
            assert_eq!(sampler.choose(&[0.25, 0.5, f32::NAN]), None);
            assert_eq!(sampler.choose(&[f32::NAN; 3]), None);
        }
    }

    #[test]
    fn a_seed_decides_all_draws() {
        let sampling = Sampling { seed: 7, ..Sampling::default() };
        let stream = || {
            let mut sampler = Sampler::new(sampling, &[]);
            (0..50).map(|_| sampler.choose(&LOGITS).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(stream(), stream());
    }
}
