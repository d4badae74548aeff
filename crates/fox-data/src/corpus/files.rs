//! Finding the files of a corpus.

use std::collections::BTreeMap;
use std::fs::{self, File, Metadata};
use std::io::{ErrorKind, Read};
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
        let mut found = FolderFiles::default();
        collect(path, "", &mut found)?;
        if found.files.is_empty() && !found.others.is_empty() {
            return Err(Error::NoText { path: path.to_path_buf(), found: found.others() });
        }
        found.files.sort_by(|a, b| a.name.cmp(&b.name));
        return Ok(found.files);
    }
    check_is_file(path, &metadata)?;
    let (format, compression) = match kind_of(path) {
        Some(kind) => kind,
        None if is_text(&head(path)?) => (Format::Text, Compression::None),
        None => return Err(Error::UnknownFormat { path: path.to_path_buf() }),
    };
    Ok(vec![CorpusFile {
        path: path.to_path_buf(),
        name: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        format,
        compression,
        bytes: metadata.len(),
    }])
}

/// The files of a folder.
#[derive(Default)]
struct FolderFiles {
    files: Vec<CorpusFile>,
    /// Number of files that are no text, by ending.
    others: BTreeMap<String, u64>,
}

impl FolderFiles {
    /// The other files in words, e.g. `12 .png and 1 .pdf`.
    fn others(&self) -> String {
        let mut kinds: Vec<(&String, &u64)> = self.others.iter().collect();
        kinds.sort_by_key(|(ending, count)| (std::cmp::Reverse(**count), *ending));
        let all: Vec<String> = kinds.iter().map(|(ending, n)| format!("{n} {ending}")).collect();
        match all.split_at(all.len().min(MOST_KINDS)) {
            (shown, []) => shown.join(", "),
            (shown, _) => format!("{} and others", shown.join(", ")),
        }
    }
}

/// Files of a run or of prepared data, whose folders are no part of a corpus.
const OWN_FILES: [&str; 2] = ["run.json", "prepare.json"];
/// Endings that a message lists.
const MOST_KINDS: usize = 4;

/// Text of any ending is read; hidden files, other files, run folders and prepared data are passed over. What might be
/// documents and cannot be read is an error: a corpus must not become smaller silently.
fn collect(folder: &Path, prefix: &str, found: &mut FolderFiles) -> Result<()> {
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
            if !OWN_FILES.iter().any(|own| path.join(own).is_file()) {
                collect(&path, &format!("{name}/"), found)?;
            }
            continue;
        }
        let metadata = look_at(&path)?;
        // Links to folders are not followed, so that a circle of links cannot trap the walk.
        if metadata.is_dir() {
            return Err(Error::LinkedFolder { path });
        }
        let kind = match kind_of(&path) {
            // A folder of code has JSON files that are not JSON lines.
            Some((Format::JsonLines, Compression::None)) if is_text_of_json(&path, &metadata)? => {
                Some((Format::Text, Compression::None))
            }
            Some(kind) => Some(kind),
            None if metadata.len() > 0 && metadata.is_file() && is_text(&head(&path)?) => {
                Some((Format::Text, Compression::None))
            }
            None => None,
        };
        let Some((format, compression)) = kind else {
            let ending = path.extension().map(|ending| format!(".{}", ending.to_string_lossy()));
            let ending = ending.unwrap_or_else(|| "without an ending".into());
            *found.others.entry(ending).or_default() += 1;
            continue;
        };
        check_is_file(&path, &metadata)?;
        found.files.push(CorpusFile { path, name, format, compression, bytes: metadata.len() });
    }
    Ok(())
}

/// Bytes that show whether a file is text.
const HEAD: u64 = 8192;

/// The first bytes of a file.
fn head(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(Error::io("open", path))?;
    file.take(HEAD).read_to_end(&mut bytes).map_err(Error::io("read", path))?;
    Ok(bytes)
}

/// Whether the beginning of a file is UTF-8 without control characters other than white space.
fn is_text(head: &[u8]) -> bool {
    let whole = match std::str::from_utf8(head) {
        Ok(_) => head,
        // The last character may be cut.
        Err(error) if error.error_len().is_none() => &head[..error.valid_up_to()],
        Err(_) => return false,
    };
    let control = |byte: &u8| byte.is_ascii_control() && !b"\t\n\r\x0c\x1b".contains(byte);
    !whole.iter().any(control)
}

/// Whether a file that ends in `.json` is one JSON value over many lines, as configurations are, and not JSON lines.
fn is_text_of_json(path: &Path, metadata: &Metadata) -> Result<bool> {
    if path.extension().is_none_or(|ending| !ending.eq_ignore_ascii_case("json"))
        || !metadata.is_file()
    {
        return Ok(false);
    }
    let head = head(path)?;
    let line = head.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let complete = line.len() < head.len() || (head.len() as u64) < HEAD;
    let object = serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(line).is_ok();
    Ok(complete && !object && is_text(&head))
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
        for name in ["z.txt", "a.jsonl", "b/c/d.txt", "b/.hidden.txt"] {
            fs::write(folder.path().join(name), "x").unwrap();
        }
        fs::write(folder.path().join("notes.pdf"), b"%PDF-1.7\n\x00\xff").unwrap();
        let names: Vec<_> = find(folder.path()).unwrap().into_iter().map(|f| f.name).collect();
        assert_eq!(names, ["a.jsonl", "b/c/d.txt", "z.txt"]);
    }

    #[test]
    fn text_of_any_ending_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let cut = format!("{}\u{e9}", "x".repeat(HEAD as usize - 1));
        for (name, bytes) in [
            ("main.rs", b"fn main() {}\n".as_slice()),
            ("Makefile", b"all:\n\tcargo build\n"),
            ("long.csv", cut.as_bytes()),
            ("package.json", b"{\n  \"name\": \"fox\"\n}\n"),
            ("lines.json", b"{\"text\": \"a\"}\n{\"text\": \"b\"}\n"),
            ("empty.py", b""),
            ("latin.tex", b"caf\xe9\n"),
            ("a.png", b"\x89PNG\r\n\x1a\n\x00"),
            ("b.png", b"\x89PNG\r\n\x1a\n\x00"),
        ] {
            fs::write(folder.path().join(name), bytes).unwrap();
        }
        for own in ["runs/mine/run.json", "prepared/prepare.json"] {
            let path = folder.path().join(own);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "{}").unwrap();
        }
        let files = find(folder.path()).unwrap();
        let kinds: Vec<_> = files.iter().map(|f| (f.name.as_str(), f.format)).collect();
        let text = |name| (name, Format::Text);
        let lines = ("lines.json", Format::JsonLines);
        let texts = ["Makefile", "long.csv", "main.rs", "package.json"].map(text);
        assert_eq!(kinds, [texts[0], lines, texts[1], texts[2], texts[3]]);
        for name in ["Makefile", "lines.json", "long.csv", "main.rs", "package.json"] {
            fs::remove_file(folder.path().join(name)).unwrap();
        }
        let said = find(folder.path()).unwrap_err().to_string();
        assert!(
            said.contains("holds no text, only 2 .png, 1 .py, 1 .tex; name a folder"),
            "{said}"
        );
    }
}
