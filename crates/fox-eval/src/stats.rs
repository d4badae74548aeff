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

    #[test]
    fn an_interval_leaves_out_a_fortieth_at_either_end() {
        let shuffled = (0..=1000).map(|i| f64::from(i * 8 % 1001));
        let found = interval(1.0, shuffled.chain([f64::NAN, f64::INFINITY]));
        assert_eq!(found, Interval { value: 1.0, low: 25.0, high: 975.0 });
    }
}
