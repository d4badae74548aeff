//! What the ranks of a context tell each other, so that all know which keys travel.

use std::ops::Range;

use fox_tensor::{AttentionSpec, Error, LocalKeys, LogitBound, Result, Tensor, clamp_log_gate};

use super::Part;
use super::plan::{BLOCK, Sums};

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
pub(super) fn agree(part: &Part, own: &LocalKeys<'_>, gates: &[f32]) -> Result<(Sums, Bounds)> {
    let (split, context, spec) = (&part.0.split, &part.0.context, own.spec);
    let (heads, pieces) = (spec.heads, split.pieces(context.index()));
    let mut told = part.keep_failure(running_sums(part, heads, gates))?;
    let sums_len = |rank: usize| -> usize {
        split.pieces(rank).iter().map(|piece| heads * (1 + Sums::ends_in(piece).len())).sum()
    };
    let squares = match own.bound {
        LogitBound::Norms => Some((
            LargestSquares::new(own.q, heads, spec.head_dim)?,
            LargestSquares::new(own.k.value(), spec.kv_heads, spec.head_dim)?,
        )),
        LogitBound::QkNorm { .. } => None,
        // Nobody asks for it: a model has weights or norms.
        LogitBound::Given(_) => {
            let detail = "bounds that are given for each sequence are not shared by several ranks";
            return Err(Error::argument("attention", detail));
        }
    };
    if let Some((q, k)) = &squares {
        for piece in pieces {
            let rows = piece.row..piece.row + piece.len;
            told.extend((0..heads).map(|h| q.of(h, rows.clone())));
            told.extend((0..spec.kv_heads).map(|h| k.of(h, rows.clone())));
        }
    }
    let all = part.keep_failure(context.gather(&told))?;
    let (sums, norms): (Vec<&[f64]>, Vec<&[f64]>) =
        all.iter().enumerate().map(|(rank, told)| told.split_at(sums_len(rank))).unzip();
    let sums = Sums::new(split, heads, &sums);
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

/// Sums of the log gates `[R, H]`, in the order of a single rank: each continues those of the rank before. Gives `c` at
/// the first position of each piece and at the ends of its blocks, `[H]` each.
fn running_sums(part: &Part, heads: usize, gates: &[f32]) -> crate::Result<Vec<f64>> {
    let (split, context) = (&part.0.split, &part.0.context);
    let index = context.index();
    context.step(|ranks| {
        let came: Vec<f64> = if index > 0 { ranks.receive(index - 1)? } else { Vec::new() };
        let mut came = came.chunks_exact(heads);
        let (mut told, mut ends): (Vec<f64>, Vec<f64>) = (Vec::new(), Vec::new());
        for piece in split.pieces(index) {
            let mut sums = vec![0.0f64; heads];
            if piece.position > 0 {
                sums.copy_from_slice(came.next().unwrap_or(&vec![0.0; heads]));
            }
            for t in 0..piece.len {
                let row = &gates[(piece.row + t) * heads..][..heads];
                for (sum, gate) in sums.iter_mut().zip(row) {
                    *sum += clamp_log_gate(f64::from(*gate));
                }
                if t == 0 {
                    told.extend(&sums);
                }
                if (piece.position + t) % BLOCK == BLOCK - 1 {
                    told.extend(&sums);
                }
            }
            if split.piece(index + 1, piece.sequence).is_some() {
                ends.extend(&sums);
            }
        }
        if index + 1 < context.size() {
            ranks.send(index + 1, &ends);
        }
        Ok(told)
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

/// `max |q| max |k| scale` over every sequence, from the largest squares of every piece.
fn norm_bounds(part: &Part, spec: &AttentionSpec, told: &[&[f64]]) -> Vec<f64> {
    let (split, heads, kv_heads) = (&part.0.split, spec.heads, spec.kv_heads);
    let mut largest = vec![0.0f64; split.lengths().len() * (heads + kv_heads)];
    for (rank, told) in told.iter().enumerate() {
        for (piece, squares) in split.pieces(rank).iter().zip(told.chunks_exact(heads + kv_heads)) {
            let all = &mut largest[piece.sequence * (heads + kv_heads)..][..heads + kv_heads];
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
