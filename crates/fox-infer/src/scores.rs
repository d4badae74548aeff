//! From a row of logits to log-probabilities and weights.
//!
//! With a large vocabulary, a few passes over the logits take as long as the step of a small model. The loops work on
//! arrays of [`LANES`] numbers, which the compiler vectorizes.

use crate::ScoredToken;

/// Width of the vectorized loops.
pub(crate) const LANES: usize = 16;
/// Numbers that are summed in f32; block sums are added in f64.
pub(crate) const BLOCK: usize = 256;
/// Numbers per group; the top-k search skips groups by their maximum.
const GROUP: usize = 64;

/// The largest logit; `None` when one is NaN (the model is broken) or when all are minus infinity.
pub(crate) fn largest(logits: &[f32]) -> Option<f32> {
    let mut tops = [f32::NEG_INFINITY; LANES];
    let mut strange = [false; LANES];
    let (chunks, rest) = logits.as_chunks::<LANES>();
    for lanes in chunks {
        for lane in 0..LANES {
            tops[lane] = if lanes[lane] > tops[lane] { lanes[lane] } else { tops[lane] };
            strange[lane] |= lanes[lane].is_nan();
        }
    }
    let has_nan = strange.contains(&true) || rest.iter().any(|logit| logit.is_nan());
    let top = tops.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max);
    (!has_nan && top > f32::NEG_INFINITY).then_some(top)
}

/// A token's log-probability and the `count` likeliest, from a row of logits.
pub(crate) fn score(logits: &[f32], id: i32, count: usize) -> ScoredToken {
    let norm = log_sum_exp(logits);
    let logprob = |id: usize| (f64::from(logits[id]) - norm) as f32;
    let top = likeliest(logits, count).into_iter().map(|id| (id as i32, logprob(id))).collect();
    ScoredToken { id, logprob: logprob(id as usize), top }
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let Some(top) = largest(logits) else { return f64::NAN };
    let sum: f64 = logits.chunks(BLOCK).map(|x| f64::from(sum_of(x, |x| exp(x - top)))).sum();
    f64::from(top) + sum.ln()
}

/// The sum of a function of at most [`BLOCK`] numbers.
pub(crate) fn sum_of(values: &[f32], of: impl Fn(f32) -> f32) -> f32 {
    let mut sums = [0.0; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for lanes in chunks {
        for lane in 0..LANES {
            sums[lane] += of(lanes[lane]);
        }
    }
    sums.iter().sum::<f32>() + rest.iter().map(|&value| of(value)).sum::<f32>()
}

/// `e^((logit - top) * inverse_temperature)` of every logit; 0 where that is nothing beside the likeliest, or no number.
pub(crate) fn weights(logits: &[f32], top: f32, inverse_temperature: f32, weights: &mut Vec<f32>) {
    let weight = |logit: f32| {
        let x = (logit - top) * inverse_temperature;
        // Computed unconditionally, without a branch. The comparison is false for NaN.
        let weight = exp(x);
        if x > -87.0 { weight } else { 0.0 }
    };
    weights.resize(logits.len(), 0.0);
    let (chunks, rest) = logits.as_chunks::<LANES>();
    let (into, into_rest) = weights.as_chunks_mut::<LANES>();
    for (into, lanes) in into.iter_mut().zip(chunks) {
        for lane in 0..LANES {
            into[lane] = weight(lanes[lane]);
        }
    }
    for (into, &logit) in into_rest.iter_mut().zip(rest) {
        *into = weight(logit);
    }
}

/// `e^x` for `x <= 0` to f32 rounding: 2^n times a polynomial of the fraction.
#[inline(always)]
fn exp(x: f32) -> f32 {
    // Adding this constant leaves the nearest integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let y = x * std::f32::consts::LOG2_E;
    let y = if y > -126.0 { y } else { -126.0 };
    let shifted = y + ROUND;
    let (n, f) = (shifted.to_bits().wrapping_sub(ROUND.to_bits()), y - (shifted - ROUND));
    const TERMS: [f32; 7] = [
        1.540_353_2e-4,
        1.333_355_8e-3,
        9.618_129e-3,
        5.550_410_7e-2,
        2.402_265e-1,
        std::f32::consts::LN_2,
        1.0,
    ];
    let fraction = TERMS[1..].iter().fold(TERMS[0], |sum, term| sum * f + term);
    fraction * f32::from_bits(n.wrapping_add(127) << 23)
}

/// Ids of the `count` largest values, in descending order, the lowest id first among equals.
pub(crate) fn likeliest(values: &[f32], count: usize) -> Vec<usize> {
    let descending = |a: &usize, b: &usize| values[*b].total_cmp(&values[*a]).then(a.cmp(b));
    let mut ids = candidates(values, count);
    if count < ids.len() && count > 0 {
        ids.select_nth_unstable_by(count - 1, descending);
    }
    ids.truncate(count);
    ids.sort_unstable_by(descending);
    ids
}

/// A superset of the ids of the `count` largest values: groups whose maximum is below the `count`-th largest maximum are
/// skipped.
fn candidates(values: &[f32], count: usize) -> Vec<usize> {
    // Lane `l` of a block of lanes is a group.
    let tops = values.chunks(GROUP * LANES).flat_map(|block| {
        let mut tops = [f32::NEG_INFINITY; LANES];
        for lanes in block.chunks(LANES) {
            for (top, &value) in tops.iter_mut().zip(lanes) {
                *top = if value > *top { value } else { *top };
            }
        }
        tops
    });
    let tops: Vec<f32> = tops.collect();
    if count == 0 || count >= tops.len() {
        return (0..values.len()).collect();
    }
    let mut order = tops.clone();
    let (_, &mut least, _) = order.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a));
    let groups = tops.iter().enumerate().filter(|(_, top)| **top >= least);
    let ids = groups.flat_map(|(group, _)| {
        let first = group / LANES * GROUP * LANES;
        let end = values.len().min(first + GROUP * LANES);
        (first + group % LANES..end).step_by(LANES)
    });
    ids.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use fox_base::random::SplitMix64;

    #[test]
    fn probabilities_sum_to_one_in_descending_order() {
        let logits: Vec<f32> = (0..1000).map(|i| ((i * 37) % 101) as f32 * 0.1 - 300.0).collect();
        let scored = score(&logits, 5, 1000);
        let sum: f64 = scored.top.iter().map(|(_, l)| f64::from(*l).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-5, "{sum}");
        assert!(scored.top.windows(2).all(|w| (w[0].1, -w[0].0) > (w[1].1, -w[1].0)));
        assert!(scored.top.contains(&(5, scored.logprob)));
        assert_eq!(score(&logits, 5, 3).top, scored.top[..3]);
        assert!(score(&logits, 5, 0).top.is_empty());
    }

    #[test]
    fn likeliest_equals_sorting() {
        let mut rng = SplitMix64::new(3);
        for len in [1, 5, 16, 255, 1024, 1025, 5000] {
            // Few distinct values give many ties.
            let values: Vec<f32> = (0..len).map(|_| rng.between(0, len / 3) as f32 - 9.0).collect();
            let mut sorted: Vec<usize> = (0..len).collect();
            sorted.sort_by(|&a, &b| values[b].total_cmp(&values[a]).then(a.cmp(&b)));
            for count in [0, 1, 2, 7, 20, 79, 80, 100, len, len + 1] {
                assert_eq!(likeliest(&values, count), sorted[..count.min(len)], "{count} of {len}");
            }
        }
    }

    #[test]
    fn exp_is_accurate_to_rounding() {
        for i in 0..20_000 {
            let x = -0.004 * i as f32;
            let want = f64::from(x).exp();
            let error = (f64::from(exp(x)) - want).abs();
            // The product with log2(e) is rounded as well.
            assert!(error <= 3e-7 * (1.0 + f64::from(-x)) * want, "{x}: {error:e}");
        }
        assert!(exp(f32::NEG_INFINITY) < 1e-37);
    }

    #[test]
    fn nan_or_all_infinite_rows_have_no_largest() {
        for len in [1, 15, 16, 40, 300] {
            let mut values: Vec<f32> = (0..len).map(|i| -(i as f32)).collect();
            values[len / 2] = 2.0;
            assert_eq!(largest(&values), Some(2.0));
            for at in [0, len / 2, len - 1] {
                let mut broken = values.clone();
                broken[at] = f32::NAN;
                assert_eq!(largest(&broken), None, "{at} of {len}");
                assert!(score(&broken, 0, 1).logprob.is_nan());
            }
            assert_eq!(largest(&vec![f32::NEG_INFINITY; len]), None);
        }
    }

    #[test]
    fn large_logits_do_not_overflow() {
        let scored = score(&[1e30, 0.0, f32::NEG_INFINITY], 0, 3);
        assert_eq!(scored.logprob, 0.0);
        assert_eq!(scored.top[2].1, f32::NEG_INFINITY);
    }
}
