//! Quantiles, the bootstrap, and intervals of fractions and of means over seeds.

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

/// Bootstrap resamples: `replicates` lists of `units` weights, how often each unit was drawn (with replacement).
///
/// The same seed gives the same weights, so that several models are resampled with the same units.
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

/// The 95% interval of an estimate from its resampled values; values that are not finite are left out.
pub fn interval(value: f64, resampled: impl Iterator<Item = f64>) -> Interval {
    let mut sorted: Vec<f64> = resampled.filter(|v| v.is_finite()).collect();
    sorted.sort_by(f64::total_cmp);
    Interval { value, low: quantile(&sorted, 0.025), high: quantile(&sorted, 0.975) }
}

/// 97.5% quantiles of Student's t distribution for 1 to 30 degrees of freedom.
const STUDENT_T: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
];
/// 97.5% quantile of the normal distribution.
const NORMAL: f64 = 1.96;

/// The 97.5% quantile of Student's t distribution, to three decimals; infinite without degrees of freedom.
///
/// Beyond the table it is the Cornish-Fisher expansion around the normal quantile, whose error there is below 1e-5.
pub(crate) fn student_t(degrees_of_freedom: usize) -> f64 {
    let Some(index) = degrees_of_freedom.checked_sub(1) else { return f64::INFINITY };
    STUDENT_T.get(index).copied().unwrap_or_else(|| {
        let (z, n) = (1.959_963_985f64, degrees_of_freedom as f64);
        let first = (z.powi(3) + z) / 4.0;
        let second = (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / 96.0;
        let third = (3.0 * z.powi(7) + 19.0 * z.powi(5) + 17.0 * z.powi(3) - 15.0 * z) / 384.0;
        z + first / n + second / (n * n) + third / n.powi(3)
    })
}

/// Wilson's 95% interval of a fraction of `trials` trials; unlike the normal interval it has a width at 0 and 1.
pub fn wilson(fraction: f64, trials: u64) -> Interval {
    let n = trials.max(1) as f64;
    let square = NORMAL * NORMAL;
    let middle = (fraction + square / (2.0 * n)) / (1.0 + square / n);
    let reach = NORMAL / (1.0 + square / n)
        * (fraction * (1.0 - fraction) / n + square / (4.0 * n * n)).sqrt();
    Interval { value: fraction, low: (middle - reach).max(0.0), high: (middle + reach).min(1.0) }
}

/// The mean over seeds with Student's 95% interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SeedMean {
    /// Number of values.
    pub count: usize,
    /// Their mean.
    pub mean: f64,
    /// Half the width of the interval; absent for a single value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub half_width: Option<f64>,
}

impl SeedMean {
    /// `None` without values.
    pub fn of(values: &[f64]) -> Option<SeedMean> {
        let count = values.len();
        let freedom = count.checked_sub(1)?;
        let mean = values.iter().sum::<f64>() / count as f64;
        let half_width = (freedom > 0).then(|| {
            let squares: f64 = values.iter().map(|x| (x - mean).powi(2)).sum();
            student_t(freedom) * (squares / freedom as f64 / count as f64).sqrt()
        });
        Some(SeedMean { count, mean, half_width })
    }

    /// The ends of the interval; a single value is both.
    pub fn ends(&self) -> (f64, f64) {
        let half = self.half_width.unwrap_or(0.0);
        (self.mean - half, self.mean + half)
    }

    /// `1.2340 ± 0.0056`, or the value alone.
    pub fn text(&self, digits: usize) -> String {
        match self.half_width {
            Some(half) => format!("{:.digits$} ± {half:.digits$}", self.mean),
            None => format!("{:.digits$}", self.mean),
        }
    }
}

/// The mean of fractions over seeds with Student's 95% interval, clipped to 0..1; NaN without values.
pub(crate) fn fraction_over_seeds(fractions: &[f64]) -> Interval {
    let Some(mean) = SeedMean::of(fractions) else {
        return Interval { value: f64::NAN, low: f64::NAN, high: f64::NAN };
    };
    let (low, high) = mean.ends();
    Interval { value: mean.mean, low: low.max(0.0), high: high.min(1.0) }
}

/// How many pairs of rows have the same order in two lists of figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct OrderAgreement {
    /// Pairs that differ in the reference.
    pub pairs: usize,
    /// Those of them that are in the same order here.
    pub agree: usize,
}

impl OrderAgreement {
    /// Compares `(reference, here)` of every two rows. Pairs that are equal in the reference are left out; those that
    /// are equal here do not agree.
    pub fn of(rows: &[(f64, f64)]) -> OrderAgreement {
        let mut agreement = OrderAgreement::default();
        for (i, a) in rows.iter().enumerate() {
            for b in &rows[i + 1..] {
                if a.0 != b.0 {
                    agreement.pairs += 1;
                    agreement.agree += usize::from((a.0 < b.0) == (a.1 < b.1) && a.1 != b.1);
                }
            }
        }
        agreement
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interpolates_quantiles() {
        let values = [1.0, 2.0, 4.0];
        assert_eq!(quantile(&values, 0.0), 1.0);
        assert_eq!(quantile(&values, 0.5), 2.0);
        assert_eq!(quantile(&values, 0.75), 3.0);
        assert_eq!(quantile(&values, 1.0), 4.0);
        assert!(quantile(&[], 0.5).is_nan());
    }

    #[test]
    fn resamples_draw_as_many_units_as_there_are() {
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
    fn interval_of_a_constant_has_no_width() {
        let found = interval(3.0, [3.0; 9].into_iter());
        assert_eq!(found, Interval { value: 3.0, low: 3.0, high: 3.0 });
    }

    /// 0 of 10 and 1 of 10: Wilson 1927, as in common tables (0..0.2775, 0.0179..0.4042).
    #[test]
    fn matches_tabulated_wilson_intervals() {
        let near = |a: f64, b: f64| (a - b).abs() < 1e-4;
        let none = wilson(0.0, 10);
        assert!(none.low == 0.0 && near(none.high, 0.2775), "{none:?}");
        let one = wilson(0.1, 10);
        assert!(near(one.low, 0.0179) && near(one.high, 0.4042), "{one:?}");
        assert!(near(wilson(1.0, 10).low, 1.0 - 0.2775));
    }

    #[test]
    fn fractions_over_seeds_have_students_interval() {
        let found = fraction_over_seeds(&[0.5, 0.6]);
        // Half of the difference is the standard error, 12.706 times of it is too much.
        assert_eq!((found.value, found.low, found.high), (0.55, 0.0, 1.0));
        let found = fraction_over_seeds(&[0.50, 0.51, 0.52, 0.53, 0.54]);
        let reach = 2.776 * (0.00025f64 / 5.0).sqrt();
        assert!((found.value - 0.52).abs() < 1e-12 && (found.high - 0.52 - reach).abs() < 1e-9);
        assert_eq!(
            fraction_over_seeds(&[0.25; 4]),
            Interval { value: 0.25, low: 0.25, high: 0.25 }
        );
    }

    #[test]
    fn interval_excludes_a_fortieth_at_either_end() {
        let shuffled = (0..=1000).map(|i| f64::from(i * 8 % 1001));
        let found = interval(1.0, shuffled.chain([f64::NAN, f64::INFINITY]));
        assert_eq!(found, Interval { value: 1.0, low: 25.0, high: 975.0 });
    }

    /// By hand: mean 2, variance (1 + 0 + 1) / 2 = 1, standard error sqrt(1/3), times 4.303.
    #[test]
    fn mean_of_three_values_by_hand() {
        let mean = SeedMean::of(&[1.0, 2.0, 3.0]).unwrap();
        assert_eq!((mean.count, mean.mean), (3, 2.0));
        assert!((mean.half_width.unwrap() - 2.484_338).abs() < 1e-5, "{mean:?}");
        assert_eq!(mean.text(2), "2.00 ± 2.48");
        let (low, high) = mean.ends();
        assert!((low + 0.484_338).abs() < 1e-5 && (high - 4.484_338).abs() < 1e-5);
        // Mean 1.5, variance 0.5, standard error 0.5, times 12.706.
        assert_eq!(SeedMean::of(&[1.0, 2.0]).unwrap().half_width, Some(6.353));
    }

    #[test]
    fn single_value_has_no_interval() {
        assert_eq!(SeedMean::of(&[]), None);
        assert!(fraction_over_seeds(&[]).value.is_nan());
        let one = SeedMean::of(&[3.0]).unwrap();
        assert_eq!((one.half_width, one.ends(), one.text(1)), (None, (3.0, 3.0), "3.0".into()));
    }

    /// Tabulated values (e.g. NIST/SEMATECH e-Handbook, section 1.3.6.7.2).
    #[test]
    fn matches_tabulated_student_quantiles() {
        for (freedom, quantile) in [
            (1, 12.706),
            (2, 4.303),
            (5, 2.571),
            (10, 2.228),
            (20, 2.086),
            (30, 2.042),
            (31, 2.040),
            (35, 2.030),
            (40, 2.021),
            (50, 2.009),
            (60, 2.000),
            (80, 1.990),
            (100, 1.984),
            (1_000_000, 1.960),
        ] {
            assert!(
                (student_t(freedom) - quantile).abs() < 5.1e-4,
                "{freedom}: {}",
                student_t(freedom)
            );
        }
        // It falls without a step where the table ends.
        assert!((1..200).all(|freedom| student_t(freedom + 1) < student_t(freedom)));
        assert_eq!(student_t(0), f64::INFINITY);
    }

    #[test]
    fn order_agreement_by_hand() {
        let of = |rows: &[(f64, f64)]| {
            let found = OrderAgreement::of(rows);
            (found.agree, found.pairs)
        };
        assert_eq!(of(&[(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)]), (3, 3));
        // 1-2 and 1-3 agree, 2-3 does not.
        assert_eq!(of(&[(1.0, 10.0), (2.0, 30.0), (3.0, 20.0)]), (2, 3));
        // Equal in the reference: not counted; equal here: disagreement.
        assert_eq!(of(&[(1.0, 1.0), (1.0, 2.0), (2.0, 1.0)]), (0, 2));
        assert_eq!(of(&[(2.0, 1.0), (1.0, 1.0)]), (0, 1));
        assert_eq!(of(&[]), (0, 0));
    }
}
