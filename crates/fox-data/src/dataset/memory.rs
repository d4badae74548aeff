//! A data set held in memory, for tests and for token lists that come from elsewhere.

use super::{Dataset, DocumentLengths, check_range};
use crate::error::Result;

/// Documents held in memory.
#[derive(Debug, Clone)]
pub struct MemoryDataset {
    documents: Vec<Vec<u32>>,
    lengths: DocumentLengths,
    vocab_size: usize,
    bos: u32,
    tokenizer_identity: String,
}

impl MemoryDataset {
    /// Documents of ids below `vocab_size`, made by the tokenizer named.
    pub fn new(
        documents: Vec<Vec<u32>>,
        vocab_size: usize,
        bos: u32,
        tokenizer_identity: impl Into<String>,
    ) -> Self {
        let lengths = DocumentLengths::from_lens(documents.iter().map(|d| d.len() as u64));
        Self { documents, lengths, vocab_size, bos, tokenizer_identity: tokenizer_identity.into() }
    }
}

impl Dataset for MemoryDataset {
    fn lengths(&self) -> &DocumentLengths {
        &self.lengths
    }

    fn read(&self, document: u64, start: u64, out: &mut [u32]) -> Result<()> {
        check_range(&self.lengths, document, start, out.len())?;
        let start = start as usize;
        out.copy_from_slice(&self.documents[document as usize][start..start + out.len()]);
        Ok(())
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn bos(&self) -> u32 {
        self.bos
    }

    fn identity(&self) -> String {
        let mut bytes = Vec::new();
        for document in &self.documents {
            bytes.extend_from_slice(&(document.len() as u64).to_le_bytes());
            bytes.extend(document.iter().flat_map(|id| id.to_le_bytes()));
        }
        format!("memory {:016x}", twox_hash::XxHash3_64::oneshot(&bytes))
    }

    fn tokenizer_identity(&self) -> String {
        self.tokenizer_identity.clone()
    }
}
