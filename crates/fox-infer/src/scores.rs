//! From logits to log-probabilities.

use crate::Scored;

/// Index of the first of the largest values; `None` when none is a number.
pub(crate) fn argmax(values: &[f32]) -> Option<usize> {
    let mut best: Option<usize> = None;
    for (i, value) in values.iter().enumerate() {
        if !value.is_nan() && best.is_none_or(|b| *value > values[b]) {
            best = Some(i);
        }
    }
    best
}

/// A token's log-probability and the `count` likeliest, from a row of logits.
pub(crate) fn score(logits: &[f32], id: i32, count: usize) -> Scored {
    let norm = log_sum_exp(logits);
    let logprob = |id: usize| (f64::from(logits[id]) - norm) as f32;
    let top = likeliest(logits, count).into_iter().map(|id| (id as i32, logprob(id))).collect();
    Scored { id, logprob: logprob(id as usize), top }
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    // Lanes of f32 inside short runs, f64 between them: fast, and right to f32 rounding.
    let run = |run: &[f32]| run.iter().map(|x| (x - top).exp()).sum::<f32>();
    let sum: f64 = logits.chunks(64).map(|x| f64::from(run(x))).sum();
    f64::from(top) + sum.ln()
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
    fn large_logits_do_not_overflow() {
        let scored = score(&[1e30, 0.0, f32::NEG_INFINITY], 0, 3);
        assert_eq!(scored.logprob, 0.0);
        assert_eq!(scored.top[2].1, f32::NEG_INFINITY);
    }
}
