//! Statistics of the sums: the smoothed curve, its slope, and perplexities, each with an interval.

use serde::{Deserialize, Serialize};

use super::{Bins, LossSums};
use crate::stats::{Interval, bootstrap_weights, interval};

/// Resamples behind every interval.
const REPLICATES: usize = 400;
/// Bins on each side of a place that its slope is fitted to: one octave together.
const SLOPE_REACH: usize = 4;
/// Fixed, so that the same sums give the same intervals.
const SEED: u64 = 0x666f_7821;

/// One place of the smoothed curve.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CurvePoint {
    /// Position, counted from 1: the geometric middle of the bin.
    pub position: f64,
    /// Mean loss in nats over the bin's positions and all documents.
    pub loss: Interval,
    /// Change of the loss per e-fold of the position, dL / d(ln i), fitted over one octave.
    pub slope: Interval,
}

/// Perplexity of the first tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Perplexity {
    /// How many tokens.
    pub length: usize,
    /// `exp` of their mean loss.
    pub perplexity: Interval,
}

/// The results of one model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossCurve {
    /// Name of the model.
    pub model: String,
    /// Tokens of a chunk.
    pub length: usize,
    /// Chunks evaluated.
    #[serde(rename = "pieces")]
    pub chunks: u64,
    /// Documents they are from.
    pub documents: u64,
    /// Documents too short to be evaluated.
    pub skipped: u64,
    /// Length of the sequences the model was trained on, if known.
    pub training_length: Option<usize>,
    /// Mean loss over all positions.
    pub mean: Interval,
    /// Slope over all positions behind the training length, if there are any.
    pub slope_beyond_training: Option<Interval>,
    /// Perplexity of the first 512, 1024, ... tokens and of all.
    pub perplexities: Vec<Perplexity>,
    /// The smoothed curve.
    pub smooth: Vec<CurvePoint>,
    /// L(i) at every position.
    pub per_position: Vec<f64>,
}

impl LossCurve {
    /// Evaluates the sums.
    pub fn new(model: &str, sums: &LossSums, training_length: Option<usize>) -> Self {
        let bins = Bins::new(sums.length());
        let all = sums.bin_means(None, &bins);
        let resampled: Vec<Vec<f64>> = bootstrap_weights(sums.groups(), REPLICATES, SEED)
            .iter()
            .map(|weights| sums.bin_means(Some(weights), &bins))
            .collect();
        let with_interval = |estimate: &dyn Fn(&[f64]) -> f64| {
            interval(estimate(&all), resampled.iter().map(|means| estimate(means)))
        };
        let last = bins.len() - 1;
        let smooth = (0..bins.len())
            .map(|bin| {
                let reach = bin.saturating_sub(SLOPE_REACH)..=(bin + SLOPE_REACH).min(last);
                CurvePoint {
                    position: bins.center(bin),
                    loss: with_interval(&|means| means[bin]),
                    slope: with_interval(&|means| slope(means, &bins, reach.clone())),
                }
            })
            .collect();
        let beyond = training_length.and_then(|trained| {
            let first = (0..bins.len()).find(|b| bins.range(*b).start >= trained)?;
            (first < last).then(|| with_interval(&|means| slope(means, &bins, first..=last)))
        });
        LossCurve {
            model: model.to_string(),
            length: sums.length(),
            chunks: sums.chunks,
            documents: sums.documents,
            skipped: sums.skipped,
            training_length,
            mean: with_interval(&|means| mean_before(means, &bins, bins.len())),
            slope_beyond_training: beyond,
            perplexities: perplexity_lengths(sums.length())
                .into_iter()
                .filter_map(|length| {
                    let count = bins.before(length)?;
                    let estimate = |means: &[f64]| mean_before(means, &bins, count).exp();
                    Some(Perplexity { length, perplexity: with_interval(&estimate) })
                })
                .collect(),
            smooth,
            per_position: sums.mean(),
        }
    }

    /// Mean of L(i) over positions `range`, counted from 0.
    pub fn mean_over(&self, range: std::ops::Range<usize>) -> f64 {
        let part = &self.per_position[range];
        part.iter().sum::<f64>() / part.len() as f64
    }
}

/// 512, 1024, ... up to the length, and the length itself; shorter documents start at an eighth.
fn perplexity_lengths(length: usize) -> Vec<usize> {
    let first = if length >= 1024 { 512 } else { (length / 8).next_power_of_two() };
    let mut lengths: Vec<usize> = std::iter::successors(Some(first.max(1)), |l| l.checked_mul(2))
        .take_while(|l| *l < length)
        .collect();
    lengths.push(length);
    lengths
}

/// Mean loss over the positions of the first bins.
fn mean_before(means: &[f64], bins: &Bins, count: usize) -> f64 {
    let positions = bins.range(count - 1).end;
    let sum: f64 = (0..count).map(|b| means[b] * bins.range(b).len() as f64).sum();
    sum / positions as f64
}

/// Least-squares slope of bin means against `ln` of the position, weighted by the positions in a bin
/// per its width in `ln i`: each bin counts once, since the bins are even in `ln i`.
fn slope(means: &[f64], bins: &Bins, range: std::ops::RangeInclusive<usize>) -> f64 {
    let points: Vec<(f64, f64)> = range.map(|b| (bins.center(b).ln(), means[b])).collect();
    let n = points.len() as f64;
    let (mx, my) = points.iter().fold((0.0, 0.0), |(x, y), p| (x + p.0 / n, y + p.1 / n));
    let covariance: f64 = points.iter().map(|p| (p.0 - mx) * (p.1 - my)).sum();
    let variance: f64 = points.iter().map(|p| (p.0 - mx).powi(2)).sum();
    covariance / variance
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Documents whose loss is exactly `a - b ln(i)` in every bin.
    fn logarithmic(length: usize, documents: usize) -> LossSums {
        let bins = Bins::new(length);
        let mut sums = LossSums::new(length);
        for d in 0..documents {
            let mut losses = vec![0.0; length];
            for bin in 0..bins.len() {
                let value = 5.0 - 0.25 * bins.center(bin).ln() + 0.01 * (d as f64 - 1.0);
                losses[bins.range(bin)].fill(value as f32);
            }
            sums.add(d as u64, &losses, &bins);
        }
        sums
    }

    #[test]
    fn slope_of_a_logarithmic_curve() {
        let curve = LossCurve::new("m", &logarithmic(4096, 3), Some(1024));
        for point in &curve.smooth {
            assert!((point.slope.value + 0.25).abs() < 1e-5, "{point:?}");
            assert!(point.loss.low <= point.loss.value && point.loss.value <= point.loss.high);
        }
        let beyond = curve.slope_beyond_training.unwrap();
        // The documents differ by a constant only, so their slopes do not differ at all.
        assert!((beyond.value + 0.25).abs() < 1e-5 && beyond.high - beyond.low < 1e-5);
        assert_eq!(LossCurve::new("m", &logarithmic(64, 1), Some(64)).slope_beyond_training, None);
    }

    /// Flat up to the training length, `-0.5 ln i` behind it.
    #[test]
    fn slope_beyond_training_ignores_earlier_bins() {
        let bins = Bins::new(1024);
        let mut losses = vec![4.0_f32; 1024];
        for bin in bins.before(256).unwrap()..bins.len() {
            losses[bins.range(bin)].fill((7.0 - 0.5 * bins.center(bin).ln()) as f32);
        }
        let mut sums = LossSums::new(1024);
        sums.add(0, &losses, &bins);
        let slope = |trained| {
            LossCurve::new("m", &sums, Some(trained)).slope_beyond_training.unwrap().value
        };
        assert!((slope(256) + 0.5).abs() < 1e-5, "{}", slope(256));
        // Flat bins before it change the slope, so none of them was taken above.
        assert!((slope(128) + 0.5).abs() > 0.01, "{}", slope(128));
    }

    /// Documents whose mean losses have a standard deviation of 1: the mean of 100 of them is known to
    /// 1.96 tenths.
    #[test]
    fn intervals_are_those_of_a_mean_over_documents() {
        let bins = Bins::new(16);
        let mut sums = LossSums::new(16);
        for d in 0..100 {
            // Positions of a document go together, so they must not count as independent.
            sums.add(d, &[if d % 2 == 0 { 1.0 } else { 3.0 }; 16], &bins);
        }
        let curve = LossCurve::new("m", &sums, None);
        for found in [curve.mean, curve.smooth[3].loss, curve.smooth[bins.len() - 1].loss] {
            assert_eq!(found.value, 2.0);
            assert!(
                (found.low - 1.804).abs() < 0.05 && (found.high - 2.196).abs() < 0.05,
                "{found:?}"
            );
        }
        let all = curve.perplexities.last().unwrap().perplexity;
        assert!((all.high.ln() - 2.196).abs() < 0.05, "{all:?}");
    }

    #[test]
    fn perplexity_is_exp_of_prefix_mean() {
        let bins = Bins::new(1024);
        let mut sums = LossSums::new(1024);
        let mut losses = vec![1.0_f32; 1024];
        losses[512..].fill(3.0);
        sums.add(0, &losses, &bins);
        let curve = LossCurve::new("m", &sums, None);
        let found: Vec<(usize, f64)> =
            curve.perplexities.iter().map(|p| (p.length, p.perplexity.value)).collect();
        assert_eq!(found.len(), 2);
        assert!((found[0].1 - 1f64.exp()).abs() < 1e-12 && found[0].0 == 512);
        assert!((found[1].1 - 2f64.exp()).abs() < 1e-12 && found[1].0 == 1024);
        assert_eq!(curve.mean.value, 2.0);
        assert_eq!(curve.mean_over(500..524), 2.0);
    }

    #[test]
    fn perplexity_lengths_double_up_to_the_length() {
        assert_eq!(perplexity_lengths(4096), [512, 1024, 2048, 4096]);
        assert_eq!(perplexity_lengths(3000), [512, 1024, 2048, 3000]);
        assert_eq!(perplexity_lengths(70), [8, 16, 32, 64, 70]);
        assert_eq!(perplexity_lengths(1), [1]);
    }
}
