//! The crate's error: what was asked for, what is wrong with it, and what would be right.

use std::io;
use std::path::{Path, PathBuf};

use fox_base::{FileError, Setting};

/// What can go wrong in an evaluation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The data hold no document that could be evaluated.
    #[error("no document has {length} tokens (the longest has {longest}); use a shorter length")]
    TooShort {
        /// Tokens that were asked for.
        length: usize,
        /// Tokens of the longest document.
        longest: u64,
    },
    /// A document, text or haystack without tokens.
    #[error("{what} is empty")]
    Empty {
        /// What has no tokens.
        what: String,
    },
    /// The model does not know all ids of the tokenizer or the data.
    #[error(
        "the model {model} has {model_vocab} token ids, but the {source_name} has {needed}; \
         evaluate it with the tokenizer it was trained with"
    )]
    Vocabulary {
        /// Name of the model.
        model: String,
        /// Its vocabulary.
        model_vocab: usize,
        /// `tokenizer` or `data`.
        source_name: &'static str,
        /// The vocabulary it would need.
        needed: usize,
    },
    /// A model whose output is NaN or infinite.
    #[error(
        "the model {model} computes {what} of {value}, which is not a finite number; its weights are damaged or \
         its training diverged, so evaluate an earlier checkpoint"
    )]
    NotFinite {
        /// Name of the model.
        model: String,
        /// What is not finite, e.g. `a loss at position 3`.
        what: String,
        /// NaN or an infinity.
        value: f64,
    },
    /// A state file belongs to another evaluation.
    #[error("{path} holds another evaluation ({found}, not {expected}); remove it or name another folder", path = path.display())]
    OtherState {
        /// The file.
        path: PathBuf,
        /// What it holds.
        found: String,
        /// What was asked for.
        expected: String,
    },
    /// A file whose contents make no sense.
    #[error("{path}: {detail}", path = path.display())]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong and what would be right.
        detail: String,
    },
    /// A row of a task's data without a column that the task needs.
    #[error(
        "row {row} of task {task} has no column \"{column}\" (it has {columns}); rename the data's column, \
         or write a task file with their names"
    )]
    MissingColumn {
        /// Name of the task.
        task: String,
        /// Number of the row, from 1.
        row: usize,
        /// What the task asks for.
        column: String,
        /// What the row has.
        columns: String,
    },
    /// A row of a task's data that cannot be asked.
    #[error("row {row} of task {task}: {detail}")]
    Item {
        /// Name of the task.
        task: String,
        /// Number of the row, from 1.
        row: usize,
        /// What is wrong.
        detail: String,
    },
    /// A file cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// An argument is out of range.
    #[error("{0}")]
    Argument(String),
    /// A setting that would have to change.
    #[error("{detail}")]
    Setting {
        /// The setting.
        setting: Setting,
        /// What is wrong and what would be right.
        detail: String,
    },
    /// The model's error.
    #[error(transparent)]
    Model(#[from] fox_model::Error),
    /// The engine's error.
    #[error(transparent)]
    Tensor(#[from] fox_tensor::Error),
    /// The data's error.
    #[error(transparent)]
    Data(#[from] fox_data::Error),
    /// Another process is lost or does not fit.
    #[error(transparent)]
    Group(#[from] fox_dist::Error),
}

impl Error {
    /// The setting that would have to change, for callers that name it differently.
    pub fn setting(&self) -> Option<Setting> {
        match self {
            Error::Setting { setting, .. } => Some(*setting),
            _ => None,
        }
    }

    /// Shorthand for [`Error::Setting`].
    pub(crate) fn of_setting(setting: Setting, detail: impl Into<String>) -> Self {
        Error::Setting { setting, detail: detail.into() }
    }

    /// For `map_err` on file operations.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let named = FileError::at(action, path);
        move |source| named(source).into()
    }
}

/// Results of evaluations.
pub type Result<T> = std::result::Result<T, Error>;
