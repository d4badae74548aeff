//! Forget gates: decay over distance, half-lives, and the forget matrix F.
//!
//! `F[i, j] = exp(c_i - c_j) = f_{j+1} ... f_i` for `j <= i`: the factor that a head puts on what it read
//! at `j` when it writes at `i`, before anything is compared. In an encoder `F[j, i] = F[i, j]`.

use fox_plot::MatrixImage;
use fox_tensor::Mask;
use serde::{Deserialize, Deserializer, Serialize};

use crate::stats::quantile;

/// Heads that remember less than this many tokens by half are called local.
pub(crate) const LOCAL_BELOW: f64 = 32.0;
/// Heads that remember at least this many tokens by half are called global.
pub(crate) const GLOBAL_FROM: f64 = 512.0;

/// How far a head remembers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reach {
    /// A few dozen tokens.
    Local,
    /// In between.
    Medium,
    /// Hundreds of tokens and more.
    Global,
}

impl Reach {
    /// From a half-life in tokens.
    pub fn of(half_life: f64) -> Self {
        match half_life {
            h if h < LOCAL_BELOW => Reach::Local,
            h if h < GLOBAL_FROM => Reach::Medium,
            _ => Reach::Global,
        }
    }

    /// Name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Reach::Local => "local",
            Reach::Medium => "medium",
            Reach::Global => "global",
        }
    }
}

/// Half-lives of one head over a text, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct HalfLife {
    /// 10% quantile.
    #[serde(deserialize_with = "or_forever")]
    pub low: f64,
    /// Median.
    #[serde(deserialize_with = "or_forever")]
    pub median: f64,
    /// 90% quantile.
    #[serde(deserialize_with = "or_forever")]
    pub high: f64,
    /// Fraction of positions whose weight had not halved when the text ended; they count as lasting as
    /// long as the average gate would make them last, and at least to the end.
    pub unfinished: f64,
    /// Class of the median: local, medium or global.
    pub reach: Reach,
}

/// JSON has no infinity: a head that never forgets stands there with null.
fn or_forever<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::INFINITY))
}

/// `c_i`: sums of the log gates up to and including position i, in f64.
pub fn cumulative(log_gates: impl Iterator<Item = f32>) -> Vec<f64> {
    let mut sum = 0.0;
    log_gates
        .map(|g| {
            sum += f64::from(g);
            sum
        })
        .collect()
}

/// How many tokens it takes until what was read at a position weighs half, over all positions.
pub fn half_life(c: &[f64]) -> HalfLife {
    let n = c.len();
    let rate = match (c.first(), c.last()) {
        // The first gate has no effect, so it does not count for the average either.
        (Some(first), Some(last)) if n > 1 => (first - last) / (n - 1) as f64,
        _ => 0.0,
    };
    let average = if rate > 0.0 { std::f64::consts::LN_2 / rate } else { f64::INFINITY };
    let (mut end, mut unfinished) = (0, 0_usize);
    let mut lives = Vec::with_capacity(n);
    for start in 0..n {
        end = end.max(start);
        // `c` never rises, so the end moves forward only.
        while end < n && c[start] - c[end] < std::f64::consts::LN_2 {
            end += 1;
        }
        if end < n {
            lives.push((end - start) as f64);
        } else {
            unfinished += 1;
            lives.push(average.max((n - start) as f64));
        }
    }
    lives.sort_by(f64::total_cmp);
    let median = quantile(&lives, 0.5);
    HalfLife {
        low: quantile(&lives, 0.1),
        median,
        high: quantile(&lives, 0.9),
        unfinished: unfinished as f64 / n.max(1) as f64,
        reach: Reach::of(median),
    }
}

/// F, averaged over square blocks so that it has at most `pixels` rows; above the diagonal nothing where later keys are
/// masked.
///
/// For blocks below the diagonal the average factors: with a reference `r` between the two blocks,
/// `sum exp(c_i - c_j) = sum_i exp(c_i - r) * sum_j exp(r - c_j)`, and every exponent is at most 0. So the
/// cost does not grow with the square of the length.
pub fn forget_matrix(c: &[f64], mask: Mask, pixels: usize) -> MatrixImage {
    let n = c.len();
    let block = n.div_ceil(pixels.max(1)).max(1);
    let rows = n.div_ceil(block);
    let range = |b: usize| b * block..((b + 1) * block).min(n);
    let mut values = vec![f64::NAN; rows * rows];
    for i in 0..rows {
        let queries = range(i);
        let reference = c[queries.start];
        let above: f64 = queries.clone().map(|t| (c[t] - reference).exp()).sum();
        for j in 0..i {
            let keys = range(j);
            let below: f64 = keys.clone().map(|t| (reference - c[t]).exp()).sum();
            values[i * rows + j] = above * below / (queries.len() * keys.len()) as f64;
            if mask == Mask::Bidirectional {
                values[j * rows + i] = values[i * rows + j];
            }
        }
        let mut sum = 0.0;
        for q in queries.clone() {
            sum += (queries.start..=q).map(|k| (c[q] - c[k]).exp()).sum::<f64>();
        }
        let n = queries.len() as f64;
        values[i * rows + i] = match mask {
            Mask::Causal => sum / (n * (n + 1.0) / 2.0),
            // Either side of the diagonal, which is 1.
            Mask::Bidirectional => (2.0 * sum - n) / (n * n),
        };
    }
    MatrixImage { rows, cols: rows, values }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_life_of_a_constant_gate() {
        // f = 1/2: after one token half is left. f = 2^(-1/8): after eight.
        for (steps, want) in [(1.0, 1.0), (8.0, 8.0)] {
            let gate = (-std::f64::consts::LN_2 / steps) as f32 * 1.0001;
            let c = cumulative(std::iter::repeat_n(gate, 400));
            let life = half_life(&c);
            assert_eq!((life.low, life.median, life.reach), (want, want, Reach::Local));
            assert!(life.unfinished <= want / 400.0);
        }
        let never = half_life(&cumulative(std::iter::repeat_n(0.0, 50)));
        assert_eq!((never.median, never.unfinished), (f64::INFINITY, 1.0));
        assert_eq!(never.reach, Reach::Global);
        let text = serde_json::to_string(&never).unwrap();
        assert_eq!(serde_json::from_str::<HalfLife>(&text).unwrap(), never);
        // An eighth of a half-life passes in this text; the average says how long it would take.
        let slow =
            half_life(&cumulative(std::iter::repeat_n(-std::f32::consts::LN_2 / 800.0, 100)));
        assert!((slow.median - 800.0).abs() < 1e-3 && slow.reach == Reach::Global, "{slow:?}");
    }

    #[test]
    fn forget_matrix_matches_definition() {
        let gates: Vec<f32> = (0..37).map(|t| -0.01 * (t * t % 11) as f32).collect();
        let c = cumulative(gates.iter().copied());
        let exact = forget_matrix(&c, Mask::Causal, 100);
        assert_eq!(exact.rows, 37);
        for i in 0..37 {
            for j in 0..37 {
                let got = exact.values[i * 37 + j];
                if j > i {
                    assert!(got.is_nan());
                } else {
                    let want: f32 = gates[j + 1..=i].iter().sum();
                    assert!((got - f64::from(want).exp()).abs() < 1e-6);
                }
            }
        }
        // Ten blocks of four, the last of one.
        let small = forget_matrix(&c, Mask::Causal, 10);
        assert_eq!(small.rows, 10);
        let entry = |i: usize, j: usize| exact.values[i * 37 + j];
        let want: f64 =
            (8..12).flat_map(|i| (4..8).map(move |j| (i, j))).map(|(i, j)| entry(i, j)).sum();
        assert!((small.values[2 * 10 + 1] - want / 16.0).abs() < 1e-12);
        let want: f64 =
            (4..8).flat_map(|i| (4..=i).map(move |j| (i, j))).map(|(i, j)| entry(i, j)).sum();
        assert!((small.values[10 + 1] - want / 10.0).abs() < 1e-12);
        assert!((small.values[9 * 10 + 9] - 1.0).abs() < 1e-12);
        // An encoder's is symmetric; its blocks on the diagonal average both sides.
        let both = forget_matrix(&c, Mask::Bidirectional, 10);
        assert_eq!((both.values[12], both.values[21]), (small.values[21], small.values[21]));
        let lower = |i: usize, j: usize| entry(i.max(j), i.min(j));
        let want: f64 =
            (4..8).flat_map(|i| (4..8).map(move |j| (i, j))).map(|(i, j)| lower(i, j)).sum();
        assert!((both.values[10 + 1] - want / 16.0).abs() < 1e-12);
    }
}
