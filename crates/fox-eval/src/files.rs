//! Result files: written aside and renamed, so that a reader never meets half of one.

use std::fs;
use std::io::Write as _;
use std::path::Path;

use crate::{Error, Result};

/// Writes a whole file, or nothing.
pub fn write_whole(path: &Path, contents: &[u8]) -> Result<()> {
    if let Some(folder) = path.parent().filter(|p| !p.as_os_str().is_empty()) {
        fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
    }
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".tmp");
    let aside = path.with_file_name(name);
    let written = fs::File::create(&aside).and_then(|mut file| {
        file.write_all(contents)?;
        file.sync_all()
    });
    written.map_err(Error::io("write", &aside))?;
    fs::rename(&aside, path).map_err(Error::io("write", path))
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
    fn names_become_file_names() {
        assert_eq!(file_stem("FoX (Pro)"), "FoX--Pro");
        assert_eq!(file_stem("../a"), "a");
        assert_eq!(file_stem("/"), "model");
    }
}
