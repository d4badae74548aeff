//! Writing one shard.

use std::path::Path;

use fox_base::durable::NewFile;
use twox_hash::XxHash3_128;

use super::format::{Entry, Foot, TokenWidth, head, table_checksum};
use super::index::ShardEntry;
use crate::error::Result;

/// A shard being written. It gets its name when it is complete.
pub(crate) struct ShardWriter {
    file: NewFile,
    hasher: XxHash3_128,
    width: TokenWidth,
    tokenizer: u128,
    tokens: u64,
    entries: Vec<Entry>,
    buffer: Vec<u8>,
}

impl ShardWriter {
    pub(crate) fn create(path: &Path, width: TokenWidth, tokenizer: u128) -> Result<Self> {
        let mut writer = Self {
            file: NewFile::create(path)?,
            hasher: XxHash3_128::new(),
            width,
            tokenizer,
            tokens: 0,
            entries: Vec::new(),
            buffer: Vec::new(),
        };
        writer.file.write_all(&head(width))?;
        Ok(writer)
    }

    /// Ids in the shard so far.
    pub(crate) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Appends ids to the current document.
    pub(crate) fn push(&mut self, ids: &[u32]) -> Result<()> {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        self.width.encode(ids, &mut buffer);
        self.hasher.write(&buffer);
        self.tokens += ids.len() as u64;
        let written = self.file.write_all(&buffer);
        self.buffer = buffer;
        Ok(written?)
    }

    /// Ends the current document.
    pub(crate) fn end_document(&mut self, text_hash: u64) {
        self.entries.push(Entry { end: self.tokens, text_hash });
    }

    /// Writes table and end, syncs, and gives the shard its name.
    pub(crate) fn finish(mut self, name: String) -> Result<ShardEntry> {
        let padding = self.width.padding(self.tokens);
        self.file.write_all(&[0; 8][..padding])?;
        let table: Vec<u8> = self
            .entries
            .iter()
            .flat_map(|entry| [entry.end.to_le_bytes(), entry.text_hash.to_le_bytes()])
            .flatten()
            .collect();
        self.file.write_all(&table)?;
        let foot = Foot {
            documents: self.entries.len() as u64,
            tokens: self.tokens,
            tokenizer: self.tokenizer,
            tokens_checksum: self.hasher.finish_128(),
            table_checksum: table_checksum(self.width, &table, self.tokens, self.tokenizer),
        };
        self.file.write_all(&foot.to_bytes())?;
        self.file.finish()?;
        Ok(ShardEntry::new(name, foot.documents, foot.tokens, foot.tokens_checksum))
    }
}
