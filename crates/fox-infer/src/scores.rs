//! From logits to log-probabilities.

use crate::Scored;

/// Lanes of the loops over a vocabulary, of which the compiler makes vectors.
const LANES: usize = 16;

/// Index of the first of the largest values; `None` when none is a number.
pub(crate) fn argmax(values: &[f32]) -> Option<usize> {
    let top = largest(values);
    values.iter().position(|&value| value == top)
}

/// The largest number, or minus infinity.
fn largest(values: &[f32]) -> f32 {
    let mut tops = [f32::NEG_INFINITY; LANES];
    for part in values.chunks(LANES) {
        for (top, &value) in tops.iter_mut().zip(part) {
            *top = if value > *top { value } else { *top };
        }
    }
    tops.into_iter().fold(f32::NEG_INFINITY, f32::max)
}

/// A token's log-probability and the `count` likeliest, from a row of logits.
pub(crate) fn score(logits: &[f32], id: i32, count: usize) -> Scored {
    let norm = log_sum_exp(logits);
    let logprob = |id: usize| (f64::from(logits[id]) - norm) as f32;
    let top = likeliest(logits, count).into_iter().map(|id| (id as i32, logprob(id))).collect();
    Scored { id, logprob: logprob(id as usize), top }
}

/// `e^((logit - top) * heat)` of every logit; 0 where that is nothing beside the likeliest, or no number.
pub(crate) fn weights(logits: &[f32], top: f32, heat: f32) -> Vec<f32> {
    let mut weights = vec![0.0; logits.len()];
    for (weights, logits) in weights.chunks_mut(LANES).zip(logits.chunks(LANES)) {
        for (weight, logit) in weights.iter_mut().zip(logits) {
            let x = (logit - top) * heat;
            // False also for what is no number.
            *weight = if x > -87.0 { exp_of_negative(x) } else { 0.0 };
        }
    }
    weights
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let top = largest(logits);
    // Lanes of f32 inside short runs, f64 between them: fast, and right to f32 rounding.
    let run = |run: &[f32]| {
        let mut sums = [0.0f32; LANES];
        for part in run.chunks(LANES) {
            for (sum, x) in sums.iter_mut().zip(part) {
                *sum += exp_of_negative(x - top);
            }
        }
        sums.iter().sum::<f32>()
    };
    let sum: f64 = logits.chunks(8 * LANES).map(|x| f64::from(run(x))).sum();
    f64::from(top) + sum.ln()
}

/// `e^x` for `x <= 0` to f32 rounding, without a call: 2^n times a polynomial for what is left.
fn exp_of_negative(x: f32) -> f32 {
    // The sum's low bits are the nearest integer; what is smaller than this is nothing beside e^0.
    const ROUND: f32 = 12_582_912.0;
    let y = (x * std::f32::consts::LOG2_E).max(-126.0);
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

/// Ids of the `count` largest logits, the lowest id first among equals.
fn likeliest(logits: &[f32], count: usize) -> Vec<usize> {
    let count = count.min(logits.len());
    if count == 0 {
        return Vec::new();
    }
    let descending = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    if count < ids.len() {
        ids.select_nth_unstable_by(count - 1, descending);
        ids.truncate(count);
    }
    ids.sort_unstable_by(descending);
    ids
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_sum_to_one_and_the_best_come_first() {
        let logits: Vec<f32> = (0..1000).map(|i| ((i * 37) % 101) as f32 * 0.1 - 300.0).collect();
        let scored = score(&logits, 5, 1000);
        let sum: f64 = scored.top.iter().map(|(_, l)| f64::from(*l).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-5, "{sum}");
        assert!(scored.top.windows(2).all(|w| (w[0].1, -w[0].0) > (w[1].1, -w[1].0)));
        assert_eq!(scored.top[0].0 as usize, argmax(&logits).unwrap());
        assert!(scored.top.contains(&(5, scored.logprob)));
        assert_eq!(score(&logits, 5, 3).top, scored.top[..3]);
        assert!(score(&logits, 5, 0).top.is_empty());
    }

    #[test]
    fn exponentials_are_right_to_rounding() {
        for i in 0..20_000 {
            let x = -0.004 * i as f32;
            let want = f64::from(x).exp();
            let error = (f64::from(exp_of_negative(x)) - want).abs();
            // The product with log2(e) is rounded, too.
            assert!(error <= 3e-7 * (1.0 + f64::from(-x)) * want, "{x}: {error:e}");
        }
        assert!(exp_of_negative(f32::NEG_INFINITY) < 1e-37);
    }

    #[test]
    fn the_best_is_the_first_of_equals_and_a_number() {
        let mut values = vec![f32::NAN; 40];
        assert_eq!(argmax(&values), None);
        (values[21], values[37]) = (2.0, 2.0);
        assert_eq!(argmax(&values), Some(21));
    }

    #[test]
    fn large_logits_do_not_overflow() {
        let scored = score(&[1e30, 0.0, f32::NEG_INFINITY], 0, 3);
        assert_eq!(scored.logprob, 0.0);
        assert_eq!(scored.top[2].1, f32::NEG_INFINITY);
    }
}
