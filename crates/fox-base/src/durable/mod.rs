//! Files and folders that are complete or absent, also after a crash.
//!
//! Each is written under a temporary name beside its destination, synced, renamed, and the folder above is synced so
//! that the name survives a power failure. A writer that fails removes its temporary file or folder.
//!
//! A folder may have several writers at once, see [`NewFolder`]. A file has one writer at a time, because its temporary
//! name follows from the final one, and the next writer overwrites what a killed one left; [`write_shared`] allows more.

mod file;
mod folder;
#[cfg(test)]
mod probe;

use std::io;
use std::path::{Path, PathBuf};

pub use file::{NewFile, write, write_shared};
pub use folder::{NewFolder, create_folder, entries, is_vacant, remove_folder, remove_leftovers};

use crate::FileError;

/// Suffix of a temporary name.
const PARTIAL: &str = ".partial";

type Result<T> = std::result::Result<T, FileError>;

/// The temporary name of a file or folder.
pub fn temporary_path(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(PARTIAL);
    path.with_file_name(name)
}

/// The folder of a path; the current one for a bare name.
fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// One call to the file system. Tests record these and let them fail.
fn call<T>(action: &'static str, path: &Path, call: impl FnOnce() -> io::Result<T>) -> Result<T> {
    #[cfg(test)]
    probe::before(action, path).map_err(FileError::at(action, path))?;
    call().map_err(FileError::at(action, path))
}

/// Syncs the names in a folder. Only Unix can open a folder for that; elsewhere the file system's journal must do.
fn sync_folder(path: &Path) -> Result<()> {
    if cfg!(unix) {
        call("sync", path, || std::fs::File::open(path)?.sync_all())?;
    }
    Ok(())
}
