//! From the values of items to one figure with its standard error.

use serde::{Deserialize, Serialize};

use super::Metric;
use crate::stats::bootstrap_weights;

/// Resamples behind the standard error of a perplexity; the harness draws 100,000, which changes its second
/// digit at most.
const REPLICATES: usize = 1000;
/// Fixed, so that the same values give the same error.
const SEED: u64 = 0x7461_736b;

/// One result of a task.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// What was measured.
    pub metric: Metric,
    /// The result; fractions are between 0 and 1.
    pub value: f64,
    /// Its standard error: of a mean, the sample's standard deviation over the root of the number of items; of
    /// a perplexity, the standard deviation over bootstrap resamples. `None` for a single item, and where
    /// perplexities exceed all numbers.
    pub stderr: Option<f64>,
    /// Number of items.
    pub items: usize,
}

/// The values of all items for one metric.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    /// A mean of these.
    Mean(Vec<f64>),
    /// `exp` of the negative mean of these log-likelihoods.
    Perplexity(Vec<f64>),
    /// `exp` of the negative sum of log-likelihoods over the sum of lengths.
    PerLength(Vec<(f64, f64)>),
    /// The same without `exp`, base 2.
    BitsPerLength(Vec<(f64, f64)>),
}

impl Values {
    /// The figure, as lm-evaluation-harness computes it (`mean`, `perplexity`, `weighted_perplexity` and
    /// `bits_per_byte` of `lm_eval/api/metrics.py`; the harness gives no error for the last two).
    pub fn figure(&self, metric: Metric) -> Figure {
        let (value, stderr, items) = match self {
            Values::Mean(values) => (mean(values), mean_error(values), values.len()),
            Values::Perplexity(values) => {
                let pairs: Vec<(f64, f64)> = values.iter().map(|v| (*v, 1.0)).collect();
                bootstrapped(&pairs, |mean: f64| (-mean).exp())
            }
            Values::PerLength(pairs) => bootstrapped(pairs, |mean: f64| (-mean).exp()),
            Values::BitsPerLength(pairs) => {
                bootstrapped(pairs, |mean: f64| -mean / std::f64::consts::LN_2)
            }
        };
        Figure { metric, value, stderr, items }
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn deviation(values: &[f64]) -> Option<f64> {
    let middle = mean(values);
    let squares: f64 = values.iter().map(|v| (v - middle).powi(2)).sum();
    (values.len() > 1).then(|| (squares / (values.len() - 1) as f64).sqrt())
}

fn mean_error(values: &[f64]) -> Option<f64> {
    deviation(values).map(|d| d / (values.len() as f64).sqrt())
}

/// `finish` of the weighted mean, its error, and the number of items.
fn bootstrapped(pairs: &[(f64, f64)], finish: impl Fn(f64) -> f64) -> (f64, Option<f64>, usize) {
    let estimate = |weight: &dyn Fn(usize) -> f64| {
        let sums = pairs
            .iter()
            .enumerate()
            .fold((0.0, 0.0), |(a, b), (i, pair)| (a + weight(i) * pair.0, b + weight(i) * pair.1));
        finish(sums.0 / sums.1)
    };
    let value = estimate(&|_| 1.0);
    let resampled: Vec<f64> = match pairs.len() {
        0 | 1 => Vec::new(),
        units => bootstrap_weights(units, REPLICATES, SEED)
            .iter()
            .map(|weights| estimate(&|i| f64::from(weights[i])))
            .collect(),
    };
    (value, deviation(&resampled).filter(|error| error.is_finite()), pairs.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mean_and_standard_error_by_hand() {
        let figure = Values::Mean(vec![1.0, 0.0, 1.0, 1.0]).figure(Metric::Acc);
        assert_eq!((figure.value, figure.items), (0.75, 4));
        // Deviation sqrt(0.75 / 3) = 0.5, over sqrt(4).
        assert_eq!(figure.stderr, Some(0.25));
        assert_eq!(Values::Mean(vec![1.0]).figure(Metric::Acc).stderr, None);
    }

    #[test]
    fn perplexities_by_hand() {
        let figure = Values::Perplexity(vec![-1.0, -3.0]).figure(Metric::Perplexity);
        assert!((figure.value - 2f64.exp()).abs() < 1e-12);
        let words = Values::PerLength(vec![(-6.0, 2.0), (-2.0, 2.0)]);
        assert!((words.figure(Metric::WordPerplexity).value - 2f64.exp()).abs() < 1e-12);
        let bits = Values::BitsPerLength(vec![(-8.0 * std::f64::consts::LN_2, 4.0)]);
        let figure = bits.figure(Metric::BitsPerByte);
        assert!((figure.value - 2.0).abs() < 1e-12 && figure.stderr.is_none());
    }

    #[test]
    fn bootstrap_agrees_with_standard_error() {
        let values: Vec<f64> = (0..200).map(|i| -1.0 - 0.01 * f64::from(i % 17)).collect();
        let figure = Values::Perplexity(values.clone()).figure(Metric::Perplexity);
        // d exp(-m) = exp(-m) dm.
        let expected = figure.value * mean_error(&values).unwrap();
        let found = figure.stderr.unwrap();
        assert!((found / expected - 1.0).abs() < 0.1, "{found} {expected}");
        assert_eq!(Values::Perplexity(values).figure(Metric::Perplexity), figure);
    }

    /// Texts of different lengths, all equally likely per byte: whatever is drawn, the figure is the same.
    #[test]
    fn resample_pairs_lengths_with_likelihoods() {
        let pairs: Vec<(f64, f64)> = (1..50).map(|n| (-2.0 * f64::from(n), f64::from(n))).collect();
        for (values, value) in [
            (Values::PerLength(pairs.clone()), 2f64.exp()),
            (Values::BitsPerLength(pairs), 2.0 / std::f64::consts::LN_2),
        ] {
            let figure = values.figure(Metric::BytePerplexity);
            assert!((figure.value - value).abs() < 1e-12 && figure.items == 49, "{figure:?}");
            assert!(figure.stderr.unwrap() < 1e-12, "{figure:?}");
        }
    }

    #[test]
    fn overflowing_perplexity_has_no_error() {
        let figure =
            Values::PerLength(vec![(-1e4, 1.0), (-2e4, 1.0)]).figure(Metric::BytePerplexity);
        assert_eq!((figure.value, figure.stderr), (f64::INFINITY, None));
    }
}
