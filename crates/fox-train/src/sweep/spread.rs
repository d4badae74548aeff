//! Several runs that differ only in their seed: a mean with its interval.

use serde::Serialize;

/// The 97.5% quantiles of Student's t distribution with 1, 2, ... 30 degrees of freedom.
const T: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
];

/// The mean of some values, and how far the true one may be from it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// How many values.
    pub count: usize,
    /// Their mean.
    pub mean: f64,
    /// Half the width of the 95% interval (Student's t); absent for a single value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub half_width: Option<f64>,
}

impl Spread {
    /// `None` without values.
    pub fn of(values: &[f64]) -> Option<Spread> {
        let count = values.len();
        let freedom = count.checked_sub(1)?;
        let mean = values.iter().sum::<f64>() / count as f64;
        let half_width = (freedom > 0).then(|| {
            let squares: f64 = values.iter().map(|x| (x - mean).powi(2)).sum();
            let error = (squares / freedom as f64 / count as f64).sqrt();
            t_quantile(freedom) * error
        });
        Some(Spread { count, mean, half_width })
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

/// The 97.5% quantile for this many degrees of freedom; beyond the table within 0.001.
fn t_quantile(freedom: usize) -> f64 {
    T.get(freedom - 1).copied().unwrap_or(1.960 + 2.42 / freedom as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: mean 2, variance (1 + 0 + 1) / 2 = 1, error sqrt(1/3), times 4.303.
    #[test]
    fn three_values_by_hand() {
        let spread = Spread::of(&[1.0, 2.0, 3.0]).unwrap();
        assert_eq!((spread.count, spread.mean), (3, 2.0));
        assert!((spread.half_width.unwrap() - 2.484_338).abs() < 1e-5, "{spread:?}");
        assert_eq!(spread.text(2), "2.00 ± 2.48");
        let (low, high) = spread.ends();
        assert!((low + 0.484_338).abs() < 1e-5 && (high - 4.484_338).abs() < 1e-5);
    }

    /// By hand: mean 1.5, variance 0.5, error sqrt(0.25) = 0.5, times 12.706.
    #[test]
    fn two_values_by_hand() {
        assert_eq!(Spread::of(&[1.0, 2.0]).unwrap().half_width, Some(6.353));
    }

    #[test]
    fn few_values() {
        assert_eq!(Spread::of(&[]), None);
        let one = Spread::of(&[3.0]).unwrap();
        assert_eq!((one.half_width, one.ends(), one.text(1)), (None, (3.0, 3.0), "3.0".into()));
    }

    #[test]
    fn quantiles_beyond_the_table() {
        for (freedom, quantile) in
            [(1, 12.706), (30, 2.042), (40, 2.021), (60, 2.000), (120, 1.980)]
        {
            assert!((t_quantile(freedom) - quantile).abs() < 1e-3, "{freedom}");
        }
    }
}
