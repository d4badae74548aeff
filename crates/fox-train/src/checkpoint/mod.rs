//! Checkpoints: everything a run needs to go on to the same bits.
//!
//! ```text
//! checkpoints/step-00000100/
//!   model/                  a Hugging Face folder (weights, exact), usable on its own
//!   optimizer.safetensors   what the optimizer keeps, as STATE.NAME: `m.` and `v.` for AdamW, `momentum.` for
//!                           Muon's matrices, `ema.` for an average of the weights
//!   state.json              step, tokens, updates, loader, skips
//!   manifest.json           size and XXH3-128 of every file, written last
//! ```
//!
//! A checkpoint is written under another name, synced and renamed, so a folder `step-*` is complete; the
//! manifest shows when it is not, whatever happened to the disk since.

mod manifest;
mod optimizer_state;
mod store;

use fox_data::LoaderState;
use serde::{Deserialize, Serialize};

pub use store::{CheckpointStore, Resumed};

/// Counters of a run. With weights, the optimizer's state and the recipe they determine everything that follows.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunState {
    /// Version of the format.
    pub version: u32,
    /// Steps done, those left out included.
    pub step: u64,
    /// Tokens consumed.
    pub tokens: u64,
    /// Updates made: steps less those left out.
    pub updates: u64,
    /// Steps left out because their gradient was not finite.
    pub skips: u64,
    /// How many of the last steps were left out in a row.
    pub skips_in_a_row: u64,
    /// Where the loader is.
    pub loader: LoaderState,
    /// Seconds of training so far.
    pub seconds: f64,
}

impl RunState {
    /// The format that this version reads and writes.
    pub const VERSION: u32 = 1;

    /// Before the first step.
    pub fn start(loader: LoaderState) -> Self {
        RunState {
            version: Self::VERSION,
            step: 0,
            tokens: 0,
            updates: 0,
            skips: 0,
            skips_in_a_row: 0,
            loader,
            seconds: 0.0,
        }
    }
}
