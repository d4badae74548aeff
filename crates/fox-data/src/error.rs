//! The error type of this crate. Every message names the file and the remedy.

use std::io;
use std::path::{Path, PathBuf};

use fox_base::FileError;

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong with data. Each variant's message is one sentence that names the file and the remedy.
// The messages name the fields.
#[allow(missing_docs)]
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A path that does not exist.
    #[error("{} does not exist; check the data path", path.display())]
    Missing { path: PathBuf },
    /// A task that does not exist.
    #[error("unknown task {name}; the tasks are {}", crate::task::names().collect::<Vec<_>>().join(", "))]
    UnknownTask { name: String },
    /// A task of sizes that no case can be written in.
    #[error("task {name}: {detail}")]
    BadTask { name: String, detail: String },
    /// The operating system refused something.
    #[error(transparent)]
    File(FileError),
    /// A file that is neither UTF-8 text nor of a known corpus format.
    #[error(
        "{} is not UTF-8 text and has no known corpus ending; use text, .jsonl, .ndjson, .json (each also with .zst or .gz) or .parquet",
        path.display()
    )]
    UnknownFormat { path: PathBuf },
    /// A folder with files, but without a text.
    #[error("{} holds no text, only {found}; name a folder with UTF-8 text files, JSON lines or Parquet", path.display())]
    NoText { path: PathBuf, found: String },
    /// A pipe, a socket or a device in place of a file.
    #[error(
        "{} is {kind}, not a file, and a corpus is read more than once; write its contents to a file first",
        path.display()
    )]
    NotAFile { path: PathBuf, kind: &'static str },
    /// A link whose target does not exist.
    #[error(
        "{} is a link to something that does not exist; restore its target or remove the link",
        path.display()
    )]
    DanglingLink { path: PathBuf },
    /// A link to a folder inside of a corpus.
    #[error(
        "{} is a link to a folder, and those are not followed; put the folder itself there or remove the link",
        path.display()
    )]
    LinkedFolder { path: PathBuf },
    /// A file that has another size than when it was found.
    #[error(
        "{} changed while it was read (it had {expected} bytes, now it has {found}); run the same command again when nothing writes to it",
        path.display()
    )]
    ChangedWhileRead { path: PathBuf, expected: u64, found: u64 },
    /// Something that this build leaves out.
    #[error(
        "{} needs {what}, which this build leaves out; build with `--features {feature}`",
        path.display()
    )]
    FeatureMissing { path: PathBuf, what: &'static str, feature: &'static str },
    /// A corpus without a single document.
    #[error("{} holds no documents; check the path and the file endings", path.display())]
    NoDocuments { path: PathBuf },
    /// Compressed data that do not decompress.
    #[error(
        "{} is not whole {format} data ({detail}); fetch or compress the file again",
        path.display()
    )]
    Decompress { path: PathBuf, format: &'static str, detail: String },
    /// Text that is not UTF-8.
    #[error(
        "{} is not UTF-8 text near byte {offset}; convert it to UTF-8 first",
        path.display()
    )]
    NotUtf8 { path: PathBuf, offset: u64 },
    /// Text in another encoding.
    #[error(
        "{} is {encoding}, not UTF-8 text; convert it first, e.g. with `iconv -t UTF-8`",
        path.display()
    )]
    OtherEncoding { path: PathBuf, encoding: &'static str },
    /// A document that would fill the memory, such as a compressed file of one endless line.
    #[error(
        "{}{place} is longer than {limit} bytes; split it into several documents",
        path.display()
    )]
    DocumentTooLarge { path: PathBuf, place: String, limit: u64 },
    /// A line that is not a JSON object.
    #[error(
        "{} line {line} is not a JSON object ({detail}); correct or remove the line",
        path.display()
    )]
    BadJsonLine { path: PathBuf, line: u64, detail: String },
    /// A JSON object or table without the wanted text field.
    #[error(
        "{} {location} has no text field \"{field}\"; name the field that holds the text",
        path.display()
    )]
    MissingField { path: PathBuf, location: String, field: String },
    /// A text field that holds no text.
    #[error(
        "{} line {line} has {found} in its text field \"{field}\", expected a string; correct or remove the line",
        path.display()
    )]
    NotText { path: PathBuf, line: u64, field: String, found: &'static str },
    /// Plain text where rows with columns are needed.
    #[error(
        "{} is plain text, but rows with columns are needed; use .jsonl (also with .zst or .gz) or .parquet",
        path.display()
    )]
    NotRecords { path: PathBuf },
    /// A Parquet file that cannot be read.
    #[error("{} cannot be read as Parquet ({detail}); fetch the file again", path.display())]
    Parquet { path: PathBuf, detail: String },
    /// Array metadata of a kind that is not supported.
    #[error("{} cannot be read as a Zarr token array: {detail}", path.display())]
    Zarr { path: PathBuf, detail: String },
    /// A missing chunk, which is not read as zeros.
    #[error(
        "chunk {} is missing from the Zarr array; download the array completely",
        path.display()
    )]
    MissingChunk { path: PathBuf },
    /// A chunk that does not decode.
    #[error("chunk {} is damaged ({detail}); download it again", path.display())]
    BadChunk { path: PathBuf, detail: String },
    /// An unknown tokenizer name.
    #[error(
        "\"{name}\" is not a tokenizer; use bytes, gpt2, json-gpt2, synthetic, or the path of a tokenizer.json"
    )]
    UnknownTokenizer { name: String },
    /// A tokenizer file that cannot be used.
    #[error("{} is not a usable tokenizer: {detail}", path.display())]
    BadTokenizer { path: PathBuf, detail: String },
    /// A tokenizer that failed on a text.
    #[error("the tokenizer {tokenizer} failed: {detail}")]
    Tokenize { tokenizer: String, detail: String },
    /// A token id that the tokenizer does not have.
    #[error(
        "token {id} is outside the vocabulary of {vocab_size}; use the tokenizer that made the tokens"
    )]
    UnknownToken { id: u32, vocab_size: usize },
    /// Tokens made by another tokenizer than the one in use.
    #[error(
        "{} was made with tokenizer {found}, not {expected}; prepare the corpus again or use that tokenizer",
        path.display()
    )]
    WrongTokenizer { path: PathBuf, found: String, expected: String },
    /// A damaged shard.
    #[error(
        "shard {} is damaged ({detail}); run the same `fox prepare` again to rebuild it, or restore it from a copy",
        path.display()
    )]
    BadShard { path: PathBuf, detail: String },
    /// A damaged index.
    #[error(
        "index {} is damaged ({detail}); run the same `fox prepare` again to rebuild it, or restore it from a copy",
        path.display()
    )]
    BadIndex { path: PathBuf, detail: String },
    /// A folder without prepared data.
    #[error(
        "{} holds no prepared data (index.json) and no Zarr array (.zarray, train.zarr); run `fox prepare` first",
        path.display()
    )]
    NotADataset { path: PathBuf },
    /// Prepared data without the requested split.
    #[error(
        "{} has no {split} documents; prepare it with held-out documents or choose the other split",
        path.display()
    )]
    EmptySplit { path: PathBuf, split: &'static str },
    /// An output folder that holds another preparation.
    #[error(
        "{} holds another preparation ({detail}); choose another folder or remove this one",
        path.display()
    )]
    DifferentPreparation {
        path: PathBuf,
        detail: String,
        /// Whether the options are the same and only the corpus differs.
        same_options: bool,
    },
    /// Another process prepares into the same folder.
    #[error(
        "another process{} is preparing into {}; wait until it has ended or choose another folder",
        pid.map(|pid| format!(" ({pid})")).unwrap_or_default(),
        path.display()
    )]
    Locked { path: PathBuf, pid: Option<u32> },
    /// An output folder with other things in it.
    #[error(
        "{} is not empty and has no preparation to resume; choose an empty folder",
        path.display()
    )]
    NotEmpty { path: PathBuf },
    /// An option with an invalid value.
    #[error("{option}: {detail}")]
    BadOption { option: &'static str, detail: String },
    /// Windows that fit no document.
    #[error(
        "a sequence of {window} tokens is longer than any document (the longest has {longest}); use shorter sequences or pack documents"
    )]
    WindowTooLong { window: usize, longest: u64 },
    /// Too little data for one batch.
    #[error(
        "the data give {windows} sequences of {window} tokens, fewer than one batch of {batch}; use a smaller batch, shorter sequences or more data"
    )]
    BatchTooLarge { windows: u64, window: usize, batch: usize },
    /// A loader state of another data set or another loader configuration.
    #[error(
        "the saved loader state belongs to other data or settings ({found:016x}, now {expected:016x}); resume with the data, sequence length, batch size, order and seed of the run"
    )]
    WrongLoaderState { found: u64, expected: u64 },
    /// A batch beyond the end.
    #[error("batch {batch} is beyond the last one ({batches} in all)")]
    NoSuchBatch { batch: u64, batches: u64 },
    /// A document number beyond the end.
    #[error("document {document} is beyond the last one ({documents} in all)")]
    NoSuchDocument { document: u64, documents: u64 },
    /// A range outside of a document.
    #[error(
        "tokens {start} to {start}+{len} are outside document {document} of {document_len} tokens"
    )]
    OutsideDocument { document: u64, start: u64, len: usize, document_len: u64 },
    /// A progress callback asked to stop.
    #[error("stopped; run the same command again to resume after the finished shards")]
    Stopped,
    /// A thread ended without a result.
    #[error("a {thread} thread ended unexpectedly; this is a defect of fox, please report it")]
    ThreadLost { thread: &'static str },
}

impl Error {
    /// For `map_err`: says what was tried with which path.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let named = FileError::at(action, path);
        move |source| named(source).into()
    }
}

impl From<FileError> for Error {
    /// A missing file gets its own sentence.
    fn from(error: FileError) -> Self {
        match error.source.kind() {
            io::ErrorKind::NotFound => Self::Missing { path: error.path },
            _ => Self::File(error),
        }
    }
}
