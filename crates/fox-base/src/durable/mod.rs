//! Files and folders that are whole or absent, also after a crash.
//!
//! Each is made under a temporary name beside its place, synced, renamed, and the folder above is synced so
//! that the name lasts. Whoever fails on the way removes what it made; what a killed writer left behind is
//! replaced by the next writer of the same path, or removed by [`remove_leftovers`].
//!
//! The temporary name follows from the final one, so one path has one writer at a time; only
//! [`write_shared`] allows more.

mod file;
mod folder;
#[cfg(test)]
mod probe;

use std::io;
use std::path::{Path, PathBuf};

pub use file::{NewFile, write, write_shared};
pub use folder::{NewFolder, create_folder, entries, is_vacant, remove_folder, remove_leftovers};

use crate::FileError;

/// What a name ends with until the file or folder is whole.
const PARTIAL: &str = ".partial";

type Result<T> = std::result::Result<T, FileError>;

/// The name that a file or folder has until it is whole.
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

/// Makes the names in a folder last; only Unix can open a folder for that, elsewhere the file system's
/// journal has to do.
fn sync_folder(path: &Path) -> Result<()> {
    if cfg!(unix) {
        call("sync", path, || std::fs::File::open(path)?.sync_all())?;
    }
    Ok(())
}
