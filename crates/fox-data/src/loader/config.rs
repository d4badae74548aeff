//! Settings of a loader.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// How sequences are cut from documents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Layout {
    /// Full windows of one document each; the remainder of a document is dropped.
    Windows,
    /// As `Windows`, with the remainder of a document padded by positions that have no loss.
    PaddedWindows,
    /// Concatenated documents, split every `window` tokens; the batch lists where documents start.
    Packed,
}

/// In which order sequences come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// The order of the published recipes: documents as they are stored, the first window of every document before
    /// any second window; documents that do not fill the last batch are left out. Needs documents of one length
    /// that the window divides.
    #[serde(rename = "longcrawl64")]
    LongCrawl64,
    /// Every sequence once per epoch, shuffled anew for each epoch.
    Shuffled {
        /// Seed of the shuffle.
        seed: u64,
    },
    /// As stored: all windows of the first document, then of the second.
    Sequential,
}

/// Settings of a loader.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoaderConfig {
    /// Tokens in a sequence.
    pub window: usize,
    /// Sequences in a batch, over all ranks.
    pub batch: usize,
    /// Which of the ranks this is, from 0. Each gets consecutive rows of the batch.
    pub rank: usize,
    /// Number of ranks that divide a batch.
    pub ranks: usize,
    /// How sequences are cut.
    pub layout: Layout,
    /// In which order they come.
    pub order: Order,
    /// Passes over the data; without a number they are repeated for ever.
    pub epochs: Option<u64>,
}

impl LoaderConfig {
    /// One rank, shuffled windows, repeated for ever.
    pub fn new(window: usize, batch: usize) -> Self {
        Self {
            window,
            batch,
            rank: 0,
            ranks: 1,
            layout: Layout::Windows,
            order: Order::Shuffled { seed: 0 },
            epochs: None,
        }
    }

    /// Rows that each rank gets.
    pub(crate) fn batch_per_rank(&self) -> usize {
        self.batch / self.ranks
    }

    /// Text whose hash is the fingerprint of loader states: data and settings that decide the batches. The words are
    /// part of the checkpoint format: a run resumes only if they stay as they are.
    pub(super) fn describe(&self, data: &str) -> String {
        let layout = match self.layout {
            Layout::Windows => "Windows",
            Layout::PaddedWindows => "PaddedWindows",
            Layout::Packed => "Packed",
        };
        let order = match self.order {
            Order::LongCrawl64 => "LongCrawl64".to_owned(),
            Order::Shuffled { seed } => format!("Shuffled {{ seed: {seed} }}"),
            Order::Sequential => "Sequential".to_owned(),
        };
        format!("{data} window {} batch {} {layout} {order}", self.window, self.batch)
    }

    pub(super) fn check(&self) -> Result<()> {
        let bad = |option, detail: String| Err(Error::BadOption { option, detail });
        if self.window == 0 {
            return bad("sequence length", "it must be at least 1".into());
        }
        if self.batch == 0 {
            return bad("batch size", "it must be at least 1".into());
        }
        if self.ranks == 0 || self.rank >= self.ranks {
            return bad("rank", format!("{} is not one of {} ranks", self.rank, self.ranks));
        }
        if !self.batch.is_multiple_of(self.ranks) {
            return bad(
                "batch size",
                format!("{} sequences cannot be shared evenly by {} ranks", self.batch, self.ranks),
            );
        }
        if self.batch.checked_mul(self.window).is_none_or(|n| n > i32::MAX as usize) {
            return bad("batch size", "a batch has more than 2^31 tokens; use accumulation".into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checkpoints have hashes of these texts.
    #[test]
    fn fingerprint_text_is_stable() {
        let of = |layout, order| {
            LoaderConfig { layout, order, ..LoaderConfig::new(8, 2) }.describe("prepared:1")
        };
        assert_eq!(
            of(Layout::Windows, Order::Shuffled { seed: 7 }),
            "prepared:1 window 8 batch 2 Windows Shuffled { seed: 7 }"
        );
        assert_eq!(
            of(Layout::PaddedWindows, Order::Sequential),
            "prepared:1 window 8 batch 2 PaddedWindows Sequential"
        );
        assert_eq!(
            of(Layout::Packed, Order::LongCrawl64),
            "prepared:1 window 8 batch 2 Packed LongCrawl64"
        );
    }
}
