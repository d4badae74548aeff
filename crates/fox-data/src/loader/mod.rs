//! Batches of training sequences, in an order with random access to any step.
//!
//! A sequence of `window` tokens is independent of all others: `labels` are its tokens, `inputs` are the start marker
//! and all its tokens but the last. Every position has a loss, except in the data of tasks, where only answers have one.
//! Nothing is carried from one to the next.
//!
//! The order is a function of the batch number, so the whole state of a loader is the number of the next batch. A
//! fingerprint of data and settings is stored with it, so that a state is not used with other data by mistake.

mod batch;
mod config;
mod permutation;
mod prefetch;
mod windows;

pub use batch::{Batch, IGNORED_LABEL, LoaderState};
pub use config::{Layout, LoaderConfig, Order};
pub use prefetch::Prefetcher;

use std::sync::Arc;

use twox_hash::XxHash3_64;

use crate::dataset::Dataset;
use crate::error::{Error, Result};
use permutation::Permutation;
use windows::{Sequence, Windows};

/// Reads batches of a data set in a fixed order. Cheap to clone; clones share the data.
#[derive(Clone)]
pub struct Loader {
    dataset: Arc<dyn Dataset>,
    config: LoaderConfig,
    windows: Arc<Windows>,
    batches_per_epoch: u64,
    fingerprint: u64,
}

impl Loader {
    /// A loader for these settings.
    ///
    /// # Errors
    /// Settings that make no sense, sequences longer than any document, fewer sequences than one batch, or a
    /// LongCrawl64 order over documents of different lengths.
    pub fn new(dataset: Arc<dyn Dataset>, config: LoaderConfig) -> Result<Self> {
        config.check()?;
        let lengths = dataset.lengths();
        let windows = Windows::new(lengths, config.window, config.layout)?;
        if config.order == Order::LongCrawl64 {
            windows.check_columns(lengths, config.window, config.layout)?;
        }
        let batches_per_epoch = match config.order {
            // The last documents that do not fill a batch are left out of every column.
            Order::LongCrawl64 => {
                let columns = windows.count() / lengths.documents().max(1);
                lengths.documents() / config.batch as u64 * columns
            }
            Order::Shuffled { .. } | Order::Sequential => windows.count() / config.batch as u64,
        };
        if batches_per_epoch == 0 {
            return Err(Error::BatchTooLarge {
                windows: windows.count(),
                window: config.window,
                batch: config.batch,
            });
        }
        Ok(Self {
            fingerprint: XxHash3_64::oneshot(config.describe(&dataset.identity()).as_bytes()),
            dataset,
            config,
            windows: Arc::new(windows),
            batches_per_epoch,
        })
    }

    /// The settings.
    pub fn config(&self) -> &LoaderConfig {
        &self.config
    }

    /// Batches until the data repeat.
    pub fn batches_per_epoch(&self) -> u64 {
        self.batches_per_epoch
    }

    /// Batches in all; `None` if the data are repeated for ever.
    pub fn batches(&self) -> Option<u64> {
        let epochs = self.config.epochs?;
        Some(self.batches_per_epoch.saturating_mul(epochs))
    }

    /// The pass over the data in which a batch lies, from 0.
    pub fn epoch_of(&self, batch: u64) -> u64 {
        batch / self.batches_per_epoch
    }

    /// The state before a batch; 0 is the start.
    pub fn state_at(&self, batch: u64) -> LoaderState {
        LoaderState { next_batch: batch, fingerprint: self.fingerprint }
    }

    /// An error if a saved state belongs to other data or settings. The number of ranks may differ.
    ///
    /// # Errors
    /// [`Error::WrongLoaderState`].
    pub fn check_state(&self, state: &LoaderState) -> Result<()> {
        if state.fingerprint == self.fingerprint {
            return Ok(());
        }
        Err(Error::WrongLoaderState { found: state.fingerprint, expected: self.fingerprint })
    }

    /// This rank's rows of a batch.
    ///
    /// # Errors
    /// A number beyond the end, data that cannot be read, ids outside the vocabulary.
    pub fn batch(&self, number: u64) -> Result<Batch> {
        if let Some(batches) = self.batches().filter(|&batches| number >= batches) {
            return Err(Error::NoSuchBatch { batch: number, batches });
        }
        let rows = self.config.batch_per_rank();
        let first = (self.config.rank * rows) as u64;
        let time = self.config.window;
        let mut batch = Batch::new(rows, time, self.state_at(number + 1));
        let mut tokens = (vec![0; time], vec![true; time]);
        let mut starts = Vec::new();
        for row in 0..rows {
            let window = self.window_of(number, first + row as u64);
            self.fill_row(&mut batch, row, window, &mut tokens, &mut starts)?;
        }
        if let Layout::Packed = self.config.layout {
            starts.push(rows * time);
            batch.boundaries = Some(starts);
        }
        Ok(batch)
    }

    /// Batches from a state on, prefetched by a thread; at most `depth` are queued.
    ///
    /// # Errors
    /// A state of other data or settings.
    pub fn prefetch(&self, state: LoaderState, depth: usize) -> Result<Prefetcher> {
        self.check_state(&state)?;
        Ok(Prefetcher::start(self.clone(), state.next_batch, depth))
    }

    /// The number of the window in row `row` of the whole batch `number`.
    fn window_of(&self, number: u64, row: u64) -> u64 {
        let epoch = number / self.batches_per_epoch;
        let number = number % self.batches_per_epoch;
        let batch = self.config.batch as u64;
        match self.config.order {
            Order::Sequential => number * batch + row,
            Order::Shuffled { seed } => {
                Permutation::new(self.windows.count(), seed, epoch).apply(number * batch + row)
            }
            Order::LongCrawl64 => {
                let documents = self.dataset.lengths().documents();
                let groups = documents / batch;
                let columns = self.windows.count() / documents;
                let document = number % groups * batch + row;
                document * columns + number / groups
            }
        }
    }

    fn fill_row(
        &self,
        batch: &mut Batch,
        row: usize,
        window: u64,
        (tokens, labelled): &mut (Vec<u32>, Vec<bool>),
        starts: &mut Vec<usize>,
    ) -> Result<()> {
        let mut at = 0;
        for Sequence { document, start, len } in
            self.windows.sequences(self.dataset.lengths(), window)
        {
            let (ids, labelled) = (&mut tokens[..len], &mut labelled[..len]);
            self.dataset.read_labelled(document, start, ids, labelled)?;
            let vocab_size = self.dataset.vocab_size();
            if let Some(&id) = ids.iter().find(|&&id| id as usize >= vocab_size) {
                return Err(Error::UnknownToken { id, vocab_size });
            }
            starts.push(row * self.config.window + at);
            batch.put(row, at, self.dataset.bos(), ids, labelled);
            at += len;
        }
        batch.pad(row, at, self.dataset.bos());
        Ok(())
    }
}
