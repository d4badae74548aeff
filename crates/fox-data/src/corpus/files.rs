//! Finding the files of a corpus.

use std::fs::{self, Metadata};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// What a file holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Plain text.
    Text,
    /// One JSON object per line.
    JsonLines,
    /// Parquet.
    Parquet,
}

/// How a file is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compression {
    None,
    Zstd,
    Gzip,
}

/// One file of a corpus.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CorpusFile {
    /// Where it lies.
    pub path: PathBuf,
    /// Its path inside the corpus, with `/` between folders.
    pub name: String,
    /// What it holds.
    pub format: Format,
    pub(crate) compression: Compression,
    /// Its size on the disk.
    pub bytes: u64,
}

/// The files at `path`: itself, or those of the folder in the order of their names.
pub(super) fn find(path: &Path) -> Result<Vec<CorpusFile>> {
    let metadata = look_at(path)?;
    if metadata.is_dir() {
        let mut files = Vec::new();
        collect(path, "", &mut files)?;
        files.sort_by(|a, b| a.name.cmp(&b.name));
        return Ok(files);
    }
    check_is_file(path, &metadata)?;
    let (format, compression) =
        kind_of(path).ok_or_else(|| Error::UnknownFormat { path: path.to_path_buf() })?;
    Ok(vec![CorpusFile {
        path: path.to_path_buf(),
        name: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        format,
        compression,
        bytes: metadata.len(),
    }])
}

/// Hidden files and files of other kinds are passed over. What might be documents and cannot be read is an error: a corpus
/// must not become smaller silently.
fn collect(folder: &Path, prefix: &str, files: &mut Vec<CorpusFile>) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(Error::io("list", folder))? {
        let entry = entry.map_err(Error::io("list", folder))?;
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with('.') {
            continue;
        }
        let name = format!("{prefix}{name}");
        let kind = entry.file_type().map_err(Error::io("look at", &path))?;
        if kind.is_dir() {
            collect(&path, &format!("{name}/"), files)?;
            continue;
        }
        let metadata = look_at(&path)?;
        // Links to folders are not followed, so that a circle of links cannot trap the walk.
        if metadata.is_dir() {
            return Err(Error::LinkedFolder { path });
        }
        if let Some((format, compression)) = kind_of(&path) {
            check_is_file(&path, &metadata)?;
            files.push(CorpusFile { path, name, format, compression, bytes: metadata.len() });
        }
    }
    Ok(())
}

/// What is at a path, links followed.
fn look_at(path: &Path) -> Result<Metadata> {
    fs::metadata(path).map_err(|error| {
        if error.kind() == ErrorKind::NotFound && path.is_symlink() {
            return Error::DanglingLink { path: path.to_path_buf() };
        }
        Error::io("look at", path)(error)
    })
}

/// Opening a named pipe would block until another process writes to it.
fn check_is_file(path: &Path, metadata: &Metadata) -> Result<()> {
    if metadata.is_file() {
        return Ok(());
    }
    Err(Error::NotAFile { path: path.to_path_buf(), kind: special_kind(metadata) })
}

#[cfg(unix)]
fn special_kind(metadata: &Metadata) -> &'static str {
    use std::os::unix::fs::FileTypeExt;
    let kind = metadata.file_type();
    if kind.is_fifo() {
        "a named pipe"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a device"
    }
}

#[cfg(not(unix))]
fn special_kind(_metadata: &Metadata) -> &'static str {
    "something else"
}

fn kind_of(path: &Path) -> Option<(Format, Compression)> {
    let name = path.file_name()?.to_string_lossy().to_lowercase();
    let (stem, compression) = if let Some(stem) = name.strip_suffix(".zst") {
        (stem, Compression::Zstd)
    } else if let Some(stem) = name.strip_suffix(".gz") {
        (stem, Compression::Gzip)
    } else {
        (name.as_str(), Compression::None)
    };
    let format = match stem.rsplit_once('.')?.1 {
        "txt" | "text" | "md" => Format::Text,
        "jsonl" | "ndjson" | "json" => Format::JsonLines,
        "parquet" if compression == Compression::None => Format::Parquet,
        _ => return None,
    };
    Some((format, compression))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_endings_select_the_format() {
        let kind = |name: &str| kind_of(Path::new(name));
        assert_eq!(kind("a/b.txt"), Some((Format::Text, Compression::None)));
        assert_eq!(kind("b.JSONL.zst"), Some((Format::JsonLines, Compression::Zstd)));
        assert_eq!(kind("c4.json.gz"), Some((Format::JsonLines, Compression::Gzip)));
        assert_eq!(kind("x.parquet"), Some((Format::Parquet, Compression::None)));
        assert_eq!(kind("x.parquet.gz"), None);
        assert_eq!(kind("README.md"), Some((Format::Text, Compression::None)));
        assert_eq!(kind("paper.pdf"), None);
        assert_eq!(kind("noending"), None);
    }

    #[test]
    fn folders_are_walked_in_name_order() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("b/c")).unwrap();
        for name in ["z.txt", "a.jsonl", "b/c/d.txt", "b/.hidden.txt", "notes.pdf"] {
            fs::write(folder.path().join(name), "x").unwrap();
        }
        let names: Vec<_> = find(folder.path()).unwrap().into_iter().map(|f| f.name).collect();
        assert_eq!(names, ["a.jsonl", "b/c/d.txt", "z.txt"]);
    }
}
