//! Where the candidates for the launches of decode steps apply. Predictions are in `NOTES.md`.

use fox_tensor::INT8_BLOCK;

use super::kernels::{FEW_ROWS, Int8Weights};
use super::weights::DeviceWeights;
use crate::Generation;
use crate::candidates::{Candidate, enabled, steps_alternate};

/// Candidates that are switched on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Candidates {
    /// [`Candidate::DecodeAttend`], on Hopper for more than [`FEW_ROWS`] rows and as many key heads as query heads.
    pub(super) attend: bool,
    /// [`Candidate::DecodeExact`], for at most [`FEW_ROWS`] rows.
    pub(super) exact: bool,
}

/// Largest head dim of attention in one launch: wider heads spill registers.
const ATTEND_WIDTH: usize = 128;

impl Candidates {
    /// Those of the kinds of steps that follow each other in turn.
    pub(super) fn of_steps() -> Vec<Candidates> {
        let selected = Candidates {
            attend: enabled(Candidate::DecodeAttend),
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
        }
    }
}
