//! Where the candidates for the launches of decode steps apply. Predictions are in `NOTES.md`.

use fox_tensor::INT8_BLOCK;

use super::kernels::{FEW_ROWS, Int8Weights};
use super::params::{DecodeMatrix, DecodeRange};
use super::weights::DeviceWeights;
use crate::Generation;
use crate::candidates::{Candidate, enabled, steps_alternate};

/// Candidates that are switched on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Candidates {
    /// [`Candidate::DecodeAttend`], on Hopper for more than [`FEW_ROWS`] rows and as many key heads as query heads.
    pub(super) attend: bool,
    /// [`Candidate::DecodePrefetch`], for at most [`PREFETCH_ROWS`] rows on Hopper and later.
    pub(super) prefetch: bool,
    /// [`Candidate::DecodeExact`], for at most [`FEW_ROWS`] rows.
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
    /// Those of the kinds of steps that follow each other in turn.
    pub(super) fn of_steps() -> Vec<Candidates> {
        let selected = Candidates {
            attend: enabled(Candidate::DecodeAttend),
            prefetch: enabled(Candidate::DecodePrefetch),
            exact: enabled(Candidate::DecodeExact),
        };
        let plain = steps_alternate().then(Candidates::default);
        plain.into_iter().chain([selected]).collect()
    }

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

#[cfg(test)]
mod tests {
    use super::*;

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
