//! The crate's error: it names the file, the field or the tensor, and the shapes.

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use fox_base::FileError;

use crate::TensorMismatch;

/// What can go wrong with a configuration, a checkpoint or a model.
// The messages name the fields.
#[allow(missing_docs)]
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A field of a configuration has an invalid value.
    #[error("{origin}: `{field}` {detail}")]
    Config { origin: String, field: String, detail: String },
    /// The file describes an unsupported model.
    #[error("{origin}: {detail}")]
    UnsupportedModel { origin: String, detail: String },
    /// A path without a checkpoint; the sentence describes the path.
    #[error("{0}")]
    NoCheckpoint(String),
    /// A JSON file cannot be parsed.
    #[error("{file} is not valid JSON: {detail}", file = file.display())]
    Json { file: PathBuf, detail: String },
    /// A file cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// A safetensors file is damaged.
    #[error("{file} is not a valid safetensors file: {detail}", file = file.display())]
    Safetensors { file: PathBuf, detail: String },
    /// Weights in a format that runs code when it is read.
    #[error(
        "{dir} has its weights as pytorch_model.bin, and reading those can run any code; convert them where you trust \
         it: python -c 'from transformers import AutoModelForCausalLM as A; A.from_pretrained(\"{dir}\")\
         .save_pretrained(\"OUT\")'",
        dir = dir.display()
    )]
    PickledWeights { dir: PathBuf },
    /// The tensors of a checkpoint do not match its configuration.
    #[error("the tensors in {dir} do not fit its config.json:{list}",
        dir = dir.display(), list = problem_list(problems))]
    Mismatch { dir: PathBuf, problems: Vec<TensorMismatch> },
    /// The file layout cannot express the options of this model.
    #[error("model_type `{target}` cannot express {options}", options = options.join(", "))]
    NotExpressible { target: &'static str, options: Vec<String> },
    /// The output exists and would be lost.
    #[error("{path} exists and is not an empty folder; choose another folder", path = path.display())]
    Occupied { path: PathBuf },
    /// A reference dump is incomplete or inconsistent.
    #[error("{file}: {detail}", file = file.display())]
    Dump { file: PathBuf, detail: String },
    /// The caller's arguments do not fit the model.
    #[error("{0}")]
    Argument(String),
    /// Decoding with an encoder.
    #[error(
        "the model is an encoder: it predicts masked tokens from both sides and cannot generate text; name a causal \
         model instead"
    )]
    Encoder,
    /// The decode state does not fit the step.
    #[error(transparent)]
    Cache(#[from] fox_cache::Error),
    /// The engine refused an op.
    #[error(transparent)]
    Tensor(#[from] fox_tensor::Error),
}

/// Results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// For `map_err`: adds the action and the path.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
        let named = FileError::at(action, path);
        move |source| named(source).into()
    }
}

/// Tensors that a message names; a wrong number of layers would fill the screen.
const LISTED: usize = 12;

fn problem_list(problems: &[TensorMismatch]) -> String {
    let mut list = String::new();
    for problem in problems.iter().take(LISTED) {
        // Writing to a String cannot fail.
        let _ = write!(list, "\n  {problem}");
    }
    if problems.len() > LISTED {
        let _ = write!(list, "\n  and {} more", problems.len() - LISTED);
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_tensor_lists_are_abbreviated() {
        let missing =
            |n: usize| TensorMismatch::Missing { name: format!("w{n}"), expected: vec![n] };
        let list = |count: usize| problem_list(&(0..count).map(missing).collect::<Vec<_>>());
        assert_eq!(list(LISTED).lines().skip(1).count(), LISTED);
        let long = list(600);
        assert_eq!(long.lines().skip(1).count(), LISTED + 1);
        assert!(long.ends_with("\n  and 588 more"), "{long}");
    }
}
