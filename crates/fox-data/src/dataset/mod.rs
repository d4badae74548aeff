//! Data sets: documents of token ids with random access.

mod chunks;
mod lengths;
mod memory;
mod open;

pub use chunks::{DocumentChunk, DocumentChunks};
pub use lengths::DocumentLengths;
pub use memory::MemoryDataset;
pub use open::{Split, open_dataset};

use crate::error::{Error, Result};

/// Documents of token ids with random access.
///
/// Implemented by [`crate::PreparedDataset`], [`crate::ZarrDataset`], [`crate::SyntheticDataset`] and
/// [`MemoryDataset`].
pub trait Dataset: Send + Sync {
    /// How many documents there are, and how long each is.
    fn lengths(&self) -> &DocumentLengths;

    /// Fills `out` with the tokens of `document` from `start` on.
    ///
    /// # Errors
    /// A range outside of the document, or storage that cannot be read.
    fn read(&self, document: u64, start: u64, out: &mut [u32]) -> Result<()>;

    /// As [`Self::read`], and which of these tokens have a loss: all of them, but for the data of tasks, where only
    /// the answers have one.
    ///
    /// # Errors
    /// As [`Self::read`].
    fn read_labelled(
        &self,
        document: u64,
        start: u64,
        out: &mut [u32],
        labelled: &mut [bool],
    ) -> Result<()> {
        labelled.fill(true);
        self.read(document, start, out)
    }

    /// Number of different token ids; every id is below it.
    fn vocab_size(&self) -> usize;

    /// The id that is put in front of every sequence.
    fn bos(&self) -> u32;

    /// A description of the data: two data sets with the same identity hold the same tokens.
    fn identity(&self) -> String;

    /// Which tokenizer made the ids (see [`crate::TokenizerIdentity`]).
    fn tokenizer_identity(&self) -> String;
}

/// An error if `start..start + len` is not inside the document.
pub(crate) fn check_range(
    lengths: &DocumentLengths,
    document: u64,
    start: u64,
    len: usize,
) -> Result<()> {
    let document_len = lengths
        .len_of(document)
        .ok_or(Error::NoSuchDocument { document, documents: lengths.documents() })?;
    match start.checked_add(len as u64) {
        Some(end) if end <= document_len => Ok(()),
        _ => Err(Error::OutsideDocument { document, start, len, document_len }),
    }
}
