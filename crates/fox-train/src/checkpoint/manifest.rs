//! manifest.json: what a checkpoint should hold.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use fox_base::durable;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;

use crate::{Error, Result, files};

const FILE: &str = "manifest.json";

/// Size and checksum of a file.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    bytes: u64,
    xxh3_128: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    files: BTreeMap<String, Entry>,
}

/// Writes the manifest of a folder whose files are all there.
pub(super) fn write(folder: &Path) -> Result<()> {
    let mut list = BTreeMap::new();
    for (name, path) in files_below(folder)? {
        list.insert(name, entry(&path)?);
    }
    files::write_json(&folder.join(FILE), &Manifest { files: list })
}

/// An error that says what is missing or changed.
pub(super) fn verify(folder: &Path) -> Result<()> {
    let path = folder.join(FILE);
    let damaged = |detail: String| Error::Damaged { path: folder.to_path_buf(), detail };
    if !path.exists() {
        return Err(damaged("it has no manifest, so it was not finished".into()));
    }
    let manifest: Manifest = files::read_json(&path)?;
    for (name, wanted) in &manifest.files {
        let path = folder.join(name);
        if !path.is_file() {
            return Err(damaged(format!("{name} is missing")));
        }
        let found = entry(&path)?;
        if found.bytes != wanted.bytes {
            return Err(damaged(format!("{name} has {} of {} bytes", found.bytes, wanted.bytes)));
        }
        if found != *wanted {
            return Err(damaged(format!("the checksum of {name} differs")));
        }
    }
    Ok(())
}

fn entry(path: &Path) -> Result<Entry> {
    let mut file = File::open(path).map_err(Error::io("open", path))?;
    let (mut hasher, mut bytes) = (XxHash3_128::new(), 0);
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = file.read(&mut buffer).map_err(Error::io("read", path))?;
        if read == 0 {
            break;
        }
        hasher.write(&buffer[..read]);
        bytes += read as u64;
    }
    Ok(Entry { bytes, xxh3_128: format!("{:032x}", hasher.finish_128()) })
}

/// Files in a folder and one level below, by their name relative to it.
fn files_below(folder: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    for path in durable::entries(folder)? {
        let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().to_string();
        if path.is_dir() {
            for inner in durable::entries(&path)? {
                found.push((format!("{}/{}", name(&path), name(&inner)), inner));
            }
        } else if name(&path) != FILE {
            found.push((name(&path), path));
        }
    }
    Ok(found)
}
