//! Data for the Forgetting Transformer: corpora, tokenizers, token shards, loaders, and a synthetic corpus.
//!
//! Data flow of a training batch:
//!
//! ```text
//! corpus (text, JSON lines, Parquet)  --prepare-->  token shards  --+
//! LongCrawl64 Zarr array, read in place  ----------------------+--> Dataset --> Loader --> Batch
//! synthetic corpus, small tasks: generated while they are read  -------+
//! ```
//!
//! Text exists only on the left; from the [`Dataset`] on there are token ids. A [`Batch`] carries the
//! [`LoaderState`] that follows it, so that training can resume at any step.
//!
//! ```
//! use std::sync::Arc;
//! use fox_data::{Loader, LoaderConfig, SyntheticConfig, SyntheticDataset};
//!
//! let data = Arc::new(SyntheticDataset::new(SyntheticConfig::default()));
//! let loader = Loader::new(data, LoaderConfig::new(512, 8))?;
//! let mut batches = loader.prefetch(loader.state_at(0), 2)?;
//! let first = batches.next().ok_or("the synthetic corpus has no end")??;
//! assert_eq!((first.batch, first.time, first.inputs.len()), (8, 512, 8 * 512));
//!
//! // Later, in another process: resume after that batch.
//! let mut rest = loader.prefetch(first.state, 2)?;
//! assert_eq!(rest.next().ok_or("no batch")??, loader.batch(1)?);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod chat;
mod corpus;
mod dataset;
mod error;
mod loader;
mod positioned;
mod prepare;
mod random;
mod shard;
pub mod synthetic;
pub mod task;
mod tokenizer;
mod zarr;

pub use chat::{ChatError, ChatMessage, ChatRenderer, ChatTemplate, TemplateLimit};
pub use corpus::{Corpus, CorpusFile, CorpusOptions, Document, Documents, Format, Record};
pub use dataset::{
    Dataset, DocumentChunk, DocumentChunks, DocumentLengths, MemoryDataset, Split, open_dataset,
};
pub use error::{Error, Result};
pub use loader::{
    Batch, IGNORED_LABEL, Layout, Loader, LoaderConfig, LoaderState, Order, Prefetcher,
};
pub use prepare::{HeldOut, PrepareOptions, PrepareProgress, PrepareReport, Replace, prepare};
pub use shard::{Index, PreparedDataset, ShardEntry, SplitIndex, Verify};
pub use synthetic::{
    NeedleCase, START_WORD, SyntheticConfig, SyntheticDataset, SyntheticTokenizer,
};
#[cfg(feature = "hf-tokenizers")]
pub use tokenizer::HfTokenizer;
pub use tokenizer::{
    ByteTokenizer, Detokenizer, Gpt2Tokenizer, JsonGpt2Tokenizer, SafeSplit, Tokenizer,
    TokenizerIdentity, generated_tokenizer_json,
};
pub use zarr::{TokenType, ZarrDataset, ZarrMetadata};
