//! Prefetching of batches.

use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{self, JoinHandle};

use super::Loader;
use super::batch::Batch;
use crate::error::{Error, Result};

/// Yields batches in order while a thread reads the next ones. The thread ends when this is dropped.
pub struct Prefetcher {
    /// `None` only while being dropped.
    receiver: Option<Receiver<Result<Batch>>>,
    thread: Option<JoinHandle<()>>,
}

impl Prefetcher {
    pub(super) fn start(loader: Loader, first: u64, depth: usize) -> Self {
        // The thread holds one batch more than the queue.
        let (sender, receiver) = sync_channel(depth.max(1) - 1);
        let thread = thread::spawn(move || {
            let end = loader.batches().unwrap_or(u64::MAX);
            for number in first..end {
                let batch = loader.batch(number);
                let failed = batch.is_err();
                if sender.send(batch).is_err() || failed {
                    return;
                }
            }
        });
        Self { receiver: Some(receiver), thread: Some(thread) }
    }
}

impl Iterator for Prefetcher {
    type Item = Result<Batch>;

    /// The next batch; after an error, or after the last pass, there are no more.
    fn next(&mut self) -> Option<Result<Batch>> {
        if let Ok(batch) = self.receiver.as_ref()?.recv() {
            return Some(batch);
        }
        self.receiver = None;
        match self.thread.take()?.join() {
            Ok(()) => None,
            Err(_) => Some(Err(Error::ThreadLost { thread: "loader" })),
        }
    }
}

impl Drop for Prefetcher {
    fn drop(&mut self) {
        // Closing the queue ends the thread at its next send.
        self.receiver = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
