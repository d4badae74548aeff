//! Means, quantiles and the bootstrap.

use serde::Serialize;

/// A value with the ends of a 95% interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
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
    let mut random = SplitMix(seed);
    (0..replicates)
        .map(|_| {
            let mut weights = vec![0; units];
            for _ in 0..units {
                weights[random.below(units)] += 1;
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

/// SplitMix64: the same numbers on every machine.
#[derive(Clone, Debug)]
pub(crate) struct SplitMix(pub u64);

impl SplitMix {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A number below `bound`, which must not be 0.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }
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
}
