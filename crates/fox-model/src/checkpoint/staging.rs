//! Writing a folder aside, so that it appears in full or not at all.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// A folder under a temporary name beside its destination. Dropped without
/// [`StagedFolder::publish`], it is removed.
pub(super) struct StagedFolder {
    destination: PathBuf,
    staging: PathBuf,
    published: bool,
}

impl StagedFolder {
    /// Refuses a destination that holds something already.
    pub fn new(destination: &Path) -> Result<Self> {
        refuse_occupied(destination)?;
        let Some(name) = destination.file_name() else {
            return Err(Error::Occupied { path: destination.to_path_buf() });
        };
        let parent = parent_of(destination);
        fs::create_dir_all(parent).map_err(Error::io("create", parent))?;
        let hidden = format!(".{}.partial-{}", name.to_string_lossy(), std::process::id());
        let staging = parent.join(hidden);
        if staging.exists() {
            // Left behind by a process of the same number that was killed.
            fs::remove_dir_all(&staging).map_err(Error::io("remove", &staging))?;
        }
        fs::create_dir(&staging).map_err(Error::io("create", &staging))?;
        Ok(StagedFolder { destination: destination.to_path_buf(), staging, published: false })
    }

    /// Where a file of this name is to be written.
    pub fn path(&self, name: &str) -> PathBuf {
        self.staging.join(name)
    }

    /// Puts the folder in its place. Every file in it must have been synced.
    pub fn publish(mut self) -> Result<()> {
        sync_folder(&self.staging)?;
        refuse_occupied(&self.destination)?;
        if cfg!(windows) && self.destination.exists() {
            let empty = &self.destination;
            fs::remove_dir(empty).map_err(Error::io("remove", empty))?;
        }
        fs::rename(&self.staging, &self.destination)
            .map_err(Error::io("rename the finished files to", &self.destination))?;
        self.published = true;
        sync_folder(parent_of(&self.destination))
    }
}

impl Drop for StagedFolder {
    fn drop(&mut self) {
        if !self.published {
            // Nothing more can be done about a leftover; the error that led here is reported.
            let _ = fs::remove_dir_all(&self.staging);
        }
    }
}

fn refuse_occupied(path: &Path) -> Result<()> {
    match fs::read_dir(path) {
        Ok(mut entries) => match entries.next() {
            None => Ok(()),
            Some(_) => Err(Error::Occupied { path: path.to_path_buf() }),
        },
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        Err(e) if e.kind() == ErrorKind::NotADirectory => {
            Err(Error::Occupied { path: path.to_path_buf() })
        }
        Err(e) => Err(Error::io("read", path)(e)),
    }
}

fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Makes renames in a folder durable; only Unix can open a folder for that.
fn sync_folder(path: &Path) -> Result<()> {
    if cfg!(unix) {
        File::open(path).and_then(|f| f.sync_all()).map_err(Error::io("sync", path))?;
    }
    Ok(())
}
