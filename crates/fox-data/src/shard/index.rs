//! `index.json`: what a prepared folder holds.

use std::fs;
use std::path::Path;

use fox_base::durable;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::tokenizer::hash_of;

pub(crate) const INDEX_FILE: &str = "index.json";
const VERSION: u32 = 1;

/// One shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardEntry {
    /// Path inside the folder.
    pub file: String,
    /// Documents in it.
    pub documents: u64,
    /// Tokens in it.
    pub tokens: u64,
    /// XXH3-128 of its tokens, in hexadecimal.
    pub checksum: String,
}

impl ShardEntry {
    pub(super) fn new(file: String, documents: u64, tokens: u64, checksum: u128) -> Self {
        Self { file, documents, tokens, checksum: format!("{checksum:032x}") }
    }
}

/// The shards of one split.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SplitIndex {
    /// Shards in the order of their documents.
    pub shards: Vec<ShardEntry>,
}

impl SplitIndex {
    /// Documents in all shards.
    pub fn documents(&self) -> u64 {
        self.shards.iter().map(|s| s.documents).sum()
    }

    /// Tokens in all shards.
    pub fn tokens(&self) -> u64 {
        self.shards.iter().map(|s| s.tokens).sum()
    }
}

/// What a prepared folder holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Index {
    /// Version of the format.
    pub version: u32,
    /// Identity of the tokenizer that made the ids.
    pub tokenizer: String,
    /// Number of different ids.
    pub vocab_size: usize,
    /// The id in front of every sequence.
    pub bos: u32,
    /// Bytes of a stored id.
    pub token_bytes: usize,
    /// Whether every document ends with the `bos` id as an end mark.
    pub end_mark: bool,
    /// Documents to train on.
    pub train: SplitIndex,
    /// Documents held out.
    pub heldout: SplitIndex,
}

impl Index {
    pub(crate) fn current_version() -> u32 {
        VERSION
    }
}

/// The file: the index, and a checksum of it.
#[derive(Serialize, Deserialize)]
struct File {
    index: Index,
    checksum: String,
}

fn checksum(index: &Index) -> Option<String> {
    let bytes = serde_json::to_vec(index).ok()?;
    Some(format!("{:032x}", hash_of(&bytes)))
}

pub(crate) fn write_index(folder: &Path, index: &Index) -> Result<()> {
    let path = folder.join(INDEX_FILE);
    let unwritable =
        || Error::BadIndex { path: path.clone(), detail: "it cannot be put into JSON".into() };
    let file = File { checksum: checksum(index).ok_or_else(unwritable)?, index: index.clone() };
    let bytes = serde_json::to_vec_pretty(&file).map_err(|_| unwritable())?;
    Ok(durable::write(&path, &bytes)?)
}

pub(crate) fn read_index(folder: &Path) -> Result<Index> {
    let path = folder.join(INDEX_FILE);
    let bytes = fs::read(&path).map_err(Error::io("read", &path))?;
    let bad = |detail: String| Error::BadIndex { path: path.clone(), detail };
    let file: File = serde_json::from_slice(&bytes).map_err(|error| bad(error.to_string()))?;
    if file.index.version != VERSION {
        return Err(bad(format!(
            "it has version {}, this program reads {VERSION}",
            file.index.version
        )));
    }
    if checksum(&file.index).as_ref() != Some(&file.checksum) {
        return Err(bad("its checksum differs".into()));
    }
    Ok(file.index)
}
