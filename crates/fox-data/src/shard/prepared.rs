//! A prepared folder as a data set.

use std::path::{Path, PathBuf};

use super::format::TokenWidth;
use super::index::{Index, read_index};
use super::reader::ShardReader;
use crate::dataset::{Dataset, DocumentLengths, Split, check_range};
use crate::error::{Error, Result};
use crate::tokenizer::hash_of;

/// How much of the shards is checked when they are opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verify {
    /// The index, and of every shard its marks, sizes and table: fast for any amount of data. The tokens of a shard are
    /// checked when the first of them is read.
    Structure,
    /// All tokens too: every shard is read once.
    Everything,
}

/// One split of a prepared folder. Shards are read by position from open files, nothing is held in memory but
/// the ends of the documents. No token is handed out before the checksum of its shard was compared.
#[derive(Debug)]
pub struct PreparedDataset {
    index: Index,
    lengths: DocumentLengths,
    shards: Vec<ShardReader>,
    /// Number of the first token of each shard.
    starts: Vec<u64>,
    identity: String,
}

impl PreparedDataset {
    /// Opens one split of a prepared folder.
    ///
    /// # Errors
    /// A folder that is not prepared, a split without documents, or files that are damaged or do not belong
    /// together.
    pub fn open(folder: &Path, split: Split, verify: Verify) -> Result<Self> {
        let index = read_index(folder)?;
        let entries = match split {
            Split::Train => &index.train.shards,
            Split::HeldOut => &index.heldout.shards,
        };
        if entries.is_empty() {
            return Err(Error::EmptySplit { path: folder.to_path_buf(), split: split.name() });
        }
        let mut ends = Vec::new();
        let mut starts = Vec::new();
        let mut shards = Vec::new();
        let mut total = 0;
        for entry in entries {
            let path = folder.join(&entry.file);
            let shard = ShardReader::open(&path)?;
            check_belongs(&shard, &path, &index, &entry.file)?;
            if shard.index_entry(entry.file.clone()) != *entry {
                return Err(Error::BadShard {
                    path,
                    detail: "it is not the one that the index lists".into(),
                });
            }
            if verify == Verify::Everything {
                shard.verify()?;
            }
            starts.push(total);
            ends.extend(shard.entries().iter().map(|e| total + e.end));
            total += entry.tokens;
            shards.push(shard);
        }
        let checksums: Vec<&str> = entries.iter().map(|e| e.checksum.as_str()).collect();
        let identity =
            format!("prepared {} {:032x}", split.name(), hash_of(checksums.join(" ").as_bytes()));
        Ok(Self { index, lengths: DocumentLengths::Varied { ends }, shards, starts, identity })
    }

    /// The folder's index.
    pub fn index(&self) -> &Index {
        &self.index
    }
}

/// A shard must have the tokenizer and the width that the index names.
fn check_belongs(shard: &ShardReader, path: &Path, index: &Index, name: &str) -> Result<()> {
    let hash = format!("{:032x}", shard.tokenizer());
    if !index.tokenizer.ends_with(&hash) {
        return Err(Error::WrongTokenizer {
            path: PathBuf::from(path),
            found: hash,
            expected: index.tokenizer.clone(),
        });
    }
    if TokenWidth::from_bytes(index.token_bytes) != Some(shard.width()) {
        return Err(Error::BadShard {
            path: PathBuf::from(path),
            detail: format!("{name} stores ids in another width than the index says"),
        });
    }
    Ok(())
}

impl Dataset for PreparedDataset {
    fn lengths(&self) -> &DocumentLengths {
        &self.lengths
    }

    fn read(&self, document: u64, start: u64, out: &mut [u32]) -> Result<()> {
        check_range(&self.lengths, document, start, out.len())?;
        if out.is_empty() {
            return Ok(());
        }
        let DocumentLengths::Varied { ends } = &self.lengths else {
            return Err(Error::NoSuchDocument { document, documents: 0 });
        };
        let document = document as usize;
        let first = if document == 0 { 0 } else { ends[document - 1] } + start;
        // A document lies in one shard, the last one that starts at or before it.
        let shard = self.starts.partition_point(|&s| s <= first) - 1;
        self.shards[shard].read(first - self.starts[shard], out)
    }

    fn vocab_size(&self) -> usize {
        self.index.vocab_size
    }

    fn bos(&self) -> u32 {
        self.index.bos
    }

    fn identity(&self) -> String {
        self.identity.clone()
    }

    fn tokenizer_identity(&self) -> String {
        self.index.tokenizer.clone()
    }
}
