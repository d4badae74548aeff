//! What a loader yields.

use serde::{Deserialize, Serialize};

/// The label of a position without a loss.
pub const IGNORED_LABEL: i32 = -100;

/// Position of a loader. Every batch has one, and checkpoints store it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoaderState {
    /// Number of the batch that comes next.
    pub next_batch: u64,
    /// Which data and settings it belongs to.
    pub fingerprint: u64,
}

/// One batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Ids that the model reads: `[batch, time]`, row by row.
    pub inputs: Vec<i32>,
    /// Ids that it should predict: `[batch, time]`; [`IGNORED_LABEL`] at positions without a loss.
    pub labels: Vec<i32>,
    /// Rows.
    pub batch: usize,
    /// Tokens in a row.
    pub time: usize,
    /// Packed rows: where each sequence starts in the `batch * time` positions, and the end of the last one
    /// ("cu_seqlens"). `None`: every row is one sequence.
    pub boundaries: Option<Vec<usize>>,
    /// The state after this batch.
    pub state: LoaderState,
}

impl Batch {
    pub(super) fn new(batch: usize, time: usize, state: LoaderState) -> Self {
        Self {
            inputs: vec![0; batch * time],
            labels: vec![IGNORED_LABEL; batch * time],
            batch,
            time,
            boundaries: None,
            state,
        }
    }

    /// Number of this batch.
    pub fn number(&self) -> u64 {
        self.state.next_batch - 1
    }

    /// Positions that have a loss.
    pub fn labelled(&self) -> usize {
        self.labels.iter().filter(|&&l| l != IGNORED_LABEL).count()
    }

    /// Puts a sequence into a row: the start marker and all ids but the last as inputs, the ids as labels where
    /// they are `labelled`.
    pub(super) fn put(&mut self, row: usize, at: usize, bos: u32, ids: &[u32], labelled: &[bool]) {
        let start = row * self.time + at;
        let mut previous = bos;
        for (i, (&id, &labelled)) in ids.iter().zip(labelled).enumerate() {
            // Ids are below the vocabulary's size, which is far below 2^31.
            self.inputs[start + i] = previous as i32;
            self.labels[start + i] = if labelled { id as i32 } else { IGNORED_LABEL };
            previous = id;
        }
    }

    /// Fills a row from `at` on with positions that have no loss.
    pub(super) fn pad(&mut self, row: usize, at: usize, bos: u32) {
        let range = row * self.time + at..(row + 1) * self.time;
        self.inputs[range.clone()].fill(bos as i32);
        self.labels[range].fill(IGNORED_LABEL);
    }
}
