//! Text corpora: files and folders of documents.
//!
//! | ending | documents |
//! |---|---|
//! | `.txt`, `.text`, `.md`, and any other UTF-8 file | the whole file, or the texts between separators |
//! | `.jsonl`, `.ndjson`, `.json` | one JSON object per line, text in a chosen field |
//! | `.parquet` | one row, text in a chosen column (feature `parquet`) |
//!
//! Text and JSON lines may also end in `.zst` or `.gz`. A folder gives the files of these kinds in it and below it, in the
//! order of their paths; binary files, hidden ones, run folders and prepared data are skipped. Empty documents are skipped too, and counted. A UTF-8
//! byte order mark at the start of a file does not belong to its text.

mod decompress;
mod encoding;
mod files;
mod jsonl;
#[cfg(feature = "parquet")]
mod parquet;
mod source;
mod text;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

pub use files::{CorpusFile, Format};

use crate::error::{Error, Result};

/// How to find documents in files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CorpusOptions {
    /// Field of a JSON object, or column of a Parquet file, that holds the text.
    pub text_field: String,
    /// What separates the documents of a plain text file; without it a file is one document.
    pub separator: Option<String>,
}

impl Default for CorpusOptions {
    fn default() -> Self {
        Self { text_field: "text".to_owned(), separator: None }
    }
}

/// One document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// The text.
    pub text: String,
}

/// A corpus: a file, or all files of a folder.
#[derive(Debug, Clone)]
pub struct Corpus {
    root: PathBuf,
    files: Vec<CorpusFile>,
    options: CorpusOptions,
}

impl Corpus {
    /// Finds the files of a corpus. Nothing is read yet.
    ///
    /// # Errors
    /// A path that does not exist, a file of unknown kind, a folder without any of a known kind.
    pub fn open(path: &Path, options: CorpusOptions) -> Result<Self> {
        if options.separator.as_deref() == Some("") {
            return Err(Error::BadOption {
                option: "separator",
                detail: "an empty text separates nothing; leave it out or give some text".into(),
            });
        }
        let corpus = Self { root: path.to_path_buf(), files: files::find(path)?, options };
        corpus.check_not_empty()?;
        Ok(corpus)
    }

    /// The files in the order in which they are read.
    pub fn files(&self) -> &[CorpusFile] {
        &self.files
    }

    /// Leaves out the files in a folder, which need not be there.
    pub(crate) fn leave_out(&mut self, folder: &Path) -> Result<()> {
        let (Ok(folder), Ok(root)) = (folder.canonicalize(), self.root.canonicalize()) else {
            return Ok(());
        };
        // Links to folders are not followed, so the paths below the root suffice.
        if let Ok(inside) = folder.strip_prefix(root)
            && inside != Path::new("")
        {
            let inside = self.root.join(inside);
            self.files.retain(|file| !file.path.starts_with(&inside));
        }
        self.check_not_empty()
    }

    fn check_not_empty(&self) -> Result<()> {
        if self.files.is_empty() {
            return Err(Error::NoDocuments { path: self.root.clone() });
        }
        Ok(())
    }

    /// Bytes of all files as they lie on the disk.
    pub fn total_bytes(&self) -> u64 {
        self.files.iter().map(|f| f.bytes).sum()
    }

    /// The documents in order. After an error there are no more.
    pub fn documents(&self) -> Documents {
        Documents {
            files: self.files.clone().into_iter(),
            options: self.options.clone(),
            current: None,
            file: None,
            bytes_read: Arc::new(AtomicU64::new(0)),
            empty: 0,
            failed: false,
        }
    }

    /// The rows in order, with all their columns: lines of JSON or rows of Parquet. After an error there
    /// are no more.
    pub fn records(&self) -> impl Iterator<Item = Result<Record>> {
        let mut failed = false;
        let rows = self.files.iter().flat_map(|file| match records_of(file) {
            Ok(rows) => rows,
            Err(error) => Box::new(std::iter::once(Err(error))),
        });
        rows.map_while(move |row| {
            let item = (!failed).then_some(row);
            failed |= matches!(item, Some(Err(_)));
            item
        })
    }
}

fn records_of(file: &CorpusFile) -> Result<RecordsOfFile> {
    match file.format {
        Format::Text => Err(Error::NotRecords { path: file.path.clone() }),
        Format::JsonLines => {
            Ok(jsonl::records(file, decompress::open(file, Arc::new(AtomicU64::new(0)))?))
        }
        #[cfg(feature = "parquet")]
        Format::Parquet => parquet::records(file),
        #[cfg(not(feature = "parquet"))]
        Format::Parquet => Err(no_parquet(file)),
    }
}

#[cfg(not(feature = "parquet"))]
fn no_parquet(file: &CorpusFile) -> Error {
    Error::FeatureMissing {
        path: file.path.clone(),
        what: "the Parquet reader",
        feature: "parquet",
    }
}

/// One row of a table: a JSON object with all its columns.
pub type Record = serde_json::Map<String, serde_json::Value>;

type RecordsOfFile = Box<dyn Iterator<Item = Result<Record>> + Send>;
type DocumentsOfFile = Box<dyn Iterator<Item = Result<Document>> + Send>;

/// Iterator over the documents of a corpus.
pub struct Documents {
    files: std::vec::IntoIter<CorpusFile>,
    options: CorpusOptions,
    current: Option<DocumentsOfFile>,
    file: Option<CorpusFile>,
    bytes_read: Arc<AtomicU64>,
    empty: u64,
    failed: bool,
}

impl Documents {
    /// A counter of the bytes read so far, as they lie on the disk; it may be watched from elsewhere.
    pub fn bytes_read(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.bytes_read)
    }

    /// The file of the last document; the last file after the end.
    pub fn file(&self) -> Option<&CorpusFile> {
        self.file.as_ref()
    }

    /// Empty documents skipped so far.
    pub fn empty(&self) -> u64 {
        self.empty
    }

    fn open(&self, file: &CorpusFile) -> Result<DocumentsOfFile> {
        match file.format {
            Format::Text => {
                let contents = decompress::open(file, Arc::clone(&self.bytes_read))?;
                text::documents(file, contents, self.options.separator.as_deref())
            }
            Format::JsonLines => {
                let contents = decompress::open(file, Arc::clone(&self.bytes_read))?;
                Ok(jsonl::documents(file, contents, &self.options.text_field))
            }
            Format::Parquet => self.open_parquet(file),
        }
    }

    #[cfg(feature = "parquet")]
    fn open_parquet(&self, file: &CorpusFile) -> Result<DocumentsOfFile> {
        let documents = parquet::documents(file, &self.options.text_field)?;
        self.bytes_read.fetch_add(file.bytes, std::sync::atomic::Ordering::Relaxed);
        Ok(documents)
    }

    #[cfg(not(feature = "parquet"))]
    fn open_parquet(&self, file: &CorpusFile) -> Result<DocumentsOfFile> {
        Err(no_parquet(file))
    }

    fn advance(&mut self) -> Option<Result<Document>> {
        loop {
            if let Some(current) = &mut self.current {
                match current.next() {
                    Some(Ok(document)) if document.text.is_empty() => {
                        self.empty += 1;
                        continue;
                    }
                    Some(document) => return Some(document),
                    None => self.current = None,
                }
            }
            let file = self.file.insert(self.files.next()?).clone();
            match self.open(&file) {
                Ok(documents) => self.current = Some(documents),
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

impl Iterator for Documents {
    type Item = Result<Document>;

    fn next(&mut self) -> Option<Result<Document>> {
        if self.failed {
            return None;
        }
        let item = self.advance();
        self.failed = matches!(item, Some(Err(_)));
        item
    }
}
