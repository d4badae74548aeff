//! Candidates for the launches of decode steps: to be made the default or deleted by the next measurement.
//!
//! The environment variable `FOX_DECODE_CANDIDATES` lists some of them, e.g. `attend,prefetch`. With the word `alternate`
//! in the list, every other step runs as if the list were empty, and `fox bench throughput --profile` prints the medians
//! of both kinds of steps: one process, one start of the machine. Predictions are in `NOTES.md`.

use fox_tensor::INT8_BLOCK;

use super::kernels::{FEW_ROWS, Int8Weights};
use super::params::{DecodeMatrix, DecodeRange};
use super::weights::DeviceWeights;
use crate::{Error, Generation, Result};

/// The environment variable.
const VARIABLE: &str = "FOX_DECODE_CANDIDATES";

/// Candidates that are switched on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Candidates {
    /// Attention from raw projections to the output norm in one launch, on Hopper for more than [`FEW_ROWS`] rows and as
    /// many key heads as query heads. Same bits.
    pub(super) attend: bool,
    /// Thread blocks of the launches between matmuls prefetch weights of coming ones into L2, for at most
    /// [`PREFETCH_ROWS`] rows on Hopper and later. Same bits.
    pub(super) prefetch: bool,
    /// Matmuls of at most [`FEW_ROWS`] rows multiply int8 weights as exact integers. Other bits than those of more rows and
    /// of plain steps; if this becomes the default, the matmuls of more rows must follow.
    pub(super) exact: bool,
}

/// Largest head dim of attention in one launch: wider heads spill registers.
const ATTEND_WIDTH: usize = 128;
/// Most rows of steps that prefetch: with more, the matmuls are not bound by the weights.
const PREFETCH_ROWS: usize = 8;
/// Thread blocks that prefetch, as a multiple of those of the launch: 16 or more of 256 threads.
pub(super) const PREFETCH_LAYERS: usize = 2;
/// Weights that a launch prefetches: a quarter of the L2 cache of an H200.
const PREFETCH_BYTES: usize = 12 << 20;

impl Candidates {
    /// How matmuls of at most [`FEW_ROWS`] rows read int8 weights.
    pub(super) fn int8_weights(self, weights: &DeviceWeights) -> Int8Weights {
        let widths = [weights.width, weights.heads_width, weights.inner];
        match weights.most_packed > 0 {
            false => Int8Weights::Absent,
            true if self.exact && widths.iter().all(|n| n.is_multiple_of(INT8_BLOCK)) => {
                Int8Weights::Exact
            }
            true => Int8Weights::Rounded,
        }
    }

    /// Those that apply to steps of `rows` rows of a model.
    pub(super) fn at(self, rows: usize, weights: &DeviceWeights, generation: Generation) -> Self {
        let shape = &weights.shape;
        Candidates {
            attend: self.attend
                && generation.has_wgmma()
                && rows > FEW_ROWS
                && shape.heads == shape.kv_heads
                && shape.head_dim <= ATTEND_WIDTH,
            exact: self.exact,
            prefetch: self.prefetch && rows <= PREFETCH_ROWS && generation.has_dependent_launch(),
        }
    }
}

/// What a launch prefetches of matrices with `width` columns, the first of them first.
pub(super) fn ranges(matrices: [(DecodeMatrix, usize); 2]) -> [DecodeRange; 2] {
    let mut left = PREFETCH_BYTES;
    matrices.map(|(matrix, values)| {
        let size = if matrix.scales.address() == 0 { 2 * values } else { values };
        let bytes = size.min(left) / 16 * 16;
        left -= bytes;
        DecodeRange { at: matrix.w, bytes }
    })
}

/// The choice of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Choice {
    pub(super) on: Candidates,
    /// Whether every other step runs without them.
    pub(super) alternate: bool,
}

impl Choice {
    pub(super) fn from_environment() -> Result<Self> {
        Self::parse(&std::env::var(VARIABLE).unwrap_or_default())
    }

    fn parse(list: &str) -> Result<Self> {
        let mut choice = Choice::default();
        for name in list.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            match name {
                "attend" => choice.on.attend = true,
                "exact" => choice.on.exact = true,
                "prefetch" => choice.on.prefetch = true,
                "alternate" => choice.alternate = true,
                _ => {
                    let detail = format!(
                        "no candidate {name}; there are attend, exact, prefetch and alternate"
                    );
                    return Err(Error::argument(VARIABLE, detail));
                }
            }
        }
        Ok(choice)
    }

    /// The kinds of steps that follow each other in turn.
    pub(super) fn kinds(self) -> Vec<Candidates> {
        let plain = self.alternate.then(Candidates::default);
        plain.into_iter().chain([self.on]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_name_candidates() {
        let on = Candidates { attend: true, ..Candidates::default() };
        let parse = |list: &str| Choice::parse(list).map(Choice::kinds).map_err(|e| e.to_string());
        assert_eq!(parse(""), Ok(vec![Candidates::default()]));
        assert_eq!(parse("attend"), Ok(vec![on]));
        assert_eq!(parse("attend, alternate"), Ok(vec![Candidates::default(), on]));
        let both = Candidates { prefetch: true, ..on };
        assert_eq!(parse("attend,prefetch"), Ok(vec![both]));
        assert!(parse("atend").unwrap_err().contains("no candidate atend"));
    }

    #[test]
    fn prefetched_ranges_share_the_limit() {
        let bf16 = DecodeMatrix::default();
        let int8 = DecodeMatrix { scales: 16.into(), ..bf16 };
        let bytes = |matrices| ranges(matrices).map(|range| range.bytes);
        assert_eq!(bytes([(bf16, 1 << 20), (int8, 24)]), [2 << 20, 16]);
        assert_eq!(bytes([(int8, 5 << 20), (bf16, 50 << 20)]), [5 << 20, 7 << 20]);
        assert_eq!(bytes([(bf16, 0), (bf16, 0)]), [0, 0]);
    }
}
