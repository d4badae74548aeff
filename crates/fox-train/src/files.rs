//! Small files that are whole or not there, and folders whose changes last.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Error, Result};

/// Writes a file aside, syncs it and gives it its name.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".partial");
    let aside = path.with_file_name(name);
    let mut file = File::create(&aside).map_err(Error::io("create", &aside))?;
    file.write_all(bytes).map_err(Error::io("write", &aside))?;
    file.sync_all().map_err(Error::io("sync", &aside))?;
    fs::rename(&aside, path).map_err(Error::io("rename", &aside))?;
    sync_folder(parent(path))
}

/// Writes a value as JSON.
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let mut text = serde_json::to_string_pretty(value).map_err(|e| Error::Encode {
        path: path.to_path_buf(),
        format: "JSON",
        detail: e.to_string(),
    })?;
    text.push('\n');
    write(path, text.as_bytes())
}

/// Reads a value from JSON.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let text = fs::read_to_string(path).map_err(Error::io("read", path))?;
    serde_json::from_str(&text)
        .map_err(|e| Error::Damaged { path: path.to_path_buf(), detail: e.to_string() })
}

/// Creates a folder and those above it.
pub(crate) fn create_folder(path: &Path) -> Result<()> {
    fs::create_dir_all(path).map_err(Error::io("create", path))
}

/// Makes renames in a folder durable; only Unix can open a folder for that.
pub(crate) fn sync_folder(path: &Path) -> Result<()> {
    if cfg!(unix) {
        File::open(path).and_then(|f| f.sync_all()).map_err(Error::io("sync", path))?;
    }
    Ok(())
}

/// The folder of a path; the current one for a bare name.
pub(crate) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Names in a folder, sorted; none when it does not exist.
pub(crate) fn names(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(Error::io("read", folder)(e)),
    };
    let mut names = Vec::new();
    for entry in entries {
        names.push(entry.map_err(Error::io("read", folder))?.path());
    }
    names.sort();
    Ok(names)
}
