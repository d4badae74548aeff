//! Conversion of checkpoints, with the files that are neither configuration nor weights: tokenizer, chat template,
//! generation settings.

use std::fs;
use std::path::{Path, PathBuf};

use fox_base::durable::{self, NewFolder};

use super::{CheckpointReader, WriteOptions, write_checkpoint};
use crate::{Error, Result};

/// Prefixes of their names.
#[rustfmt::skip]
const NAMES: [&str; 9] = [
    "added_tokens.json", "chat_template.", "fox_tokenizer.json", "generation_config.json",
    "merges.txt", "special_tokens_map.json", "tokenizer.", "tokenizer_config.json", "vocab.",
];

/// Copies tokenizer, chat template and generation settings of a checkpoint into an existing folder.
pub fn copy_tokenizer_files(from: &Path, to: &Path) -> Result<()> {
    for path in companions(from)? {
        let Some(name) = path.file_name() else { continue };
        let bytes = fs::read(&path).map_err(Error::io("read", &path))?;
        durable::write(&to.join(name), &bytes)?;
    }
    Ok(())
}

fn companions(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = durable::entries(folder)?;
    found.retain(|path| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        path.is_file() && NAMES.iter().any(|known| name.starts_with(known))
    });
    found.sort();
    Ok(found)
}

/// Writes an open checkpoint in another format, tokenizer files included, one tensor in memory at a time. `dir` must be
/// vacant and appears when it is complete; several converts into one `dir` may run at once, and one of them succeeds.
pub fn convert_checkpoint(
    reader: &mut CheckpointReader,
    dir: &Path,
    options: &WriteOptions,
) -> Result<()> {
    if !durable::is_vacant(dir)? {
        return Err(Error::Occupied { path: dir.to_path_buf() });
    }
    let (config, from) = (reader.config().clone(), reader.dir().to_path_buf());
    let folder = NewFolder::create(dir)?;
    write_checkpoint(folder.path(), &config, options, |id| reader.read(id))?;
    copy_tokenizer_files(&from, folder.path())?;
    Ok(folder.publish()?)
}
