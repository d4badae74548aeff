//! Attention maps of a head, averaged into an image, and the entropy of their rows.

use fox_plot::MatrixImage;
use fox_tensor::{AttentionWeights, Mask};

/// One head of one layer, on the host.
#[derive(Clone, Debug)]
pub(super) struct HeadData {
    /// Queries `[T, d]`.
    pub q: Vec<f32>,
    /// Keys `[T, d]`.
    pub k: Vec<f32>,
    /// Sums of the log gates `[T]`; zeros without gates.
    pub c: Vec<f64>,
    /// Width of the head.
    pub dim: usize,
    /// Factor on the products.
    pub scale: f32,
    /// Sliding window, if there is one.
    pub window: Option<usize>,
    /// Whether queries see later keys.
    pub mask: Mask,
    /// How scores become weights.
    pub weights: AttentionWeights,
}

/// Measured attention of a head.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSample {
    /// Attention mass: block of queries (rows) by block of keys, each row of pixels adding up to 1,
    /// or less where stick-breaking leaves a remainder.
    pub map: MatrixImage,
    /// Mean entropy of the sampled rows, in nats.
    pub entropy: f64,
    /// Mean entropy over the logarithm of the number of keys a row may see: 1 is even attention.
    pub evenness: f64,
    /// Mean distance in tokens between a query and what it attends to.
    pub distance: f64,
    /// Sampled rows.
    pub rows: usize,
}

/// Samples up to `per_block` queries of each of at most `pixels` blocks of queries, of the last `last`
/// tokens.
///
/// Every sampled row is exact, over all its keys; its weights are summed over blocks of keys. The map leaves
/// out what goes to earlier keys than it shows.
pub(super) fn sample(
    head: &HeadData,
    last: usize,
    pixels: usize,
    per_block: usize,
) -> AttentionSample {
    let n = head.c.len();
    let origin = n.saturating_sub(last);
    let block = (n - origin).div_ceil(pixels.max(1)).max(1);
    let side = (n - origin).div_ceil(block);
    let mut values = vec![f64::NAN; side * side];
    let (mut entropy, mut evenness, mut distance, mut rows) = (0.0, 0.0, 0.0, 0_usize);
    let mut weights = Vec::new();
    for b in 0..side {
        let (start, end) = (origin + b * block, (origin + (b + 1) * block).min(n));
        let seen = if head.mask == Mask::Bidirectional { side } else { b + 1 };
        let line = &mut values[b * side..b * side + seen];
        line.fill(0.0);
        let every = (end - start).div_ceil(per_block.max(1));
        // From the back: the last query of a block sees all of its keys.
        let sampled: Vec<usize> = (start..end).rev().step_by(every).collect();
        for &i in &sampled {
            let first = row_weights(head, i, &mut weights);
            for (offset, w) in weights.iter().enumerate() {
                let (j, w) = (first + offset, f64::from(*w));
                if let Some(shown) = j.checked_sub(origin) {
                    line[shown / block] += w / sampled.len() as f64;
                }
                distance += w * i.abs_diff(j) as f64;
            }
            let bits: f64 = weights.iter().map(|w| f64::from(*w)).map(plogp).sum();
            entropy += bits;
            if weights.len() > 1 {
                evenness += bits / (weights.len() as f64).ln();
            }
        }
        rows += sampled.len();
    }
    let total = rows.max(1) as f64;
    AttentionSample {
        map: MatrixImage { rows: side, cols: side, values },
        entropy: entropy / total,
        evenness: evenness / total,
        distance: distance / total,
        rows,
    }
}

fn plogp(p: f64) -> f64 {
    if p > 0.0 { -p * p.ln() } else { 0.0 }
}

/// The attention weights of query `i`, over all keys up to it, or all keys of an encoder.
pub(super) fn row(head: &HeadData, i: usize) -> Vec<f32> {
    let mut weights = Vec::new();
    let mut row = vec![0.0; row_weights(head, i, &mut weights)];
    row.append(&mut weights);
    row.resize(row.len().max(i + 1), 0.0);
    row
}

/// The attention weights of query `i`, over the keys from the returned one on.
fn row_weights(head: &HeadData, i: usize, weights: &mut Vec<f32>) -> usize {
    let d = head.dim;
    let q = &head.q[i * d..(i + 1) * d];
    let first = head.window.map_or(0, |w| (i + 1).saturating_sub(w));
    let score = |j: usize| {
        let k = &head.k[j * d..(j + 1) * d];
        let product: f32 = q.iter().zip(k).map(|(a, b)| a * b).sum();
        product * head.scale
    };
    weights.clear();
    let end = match head.mask {
        Mask::Causal => i + 1,
        Mask::Bidirectional => {
            head.window.map_or(head.c.len(), |w| i.saturating_add(w).min(head.c.len()))
        }
    };
    match head.weights {
        AttentionWeights::Softmax => {
            let decay = |j: usize| -(head.c[i] - head.c[j]).abs() as f32;
            weights.extend((first..end).map(|j| score(j) + decay(j)));
            softmax(weights);
        }
        AttentionWeights::StickBreaking => {
            weights.extend((first..i).map(score));
            break_stick(weights);
            for (w, j) in weights.iter_mut().zip(first..) {
                *w *= (head.c[i] - head.c[j]).exp() as f32;
            }
        }
    }
    first
}

/// Stick-breaking weights: each key, newest first, takes a fraction of the remainder.
fn break_stick(weights: &mut [f32]) {
    let mut left = 1.0f64;
    for w in weights.iter_mut().rev() {
        let share = 1.0 / (1.0 + (-f64::from(*w)).exp());
        *w = (left * share) as f32;
        left *= 1.0 - share;
    }
}

fn softmax(weights: &mut [f32]) {
    let largest = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for w in weights.iter_mut() {
        *w = (*w - largest).exp();
        sum += f64::from(*w);
    }
    let factor = (1.0 / sum) as f32;
    weights.iter_mut().for_each(|w| *w *= factor);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(n: usize, gate: f64) -> HeadData {
        HeadData {
            q: vec![0.0; n * 2],
            k: vec![0.0; n * 2],
            c: (0..n).map(|t| gate * t as f64).collect(),
            dim: 2,
            scale: 1.0,
            window: None,
            mask: Mask::Causal,
            weights: AttentionWeights::Softmax,
        }
    }

    #[test]
    fn stick_breaking_favors_newest_keys() {
        let stick = HeadData { weights: AttentionWeights::StickBreaking, ..head(5, -1.0) };
        let seen = sample(&stick, usize::MAX, 5, 1);
        for i in 0..5 {
            for j in 0..i {
                // Scores of 0: every key takes half, and the gates take their part.
                let want = 0.5f64.powi((i - j) as i32) * (-((i - j) as f64)).exp();
                assert!((seen.map.values[i * 5 + j] - want).abs() < 1e-6);
            }
            assert_eq!(seen.map.values[i * 5 + i], 0.0);
        }
    }

    #[test]
    fn close_up_matches_full_map() {
        let head = head(40, -0.3);
        let (whole, corner) = (sample(&head, 40, 40, 1).map, sample(&head, 6, 40, 1).map);
        assert_eq!((corner.rows, corner.cols), (6, 6));
        for i in 0..6 {
            for j in 0..=i {
                assert_eq!(corner.values[i * 6 + j], whole.values[(34 + i) * 40 + 34 + j]);
            }
            assert!(corner.values[i * 6 + i + 1..(i + 1) * 6].iter().all(|v| v.is_nan()));
        }
        // Half as many pixels: rows are averaged and columns added.
        let coarse = sample(&head, 6, 3, 2).map;
        let fine = |i: usize, j: usize| corner.values[i * 6 + j];
        let expected = (fine(4, 2) + fine(4, 3) + fine(5, 2) + fine(5, 3)) / 2.0;
        assert!((coarse.values[2 * 3 + 1] - expected).abs() < 1e-12);
    }

    #[test]
    fn equal_logits_give_even_attention() {
        let seen = sample(&head(8, 0.0), usize::MAX, 100, 1);
        assert_eq!((seen.rows, seen.map.rows), (8, 8));
        for i in 0..8 {
            for j in 0..=i {
                let got = seen.map.values[i * 8 + j];
                assert!((got - 1.0 / (i + 1) as f64).abs() < 1e-6);
            }
        }
        let want: f64 = (1..=8).map(|n| f64::from(n).ln()).sum::<f64>() / 8.0;
        assert!((seen.entropy - want).abs() < 1e-5, "{}", seen.entropy);
        // All rows but the first, which has only one key, are perfectly even.
        assert!((seen.evenness - 7.0 / 8.0).abs() < 1e-5);
        let want: f64 = (0..8).map(|i| f64::from(i) / 2.0).sum::<f64>() / 8.0;
        assert!((seen.distance - want).abs() < 1e-5, "{}", seen.distance);
    }

    #[test]
    fn encoders_attend_to_both_sides() {
        let both = HeadData { mask: Mask::Bidirectional, ..head(9, -0.7) };
        let seen = sample(&both, usize::MAX, 9, 1);
        let weight = |i: usize, j: usize| (-0.7 * i.abs_diff(j) as f64).exp();
        for i in 0..9 {
            let total: f64 = (0..9).map(|j| weight(i, j)).sum();
            for j in 0..9 {
                let got = seen.map.values[i * 9 + j];
                assert!((got - weight(i, j) / total).abs() < 1e-6, "{i} {j}: {got}");
            }
        }
        let near = HeadData { window: Some(2), ..both };
        let row = sample(&near, usize::MAX, 9, 1).map.values[4 * 9..5 * 9].to_vec();
        assert!(row.iter().enumerate().all(|(j, w)| (*w > 0.0) == (3..=5).contains(&j)), "{row:?}");
    }

    #[test]
    fn gates_pull_attention_close_and_blocks_add_up() {
        let seen = sample(&head(64, -5.0), usize::MAX, 8, 8);
        assert_eq!((seen.map.rows, seen.rows), (8, 64));
        for i in 0..8 {
            let row: f64 = seen.map.values[i * 8..i * 8 + i + 1].iter().sum();
            assert!((row - 1.0).abs() < 1e-5);
        }
        assert!(seen.distance < 0.01 && seen.entropy < 0.05, "{seen:?}");
        let window = HeadData { window: Some(1), ..head(64, 0.0) };
        assert_eq!(sample(&window, usize::MAX, 8, 8).distance, 0.0);
    }

    #[test]
    fn query_attends_to_matching_key() {
        let mut data = head(4, 0.0);
        data.k[2..4].copy_from_slice(&[9.0, 0.0]);
        data.q[6..8].copy_from_slice(&[9.0, 0.0]);
        let seen = sample(&data, usize::MAX, 4, 1);
        assert!(seen.map.values[3 * 4 + 1] > 0.999);
        assert_eq!(row(&data, 3)[1], seen.map.values[3 * 4 + 1] as f32);
        let window = HeadData { window: Some(2), ..data };
        assert_eq!(row(&window, 3)[..2], [0.0, 0.0], "what a window leaves out");
    }
}
