//! The synthetic corpus as a data set.

use super::config::SyntheticConfig;
use super::document::SyntheticDocument;
use super::tokenizer::SyntheticTokenizer;
use crate::dataset::{Dataset, DocumentLengths, check_range};
use crate::error::Result;
use crate::tokenizer::Tokenizer;

/// The synthetic corpus as a data set. Nothing is stored: tokens are generated when they are read.
///
/// Reading from the middle of a document generates all before it (some ten to thirty million tokens a second), so
/// documents should not be much longer than the windows read from them times a few hundred.
#[derive(Debug, Clone)]
pub struct SyntheticDataset {
    config: SyntheticConfig,
    lengths: DocumentLengths,
}

impl SyntheticDataset {
    /// The corpus of this configuration.
    pub fn new(config: SyntheticConfig) -> Self {
        let lengths =
            DocumentLengths::Uniform { documents: config.documents, len: config.document_len };
        Self { config, lengths }
    }
}

impl Dataset for SyntheticDataset {
    fn lengths(&self) -> &DocumentLengths {
        &self.lengths
    }

    fn read(&self, document: u64, start: u64, out: &mut [u32]) -> Result<()> {
        check_range(&self.lengths, document, start, out.len())?;
        // `check_range` bounds `start` by the document's length, which fits what the caller can address.
        let tokens = SyntheticDocument::new(&self.config, document).skip(start as usize);
        for (slot, token) in out.iter_mut().zip(tokens) {
            *slot = token.id;
        }
        Ok(())
    }

    fn vocab_size(&self) -> usize {
        SyntheticTokenizer::VOCAB_SIZE
    }

    fn bos(&self) -> u32 {
        SyntheticTokenizer::BOS
    }

    fn identity(&self) -> String {
        let c = &self.config;
        format!(
            "synthetic-v2 seed {} documents {} x {} circles {} actions {} filler {}% chapters {} x 2^{}",
            c.seed,
            c.documents,
            c.document_len,
            c.circles,
            c.actions,
            c.filler_percent,
            c.shortest_chapter,
            c.octaves
        )
    }

    fn tokenizer_identity(&self) -> String {
        Tokenizer::Synthetic(SyntheticTokenizer).identity().to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partial_reads_give_the_document() {
        let data = SyntheticDataset::new(SyntheticConfig {
            document_len: 300,
            documents: 5,
            ..SyntheticConfig::default()
        });
        let mut whole = vec![0; 300];
        data.read(4, 0, &mut whole).unwrap();
        let mut part = vec![0; 70];
        data.read(4, 123, &mut part).unwrap();
        assert_eq!(part, whole[123..193]);
        assert!(data.read(5, 0, &mut part).is_err());
        assert!(data.read(4, 231, &mut part).is_err());
    }
}
