//! Result files: a reader never meets half of one.

use std::fs;
use std::path::{Path, PathBuf};

use fox_base::durable;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Writes a whole file, or nothing; creates the folders above it.
pub fn write_whole(path: &Path, contents: &[u8]) -> Result<()> {
    if let Some(folder) = path.parent().filter(|p| !p.as_os_str().is_empty()) {
        durable::create_folder(folder)?;
    }
    Ok(durable::write(path, contents)?)
}

/// Writes files by name into a folder; returns their paths.
pub(crate) fn write_all<N: AsRef<Path>>(
    folder: &Path,
    files: impl IntoIterator<Item = (N, Vec<u8>)>,
) -> Result<Vec<PathBuf>> {
    let write = |(name, contents): (N, Vec<u8>)| {
        let path = folder.join(name);
        write_whole(&path, &contents)?;
        Ok(path)
    };
    files.into_iter().map(write).collect()
}

/// A result, and what exactly it is a result of.
#[derive(Serialize, Deserialize)]
struct OnFile<T> {
    evaluation: String,
    result: T,
}

/// The result of `evaluation` (everything that decides it, in words): the one in the file if it is of the
/// same, otherwise a new one, which is then written there.
pub fn kept<T: Serialize + DeserializeOwned>(
    path: &Path,
    evaluation: &str,
    make: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let known: Option<OnFile<T>> =
        fs::read(path).ok().and_then(|text| serde_json::from_slice(&text).ok());
    if let Some(known) = known.filter(|known| known.evaluation == evaluation) {
        return Ok(known.result);
    }
    let new = OnFile { evaluation: evaluation.to_string(), result: make()? };
    write_whole(path, &json(path, &new)?)?;
    Ok(new.result)
}

/// The JSON of a result for the file at `path`.
pub(crate) fn json(path: &Path, value: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec_pretty(value)
        .map_err(|e| Error::BadFile { path: path.to_path_buf(), detail: e.to_string() })
}

/// A name that can be part of a file name: letters, digits, `-`, `_` and `.`; others become `-`.
pub fn file_stem(name: &str) -> String {
    let keep = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    let stem: String = name.chars().map(keep).collect();
    let stem = stem.trim_matches(['-', '.']);
    if stem.is_empty() { "model".into() } else { stem.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_replaced_as_a_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/er/file.json");
        write_whole(&path, b"one").unwrap();
        write_whole(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn results_are_made_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("r.json");
        let ask = |evaluation: &str, value: u32| kept(&path, evaluation, || Ok(value)).unwrap();
        assert_eq!((ask("a", 1), ask("a", 2), ask("b", 3), ask("b", 4)), (1, 1, 3, 3));
        fs::write(&path, "{").unwrap();
        assert_eq!(ask("b", 5), 5);
    }

    #[test]
    fn names_become_file_names() {
        assert_eq!(file_stem("FoX (Pro)"), "FoX--Pro");
        assert_eq!(file_stem("../a"), "a");
        assert_eq!(file_stem("/"), "model");
    }
}
