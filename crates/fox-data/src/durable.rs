//! Files that are either whole or not there: written aside, synced, renamed.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// The name a file has until it is whole.
pub(crate) fn temporary_path(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".partial");
    path.with_file_name(name)
}

/// Syncs a finished temporary file, gives it its name, and syncs the folder so that the name lasts.
pub(crate) fn finish(file: File, temporary: &Path, path: &Path) -> Result<()> {
    file.sync_all().map_err(Error::io("sync", temporary))?;
    drop(file);
    fs::rename(temporary, path).map_err(Error::io("rename", temporary))?;
    sync_folder_of(path)
}

/// Writes a small file whole.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let temporary = temporary_path(path);
    let mut file = File::create(&temporary).map_err(Error::io("create", &temporary))?;
    file.write_all(bytes).map_err(Error::io("write", &temporary))?;
    finish(file, &temporary, path)
}

/// Creates a folder and those above it.
pub(crate) fn create_folder(path: &Path) -> Result<()> {
    fs::create_dir_all(path).map_err(Error::io("create folder", path))
}

#[cfg(unix)]
fn sync_folder_of(path: &Path) -> Result<()> {
    let Some(folder) = path.parent().filter(|p| !p.as_os_str().is_empty()) else {
        return Ok(());
    };
    File::open(folder).and_then(|f| f.sync_all()).map_err(Error::io("sync folder", folder))
}

/// Folders cannot be synced elsewhere; the file system's own journal has to do.
#[cfg(not(unix))]
fn sync_folder_of(_path: &Path) -> Result<()> {
    Ok(())
}
