//! Means, quantiles and the bootstrap.

use fox_base::random::SplitMix64;
use serde::{Deserialize, Serialize};

/// A value with the ends of a 95% interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// The estimate from all data.
    pub value: f64,
    /// 2.5% quantile of the resampled estimates.
    pub low: f64,
    /// 97.5% quantile of the resampled estimates.
    pub high: f64,
}

/// The quantile `q` (0 to 1) of sorted values, interpolated between neighbours; NaN without values.
pub fn quantile(sorted: &[f64], q: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let at = q.clamp(0.0, 1.0) * last as f64;
    let low = at.floor() as usize;
    let high = (low + 1).min(last);
    // Equal neighbours need no interpolation, and infinite ones have none.
    match sorted[low] == sorted[high] {
        true => sorted[low],
        false => sorted[low] + (sorted[high] - sorted[low]) * (at - low as f64),
    }
}

/// Resamples: `replicates` lists of `units` weights, how often each unit was drawn (with replacement).
///
/// The same seed gives the same weights, so that curves of several models are resampled alike.
pub fn bootstrap_weights(units: usize, replicates: usize, seed: u64) -> Vec<Vec<u32>> {
    let mut random = SplitMix64::new(seed);
    (0..replicates)
        .map(|_| {
            let mut weights = vec![0; units];
            for _ in 0..units {
                weights[random.below(units as u64) as usize] += 1;
            }
            weights
        })
        .collect()
}

/// The 95% interval of an estimate from its resampled values; those that are no number are left out.
pub fn interval(value: f64, resampled: impl Iterator<Item = f64>) -> Interval {
    let mut sorted: Vec<f64> = resampled.filter(|v| v.is_finite()).collect();
    sorted.sort_by(f64::total_cmp);
    Interval { value, low: quantile(&sorted, 0.025), high: quantile(&sorted, 0.975) }
}

/// 97.5% quantiles of Student's t distribution for 1 to 30 degrees of freedom.
const STUDENT: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
];
/// That of the normal distribution.
const NORMAL: f64 = 1.96;

/// Wilson's 95% interval of a share that was found in `trials` trials; unlike others it has a width at 0 and 1.
pub fn wilson(share: f64, trials: u64) -> Interval {
    let n = trials.max(1) as f64;
    let square = NORMAL * NORMAL;
    let middle = (share + square / (2.0 * n)) / (1.0 + square / n);
    let reach =
        NORMAL / (1.0 + square / n) * (share * (1.0 - share) / n + square / (4.0 * n * n)).sqrt();
    Interval { value: share, low: (middle - reach).max(0.0), high: (middle + reach).min(1.0) }
}

/// The mean of shares from several seeds with Student's 95% interval, cut to 0..1; a single one has no width.
pub fn over_seeds(shares: &[f64]) -> Interval {
    let n = shares.len() as f64;
    let value = shares.iter().sum::<f64>() / n;
    let variance = shares.iter().map(|share| (share - value).powi(2)).sum::<f64>();
    let error = (variance / (n - 1.0).max(1.0) / n).sqrt();
    let reach = error * STUDENT.get(shares.len().saturating_sub(2)).copied().unwrap_or(NORMAL);
    Interval { value, low: (value - reach).max(0.0), high: (value + reach).min(1.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_interpolate() {
        let values = [1.0, 2.0, 4.0];
        assert_eq!(quantile(&values, 0.0), 1.0);
        assert_eq!(quantile(&values, 0.5), 2.0);
        assert_eq!(quantile(&values, 0.75), 3.0);
        assert_eq!(quantile(&values, 1.0), 4.0);
        assert!(quantile(&[], 0.5).is_nan());
    }

    #[test]
    fn resamples_draw_as_many_as_there_are() {
        let weights = bootstrap_weights(10, 50, 1);
        assert!(weights.iter().all(|w| w.iter().sum::<u32>() == 10));
        assert_ne!(weights[0], weights[1]);
        // The same on every machine and in every version.
        assert_eq!(bootstrap_weights(5, 2, 1), [[0, 0, 3, 1, 1], [0, 1, 1, 2, 1]]);
        assert_eq!(weights, bootstrap_weights(10, 50, 1));
        // Every unit is drawn about 50 times in all.
        let drawn: Vec<u32> = (0..10).map(|u| weights.iter().map(|w| w[u]).sum()).collect();
        assert!(drawn.iter().all(|d| (25..80).contains(d)), "{drawn:?}");
    }

    #[test]
    fn the_interval_of_a_constant_is_a_point() {
        let found = interval(3.0, [3.0; 9].into_iter());
        assert_eq!(found, Interval { value: 3.0, low: 3.0, high: 3.0 });
    }

    /// Shares of 0 of 10 and 1 of 10: Wilson 1927, as in common tables (0..0.2775, 0.0179..0.4042).
    #[test]
    fn shares_have_wilsons_interval() {
        let near = |a: f64, b: f64| (a - b).abs() < 1e-4;
        let none = wilson(0.0, 10);
        assert!(none.low == 0.0 && near(none.high, 0.2775), "{none:?}");
        let one = wilson(0.1, 10);
        assert!(near(one.low, 0.0179) && near(one.high, 0.4042), "{one:?}");
        assert!(near(wilson(1.0, 10).low, 1.0 - 0.2775));
    }

    #[test]
    fn seeds_have_students_interval() {
        let found = over_seeds(&[0.5, 0.6]);
        // Half of the difference is the standard error, 12.706 times of it is too much.
        assert_eq!((found.value, found.low, found.high), (0.55, 0.0, 1.0));
        let found = over_seeds(&[0.50, 0.51, 0.52, 0.53, 0.54]);
        let reach = 2.776 * (0.00025f64 / 5.0).sqrt();
        assert!((found.value - 0.52).abs() < 1e-12 && (found.high - 0.52 - reach).abs() < 1e-9);
        assert_eq!(over_seeds(&[0.25; 4]), Interval { value: 0.25, low: 0.25, high: 0.25 });
    }

    #[test]
    fn an_interval_leaves_out_a_fortieth_at_either_end() {
        let shuffled = (0..=1000).map(|i| f64::from(i * 8 % 1001));
        let found = interval(1.0, shuffled.chain([f64::NAN, f64::INFINITY]));
        assert_eq!(found, Interval { value: 1.0, low: 25.0, high: 975.0 });
    }
}
