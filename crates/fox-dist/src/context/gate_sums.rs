//! Gate sums and logit bounds that the ranks of a context exchange, so that all know which keys are sent.

use std::ops::Range;

use fox_tensor::{AttentionSpec, Error, LocalKeys, LogitBound, Result, Tensor, clamp_log_gate};

use super::SequenceShard;
use super::key_plan::{BLOCK, GateSums};

/// Bounds on the logits, for each head.
#[derive(Default)]
pub(super) struct Bounds {
    /// From the weights of norms, the same for all sequences `[H]`.
    of_weights: Vec<f64>,
    /// From the norms of queries and keys `[sequences, H]`.
    pub by_sequence: Vec<f64>,
}

impl Bounds {
    pub fn of(&self, sequence: usize, head: usize, heads: usize) -> f64 {
        let known = self.by_sequence.get(sequence * heads + head);
        known.or(self.of_weights.get(head)).copied().unwrap_or(0.0)
    }
}

/// What all ranks must know to decide who needs what: sums of the log gates, and a bound on the logits.
pub(super) fn share_gate_sums(
    part: &SequenceShard,
    own: &LocalKeys<'_>,
    gates: &[f32],
) -> Result<(GateSums, Bounds)> {
    let (split, context, spec) = (&part.0.split, &part.0.context, own.spec);
    let (heads, chunks) = (spec.heads, split.chunks(context.index()));
    let mut reported = part.record_failure(running_sums(part, heads, gates))?;
    let sums_len = |rank: usize| -> usize {
        split.chunks(rank).iter().map(|chunk| heads * (1 + GateSums::ends_in(chunk).len())).sum()
    };
    let squares = match own.bound {
        LogitBound::Norms => Some((
            LargestSquares::new(own.q, heads, spec.head_dim)?,
            LargestSquares::new(own.k.value(), spec.kv_heads, spec.head_dim)?,
        )),
        LogitBound::QkNorm { .. } => None,
        // Unused: a model has weights or norms.
        LogitBound::Given(_) => {
            let detail = "bounds that are given for each sequence are not shared by several ranks";
            return Err(Error::argument("attention", detail));
        }
    };
    if let Some((q, k)) = &squares {
        for chunk in chunks {
            let rows = chunk.row..chunk.row + chunk.len;
            reported.extend((0..heads).map(|h| q.of(h, rows.clone())));
            reported.extend((0..spec.kv_heads).map(|h| k.of(h, rows.clone())));
        }
    }
    let all = part.record_failure(context.gather(&reported))?;
    let (sums, norms): (Vec<&[f64]>, Vec<&[f64]>) =
        all.iter().enumerate().map(|(rank, reported)| reported.split_at(sums_len(rank))).unzip();
    let sums = GateSums::new(split, heads, &sums);
    let bounds = match own.bound {
        LogitBound::QkNorm { q, k } => {
            let of_weights = weight_bounds(spec, q, k)?;
            Bounds { of_weights, by_sequence: Vec::new() }
        }
        LogitBound::Norms | LogitBound::Given(_) => {
            let by_sequence = norm_bounds(part, spec, &norms);
            Bounds { of_weights: Vec::new(), by_sequence }
        }
    };
    Ok((sums, bounds))
}

/// GateSums of the log gates `[R, H]`, in the order of a single rank: each continues those of the rank before. Gives `c` at
/// the first position of each chunk and at the ends of its blocks, `[H]` each.
fn running_sums(part: &SequenceShard, heads: usize, gates: &[f32]) -> crate::Result<Vec<f64>> {
    let (split, context) = (&part.0.split, &part.0.context);
    let index = context.index();
    context.step(|ranks| {
        let received: Vec<f64> = if index > 0 { ranks.receive(index - 1)? } else { Vec::new() };
        let mut received = received.chunks_exact(heads);
        let (mut reported, mut ends): (Vec<f64>, Vec<f64>) = (Vec::new(), Vec::new());
        for chunk in split.chunks(index) {
            let mut sums = vec![0.0f64; heads];
            if chunk.position > 0 {
                sums.copy_from_slice(received.next().unwrap_or(&vec![0.0; heads]));
            }
            for t in 0..chunk.len {
                let row = &gates[(chunk.row + t) * heads..][..heads];
                for (sum, gate) in sums.iter_mut().zip(row) {
                    *sum += clamp_log_gate(f64::from(*gate));
                }
                if t == 0 {
                    reported.extend(&sums);
                }
                if (chunk.position + t) % BLOCK == BLOCK - 1 {
                    reported.extend(&sums);
                }
            }
            if split.chunk(index + 1, chunk.sequence).is_some() {
                ends.extend(&sums);
            }
        }
        if index + 1 < context.size() {
            ranks.send(index + 1, &ends);
        }
        Ok(reported)
    })
}

/// Squared norms of the heads of every row, `[R, heads]`.
struct LargestSquares {
    heads: usize,
    squares: Vec<f64>,
}

impl LargestSquares {
    fn new(x: &Tensor, heads: usize, head_dim: usize) -> Result<LargestSquares> {
        let square = |head: &[f32]| head.iter().map(|x| f64::from(x * x)).sum();
        Ok(LargestSquares {
            heads,
            squares: x.to_f32()?.chunks_exact(head_dim).map(square).collect(),
        })
    }

    fn of(&self, head: usize, rows: Range<usize>) -> f64 {
        rows.map(|row| self.squares[row * self.heads + head]).fold(0.0, f64::max)
    }
}

/// `max |q| max |k| scale` over every sequence, from the largest squares of every chunk.
fn norm_bounds(part: &SequenceShard, spec: &AttentionSpec, reported: &[&[f64]]) -> Vec<f64> {
    let (split, heads, kv_heads) = (&part.0.split, spec.heads, spec.kv_heads);
    let mut largest = vec![0.0f64; split.lengths().len() * (heads + kv_heads)];
    for (rank, reported) in reported.iter().enumerate() {
        for (chunk, squares) in
            split.chunks(rank).iter().zip(reported.chunks_exact(heads + kv_heads))
        {
            let all = &mut largest[chunk.sequence * (heads + kv_heads)..][..heads + kv_heads];
            all.iter_mut().zip(squares).for_each(|(a, b)| *a = a.max(*b));
        }
    }
    let bound = |squares: &[f64], h: usize| {
        let k = squares[heads + h / (heads / kv_heads)].sqrt();
        squares[h].sqrt() * k * f64::from(spec.scale.abs())
    };
    let of_sequence = |squares: &[f64]| (0..heads).map(|h| bound(squares, h)).collect::<Vec<f64>>();
    largest.chunks_exact(heads + kv_heads).flat_map(of_sequence).collect()
}

/// `max|w_q| max|w_k| d scale` for each head.
fn weight_bounds(spec: &AttentionSpec, q: &Tensor, k: &Tensor) -> Result<Vec<f64>> {
    let (d, group) = (spec.head_dim, spec.heads / spec.kv_heads);
    let (q, k) = (q.to_f32()?, k.to_f32()?);
    let largest = |weights: &[f32], head: usize| {
        let own = if weights.len() == d { weights } else { &weights[head * d..][..d] };
        own.iter().fold(0.0f64, |max, w| max.max(f64::from(w.abs())))
    };
    let scale = d as f64 * f64::from(spec.scale.abs());
    Ok((0..spec.heads).map(|h| largest(&q, h) * largest(&k, h / group) * scale).collect())
}

#[cfg(test)]
mod tests {
    use fox_tensor::Device;

    use super::*;

    #[test]
    fn largest_square_of_a_head_and_rows() {
        let rows = [[1.0, -2.0, 0.5, 0.0], [3.0, 0.0, 0.0, 1.0], [0.0, 1.0, 2.0, 2.0]];
        let x = Device::naive().from_f32(rows.as_flattened(), [3, 4]).unwrap();
        let squares = LargestSquares::new(&x, 2, 2).unwrap();
        assert_eq!([squares.of(0, 0..3), squares.of(1, 0..3)], [9.0, 8.0]);
        assert_eq!([squares.of(0, 0..1), squares.of(1, 0..2)], [5.0, 1.0]);
    }
}
