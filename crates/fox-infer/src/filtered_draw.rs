//! Top-k, top-p and min-p sampling without sorting the vocabulary.
//!
//! In descending order of weight (ascending ids among equals) every filter keeps a prefix; its last token is the
//! [`Threshold`]. Top-k finds its threshold among a few candidates. Top-p uses rejection sampling: a token is drawn from
//! all, and accepted if the tokens before it sum to less than `p`; otherwise the next one is drawn from those before it.
//! That gives the distribution of the filtered prefix after about `1 / p` passes (FlashInfer's "Sorting-Free GPU Kernels
//! for LLM Sampling", 2025).

use fox_base::random::SplitMix64;

use crate::scores::{BLOCK, likeliest, sum_of};

/// The last token that a filter keeps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Threshold {
    weight: f32,
    id: usize,
}

impl Threshold {
    /// All tokens with a positive weight.
    pub const ALL: Threshold = Threshold { weight: f32::MIN_POSITIVE, id: usize::MAX };

    /// All tokens with at least this weight.
    pub fn from_weight(weight: f32) -> Threshold {
        Threshold { weight, ..Threshold::ALL }
    }

    /// The `count` largest weights; all where there are fewer.
    pub fn largest(weights: &[f32], count: usize) -> Threshold {
        let last = likeliest(weights, count).last().copied();
        last.map_or(Threshold::ALL, |id| Threshold::ALL.and(Threshold { weight: weights[id], id }))
    }

    /// All tokens before this one.
    fn before(id: usize, weight: f32) -> Threshold {
        match id.checked_sub(1) {
            Some(id) => Threshold { weight, id },
            None => Threshold::from_weight(weight.next_up()),
        }
    }

    /// Whether a token passes.
    #[inline]
    fn passes(self, id: usize, weight: f32) -> bool {
        weight > self.weight || (weight == self.weight && id <= self.id)
    }

    /// The intersection of two filters.
    pub fn and(self, other: Threshold) -> Threshold {
        if self.passes(other.id, other.weight) { other } else { self }
    }
}

/// Weights above a threshold, with block sums for draws.
pub(crate) struct FilteredWeights<'a> {
    weights: &'a [f32],
    threshold: Threshold,
    sums: Vec<f64>,
    total: f64,
}

impl<'a> FilteredWeights<'a> {
    pub fn new(weights: &'a [f32], threshold: Threshold) -> Self {
        let mut filtered = FilteredWeights { weights, threshold, sums: Vec::new(), total: 0.0 };
        filtered.restrict(threshold);
        filtered
    }

    fn restrict(&mut self, threshold: Threshold) {
        self.threshold = threshold;
        self.sums.clear();
        let blocks = self.weights.chunks(BLOCK).enumerate();
        self.sums.extend(blocks.map(|(block, weights)| {
            let (first, end) = (block * BLOCK, block * BLOCK + weights.len());
            if (first..end).contains(&threshold.id) {
                let filtered = |(at, weight): (usize, &f32)| threshold.passes(first + at, *weight);
                let filtered = weights.iter().enumerate().filter(|&token| filtered(token));
                return filtered.map(|(_, weight)| f64::from(*weight)).sum();
            }
            // On one side of the id, comparing weights is enough.
            let least =
                if first > threshold.id { threshold.weight.next_up() } else { threshold.weight };
            f64::from(sum_of(weights, |weight| if weight >= least { weight } else { 0.0 }))
        }));
        self.total = self.sums.iter().sum();
    }

    /// Draws from the largest weights that sum to the fraction `top_p` of the total and are at least `least`, in
    /// proportion to the weights; `None` when all are zero.
    pub fn draw_within(mut self, top_p: f32, least: f32, rng: &mut SplitMix64) -> Option<usize> {
        let enough = f64::from(top_p) * self.total;
        if least > 0.0 {
            self.restrict(self.threshold.and(Threshold::from_weight(least)));
        }
        loop {
            let id = self.draw(rng.uniform())?;
            if top_p >= 1.0 {
                return Some(id);
            }
            self.restrict(Threshold::before(id, self.weights[id]));
            if self.total < enough || self.total == 0.0 {
                return Some(id);
            }
        }
    }

    /// The id at a position `uniform` in [0, 1] of the cumulative weights.
    fn draw(&self, uniform: f64) -> Option<usize> {
        let (threshold, mut left) = (self.threshold, uniform * self.total);
        let mut last = None;
        for (block, &sum) in self.sums.iter().enumerate().filter(|(_, sum)| **sum > 0.0) {
            last = Some(block);
            if left >= sum {
                left -= sum;
                continue;
            }
            let first = block * BLOCK;
            for (at, &weight) in self.weights[first..].iter().take(BLOCK).enumerate() {
                if threshold.passes(first + at, weight) {
                    left -= f64::from(weight);
                    if left < 0.0 {
                        return Some(first + at);
                    }
                }
            }
            break;
        }
        // Rounding may exhaust the sums: the last id that passes.
        let first = last? * BLOCK;
        let ids = (first..self.weights.len().min(first + BLOCK)).rev();
        ids.into_iter().find(|&id| threshold.passes(id, self.weights[id]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Probabilities after top-k, top-p and min-p, by sorting in f64, and the distance of the nearest token to the
    /// boundary of top-p.
    fn by_sorting(weights: &[f32], top_k: usize, top_p: f32, min_p: f32) -> (Vec<f64>, f64) {
        let mut filtered: Vec<(usize, f64)> =
            weights.iter().map(|w| f64::from(*w)).enumerate().filter(|(_, w)| *w > 0.0).collect();
        filtered.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        if top_k > 0 {
            filtered.truncate(top_k);
        }
        let all: f64 = filtered.iter().map(|(_, w)| w).sum();
        let (mut sum, mut nearest) = (0.0, f64::INFINITY);
        filtered.retain(|(_, weight)| {
            let before = sum / all;
            nearest = nearest.min((before - f64::from(top_p)).abs());
            sum += weight;
            before < f64::from(top_p)
        });
        filtered.retain(|(_, weight)| *weight >= f64::from(min_p));
        let left: f64 = filtered.iter().map(|(_, w)| w).sum();
        let mut probabilities = vec![0.0; weights.len()];
        filtered.iter().for_each(|(id, weight)| probabilities[*id] = weight / left);
        (probabilities, nearest)
    }

    fn draw(
        weights: &[f32],
        (top_k, top_p, min_p): (usize, f32, f32),
        rng: &mut SplitMix64,
    ) -> usize {
        let threshold = if top_k > 0 { Threshold::largest(weights, top_k) } else { Threshold::ALL };
        FilteredWeights::new(weights, threshold).draw_within(top_p, min_p, rng).unwrap()
    }

    /// Random weights with ties and zeros, the largest being 1.
    fn weights(rng: &mut SplitMix64, len: usize, spread: f64) -> Vec<f32> {
        let mut weights: Vec<f32> = (0..len)
            .map(|_| match rng.between(0, 9) {
                0 => 0.0,
                1 => 0.25,
                _ => (-spread * rng.uniform()).exp() as f32,
            })
            .collect();
        weights[rng.between(0, len - 1)] = 1.0;
        weights
    }

    const FILTERS: [(usize, f32, f32); 8] = [
        (0, 0.9, 0.0),
        (0, 0.3, 0.0),
        (7, 1.0, 0.0),
        (40, 0.5, 0.0),
        (0, 1.0, 0.25),
        (40, 0.95, 0.1),
        (1, 0.1, 1.0),
        (5000, 0.999, 0.0),
    ];

    #[test]
    fn draws_stay_within_the_sorted_filter() {
        let mut rng = SplitMix64::new(5);
        for case in 0..200 {
            let len = rng.between(1, 3000);
            let weights = weights(&mut rng, len, [0.01, 1.0, 20.0, 80.0][case % 4]);
            for filters in FILTERS {
                let (probabilities, nearest) =
                    by_sorting(&weights, filters.0, filters.1, filters.2);
                // Another summation order may move a token across the boundary.
                if nearest < 1e-6 {
                    continue;
                }
                for _ in 0..20 {
                    let id = draw(&weights, filters, &mut rng);
                    assert!(probabilities[id] > 0.0, "case {case}, {filters:?}: {id}");
                }
            }
        }
    }

    /// Pearson's statistic against the probabilities of the f64 oracle.
    #[test]
    fn draws_have_the_distribution_of_the_sorted_filter() {
        let mut rng = SplitMix64::new(6);
        for (case, spread) in [(0, 0.5), (1, 3.0), (2, 12.0)] {
            let weights = weights(&mut rng, 60, spread);
            for filters in FILTERS {
                let (probabilities, _) = by_sorting(&weights, filters.0, filters.1, filters.2);
                let (draws, mut counts) = (20_000, vec![0.0; weights.len()]);
                (0..draws).for_each(|_| counts[draw(&weights, filters, &mut rng)] += 1.0);
                let expected = probabilities.iter().map(|share| share * f64::from(draws));
                let (mut statistic, mut cells) = (0.0, 0.0);
                for (count, expected) in counts.iter().zip(expected).filter(|(_, e)| *e >= 5.0) {
                    statistic += (count - expected).powi(2) / expected;
                    cells += 1.0;
                }
                // Mean `cells`, variance twice that; five standard deviations for the 24 of them.
                let most = cells + 5.0 * f64::sqrt(2.0 * cells) + 5.0;
                assert!(statistic <= most, "case {case}, {filters:?}: {statistic} > {most}");
            }
        }
    }

    #[test]
    fn draw_inverts_the_cumulative_weights() {
        let weights = [0.5, 0.0, 1.0, 0.25, 0.25];
        let threshold = Threshold::largest(&weights, 4).and(Threshold { weight: 0.25, id: 3 });
        let filtered = FilteredWeights::new(&weights, threshold);
        let mut counts = [0; 5];
        for i in 0..7000 {
            counts[filtered.draw((f64::from(i) + 0.5) / 7000.0).unwrap()] += 1;
        }
        assert_eq!(counts, [2000, 0, 4000, 1000, 0]);
        assert_eq!(filtered.draw(1.0), Some(3), "rounding at the end");
        assert_eq!(FilteredWeights::new(&[0.0; 300], Threshold::ALL).draw(0.5), None);
        let mut long = vec![0.0; 1000];
        (long[3], long[999]) = (1.0, 1.0);
        let long = FilteredWeights::new(&long, Threshold::ALL);
        assert_eq!((long.draw(0.4), long.draw(0.6)), (Some(3), Some(999)));
        assert_eq!(long.draw(1.0), Some(999));
    }

    #[test]
    fn block_sums_add_up_to_the_filtered_weights() {
        let mut rng = SplitMix64::new(7);
        let weights = weights(&mut rng, 1000, 2.0);
        for id in [0, 3, 255, 256, 700, 999] {
            for threshold in
                [Threshold { weight: 0.25, id }, Threshold::before(id, weights[id]), Threshold::ALL]
            {
                let filtered =
                    weights.iter().enumerate().filter(|(id, w)| threshold.passes(*id, **w));
                let want: f64 = filtered.map(|(_, w)| f64::from(*w)).sum();
                let got = FilteredWeights::new(&weights, threshold).total;
                assert!((got - want).abs() <= 1e-6 * want, "{threshold:?}: {got} {want}");
            }
        }
    }
}
