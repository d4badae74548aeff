//! Token shards on the disk, and the index that lists them.
//!
//! A prepared folder:
//! ```text
//! prepare.json             the options; written first, compared when a preparation resumes
//! train/00000.tokens ...   shards, each whole documents
//! heldout/00000.tokens ...
//! tokenizer files          (see `Tokenizer::save`)
//! index.json               written last: a folder without it is not finished
//! ```
//!
//! A shard, all numbers little endian:
//! ```text
//! "FOXTOKEN"  version u32  bytes per id u32 (2 or 4)
//! ids of all documents, end to end, filled up with zeros to a multiple of 8 bytes
//! per document: end of its ids u64 (counted in ids), hash of its text u64
//! documents u64, ids u64, tokenizer hash u128, XXH3-128 of all ids u128, XXH3-128 of table and head u128
//! "FOXSHEND"
//! ```
//! The end mark is written last, so a truncated shard is detected at once.

mod format;
mod index;
mod prepared;
mod reader;
mod writer;

pub use index::{Index, ShardEntry, SplitIndex};
pub use prepared::{PreparedDataset, Verify};

pub(crate) use format::TokenWidth;
pub(crate) use index::{INDEX_FILE, read_index, write_index};
pub(crate) use reader::ShardReader;
pub(crate) use writer::ShardWriter;
