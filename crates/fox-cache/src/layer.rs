//! The decode state of one layer.

use fox_tensor::Tensor;

use crate::blocks::BlockState;
use crate::paged::PagedState;
use crate::recurrent::RecurrentState;
use crate::rows::RowState;

/// The state of one layer.
// There is one of these per layer, so the size of the larger variant does not matter.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Debug)]
pub enum LayerState {
    /// Attention over contiguous rows.
    Rows(Box<RowState>),
    /// Attention over pages.
    Paged(PagedState),
    /// A recurrent layer.
    Recurrent(RecurrentState),
    /// A layer with closed blocks.
    Blocks(BlockState),
}

impl LayerState {
    /// The state of a recurrent layer, or of the convolution in an attention layer.
    pub fn recurrent(&mut self) -> Option<&mut RecurrentState> {
        match self {
            LayerState::Rows(state) => state.conv(),
            LayerState::Paged(state) => state.conv(),
            LayerState::Recurrent(state) => Some(state),
            LayerState::Blocks(_) => None,
        }
    }

    /// The last raw key and value projections before the step, `[batch, H_kv * d]` each, with a token shift.
    pub fn last(&self) -> fox_tensor::Result<(Option<Tensor>, Option<Tensor>)> {
        match self {
            LayerState::Rows(state) => Ok(state.last()),
            LayerState::Paged(state) => state.last(),
            LayerState::Recurrent(_) | LayerState::Blocks(_) => Ok((None, None)),
        }
    }

    pub(crate) fn rows(&mut self) -> Option<&mut RowState> {
        match self {
            LayerState::Rows(state) => Some(state),
            LayerState::Paged(_) | LayerState::Recurrent(_) | LayerState::Blocks(_) => None,
        }
    }

    pub(crate) fn paged(&mut self) -> Option<&mut PagedState> {
        match self {
            LayerState::Paged(state) => Some(state),
            LayerState::Rows(_) | LayerState::Recurrent(_) | LayerState::Blocks(_) => None,
        }
    }

    /// Log gates `[R, H]` of the step that were not downloaded yet.
    pub(crate) fn staged_gates(&self) -> Option<&Tensor> {
        match self {
            LayerState::Paged(state) => state.staged_gates(),
            LayerState::Rows(_) | LayerState::Recurrent(_) | LayerState::Blocks(_) => None,
        }
    }

    /// Query heads with forget gates of a paged state.
    pub(crate) fn gated_heads(&self) -> usize {
        match self {
            LayerState::Paged(state) => state.gated_heads(),
            LayerState::Rows(_) | LayerState::Recurrent(_) | LayerState::Blocks(_) => 0,
        }
    }

    /// Discards a failed step; `lens` are the tokens of each sequence.
    pub(crate) fn discard(&mut self, lens: &[usize]) {
        match self {
            LayerState::Rows(state) => state.discard(),
            LayerState::Paged(state) => state.discard(lens),
            LayerState::Recurrent(state) => state.discard(),
            LayerState::Blocks(state) => state.discard(),
        }
    }

    /// Makes a successful step part of the past.
    pub(crate) fn commit(&mut self) {
        match self {
            LayerState::Rows(state) => state.commit(),
            LayerState::Paged(state) => state.commit(),
            LayerState::Recurrent(state) => state.commit(),
            LayerState::Blocks(state) => state.commit(),
        }
    }
}
