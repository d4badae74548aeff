//! `prepare.json`: the options of a preparation, so that only the same preparation resumes in a folder.

use std::fs;
use std::path::{Path, PathBuf};

use fox_base::{FolderLock, durable};
use serde::{Deserialize, Serialize};

use super::pipeline::Source;
use super::{PrepareOptions, Replace, create_folders};
use crate::dataset::Split;
use crate::error::{Error, Result};
use crate::prepare::HeldOut;
use crate::shard::INDEX_FILE;

const MANIFEST_FILE: &str = "prepare.json";
const LOCK_FILE: &str = "prepare.lock";

/// Everything that decides the bytes of the output. Paths are not in it: a corpus may be moved.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Manifest {
    tokenizer: String,
    text_field: String,
    separator: Option<String>,
    held_out: String,
    shard_tokens: u64,
    end_mark: bool,
    /// Name and size of every file, in order.
    files: Vec<(String, u64)>,
}

impl Manifest {
    pub(super) fn new(options: &PrepareOptions, sources: &[Source]) -> Self {
        Self {
            tokenizer: options.tokenizer.identity().to_string(),
            text_field: options.corpus_options.text_field.clone(),
            separator: options.corpus_options.separator.clone(),
            held_out: match &options.held_out {
                HeldOut::None => "none".to_owned(),
                HeldOut::Fraction { fraction, seed } => format!("{fraction} with seed {seed}"),
                HeldOut::Ends { fraction } => format!("{fraction} of every end"),
                HeldOut::Path(_) => "the last files".to_owned(),
            },
            shard_tokens: options.shard_tokens,
            end_mark: options.end_mark,
            files: sources
                .iter()
                .flat_map(|s| s.corpus.files())
                .map(|f| (f.name.clone(), f.bytes))
                .collect(),
        }
    }

    /// Locks the folder and writes the manifest into an empty one. In another, the manifest must be the same, or
    /// `replace` must allow to remove what was prepared; true is returned where it was removed.
    pub(super) fn claim(&self, out: &Path, replace: Replace) -> Result<(FolderLock, bool)> {
        let path = out.join(MANIFEST_FILE);
        // A foreign folder stays untouched; not even a lock is created in it.
        refuse_foreign(out, &path)?;
        durable::create_folder(out)?;
        let lock = FolderLock::take(&out.join(LOCK_FILE))?
            .map_err(|holder| Error::Locked { path: out.to_path_buf(), pid: holder.pid })?;
        refuse_foreign(out, &path)?;
        create_folders(out)?;
        let mut replaced = false;
        // Without a finished shard, other options may replace those of the failed run.
        if path.exists() && has_shards(out)? {
            let bytes = fs::read(&path).map_err(Error::io("read", &path))?;
            let different = |detail, same_options| Error::DifferentPreparation {
                path: out.to_path_buf(),
                detail,
                same_options,
            };
            let found: Result<Self> = serde_json::from_slice(&bytes).map_err(|error| {
                different(format!("{MANIFEST_FILE} is unreadable: {error}"), false)
            });
            let difference = match &found {
                Ok(found) => self.difference(found).map(|(detail, same)| different(detail, same)),
                Err(_) => found.err(),
            };
            match difference {
                None => return Ok((lock, false)),
                Some(error) if !replace.allows(&error) => return Err(error),
                Some(_) => remove_shards(out)?,
            }
            replaced = true;
        }
        let bytes = serde_json::to_vec_pretty(self)
            .map_err(|error| Error::BadIndex { path: path.clone(), detail: error.to_string() })?;
        durable::write(&path, &bytes)?;
        Ok((lock, replaced))
    }

    /// The first difference in words, and whether all options are the same.
    fn difference(&self, found: &Self) -> Option<(String, bool)> {
        if self == found {
            return None;
        }
        let pairs = [
            ("tokenizer", &found.tokenizer, &self.tokenizer),
            ("text field", &found.text_field, &self.text_field),
            ("held-out split", &found.held_out, &self.held_out),
        ];
        Some(match pairs.into_iter().find(|(_, a, b)| a != b) {
            Some((what, found, now)) => (format!("its {what} is {found}, now {now}"), false),
            None if self.shard_tokens != found.shard_tokens => {
                ("its shard size differs".to_owned(), false)
            }
            None if (&self.separator, self.end_mark) != (&found.separator, found.end_mark) => {
                ("its separator or end marks differ".to_owned(), false)
            }
            None => ("its corpus files differ".to_owned(), true),
        })
    }
}

/// Removes the index and the shards of a preparation, the index first: without it nothing is taken for complete.
pub(super) fn remove_shards(out: &Path) -> Result<()> {
    let mut files = vec![out.join(INDEX_FILE)];
    for split in [Split::Train, Split::HeldOut] {
        files.extend(shards(&out.join(split.name()))?);
    }
    for path in files.iter().filter(|path| path.exists()) {
        fs::remove_file(path).map_err(Error::io("remove", path))?;
    }
    Ok(())
}

/// The finished shards in a folder.
fn shards(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(Error::io("list", folder))? {
        let path = entry.map_err(Error::io("list", folder))?.path();
        if path.extension().is_some_and(|ending| ending == "tokens") {
            found.push(path);
        }
    }
    Ok(found)
}

/// An error for a folder that has files but no manifest.
fn refuse_foreign(out: &Path, manifest: &Path) -> Result<()> {
    if out.exists() && !manifest.exists() && !is_empty_folder(out)? {
        return Err(Error::NotEmpty { path: out.to_path_buf() });
    }
    Ok(())
}

/// Whether a folder is empty, or has only files that an early kill can leave.
fn is_empty_folder(path: &Path) -> Result<bool> {
    let own = [LOCK_FILE, "train", "heldout"].map(|name| path.join(name));
    let manifest = Some(path.join(MANIFEST_FILE));
    for entry in fs::read_dir(path).map_err(Error::io("list", path))? {
        let entry = entry.map_err(Error::io("list", path))?.path();
        let ours = own.contains(&entry) && (!entry.is_dir() || is_bare(&entry)?);
        if !ours && durable::final_path(&entry) != manifest {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether an earlier preparation has finished a shard.
fn has_shards(out: &Path) -> Result<bool> {
    let any = |split: Split| Ok::<_, Error>(!shards(&out.join(split.name()))?.is_empty());
    Ok(any(Split::Train)? || any(Split::HeldOut)?)
}

fn is_bare(folder: &Path) -> Result<bool> {
    Ok(fs::read_dir(folder).map_err(Error::io("list", folder))?.next().is_none())
}
