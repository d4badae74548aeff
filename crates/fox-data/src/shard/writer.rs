//! Writing one shard.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use twox_hash::XxHash3_128;

use super::format::{Entry, Foot, TokenWidth, head, table_checksum};
use super::index::ShardEntry;
use crate::durable;
use crate::error::{Error, Result};

/// A shard being written. It has its name only when it is whole.
pub(crate) struct ShardWriter {
    path: PathBuf,
    temporary: PathBuf,
    file: BufWriter<File>,
    hasher: XxHash3_128,
    width: TokenWidth,
    tokenizer: u128,
    tokens: u64,
    entries: Vec<Entry>,
    buffer: Vec<u8>,
}

impl ShardWriter {
    pub(crate) fn create(path: &Path, width: TokenWidth, tokenizer: u128) -> Result<Self> {
        let temporary = durable::temporary_path(path);
        let file = File::create(&temporary).map_err(Error::io("create", &temporary))?;
        let mut writer = Self {
            path: path.to_path_buf(),
            temporary,
            file: BufWriter::with_capacity(1 << 20, file),
            hasher: XxHash3_128::new(),
            width,
            tokenizer,
            tokens: 0,
            entries: Vec::new(),
            buffer: Vec::new(),
        };
        writer.write(&head(width))?;
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
        let written = self.write(&buffer);
        self.buffer = buffer;
        written
    }

    /// Ends the current document.
    pub(crate) fn end_document(&mut self, text_hash: u64) {
        self.entries.push(Entry { end: self.tokens, text_hash });
    }

    /// Writes table and end, syncs, and gives the shard its name.
    pub(crate) fn finish(mut self, name: String) -> Result<ShardEntry> {
        let padding = self.width.padding(self.tokens);
        self.write(&[0; 8][..padding])?;
        let table: Vec<u8> = self
            .entries
            .iter()
            .flat_map(|entry| [entry.end.to_le_bytes(), entry.text_hash.to_le_bytes()])
            .flatten()
            .collect();
        self.write(&table)?;
        let foot = Foot {
            documents: self.entries.len() as u64,
            tokens: self.tokens,
            tokenizer: self.tokenizer,
            tokens_checksum: self.hasher.finish_128(),
            table_checksum: table_checksum(self.width, &table, self.tokens, self.tokenizer),
        };
        self.write(&foot.to_bytes())?;
        let file = self
            .file
            .into_inner()
            .map_err(|error| Error::io("write", &self.temporary)(error.into_error()))?;
        durable::finish(file, &self.temporary, &self.path)?;
        Ok(ShardEntry::new(name, foot.documents, foot.tokens, foot.tokens_checksum))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(Error::io("write", &self.temporary))
    }
}
