//! Opens the data at a path, whatever their kind.

use std::path::Path;
use std::sync::Arc;

use super::Dataset;
use crate::error::{Error, Result};
use crate::shard::{INDEX_FILE, PreparedDataset, Verify};
use crate::tokenizer::Tokenizer;
use crate::zarr::ZarrDataset;

/// Which documents of a corpus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// Those to train on.
    Train,
    /// Those held out for evaluation.
    HeldOut,
}

impl Split {
    /// The name used in folders and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::HeldOut => "heldout",
        }
    }
}

/// Opens the data at `path`: a prepared folder, a Zarr array (any split), or a folder with `train.zarr` and
/// `heldout.zarr`.
///
/// With a tokenizer given, data made by another one are refused. Zarr arrays do not name theirs; by default
/// it is LongCrawl64's.
///
/// # Errors
/// A path without such data, damaged data, another tokenizer.
pub fn open_dataset(
    path: &Path,
    split: Split,
    tokenizer: Option<&Tokenizer>,
    verify: Verify,
) -> Result<Arc<dyn Dataset>> {
    if !path.exists() {
        return Err(Error::Missing { path: path.to_path_buf() });
    }
    if path.join(INDEX_FILE).exists() {
        let dataset = PreparedDataset::open(path, split, verify)?;
        if let Some(tokenizer) = tokenizer {
            let expected = tokenizer.identity().to_string();
            let found = dataset.tokenizer_identity();
            if found != expected {
                return Err(Error::WrongTokenizer { path: path.to_path_buf(), found, expected });
            }
        }
        return Ok(Arc::new(dataset));
    }
    let inside = path.join(format!("{}.zarr", split.name()));
    let array = [path, &inside]
        .into_iter()
        .find(|p| p.join(".zarray").exists())
        .ok_or_else(|| Error::NotADataset { path: path.to_path_buf() })?;
    let tokenizer = match tokenizer {
        Some(tokenizer) => tokenizer.clone(),
        None => Tokenizer::from_name("json-gpt2")?,
    };
    Ok(Arc::new(ZarrDataset::open(array, tokenizer)?))
}
