//! The crate's error: every message is one sentence that names the file or the key and the remedy.

use std::io;
use std::path::{Path, PathBuf};

use fox_base::{FileError, Setting};

/// Results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong with a recipe or a run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A training step that the device has no memory for.
    #[error(
        "a step needs about {needed:.1} GiB, and {device} has {free:.1} GiB free; lower training.micro_batch (now {rows}){}",
        recompute_hint(recomputed)
    )]
    TooLarge {
        /// GiB that the step takes by the estimate.
        needed: f64,
        /// GiB that are free.
        free: f64,
        /// The device.
        device: String,
        /// Sequences at once.
        rows: usize,
        /// GiB that it takes when blocks are recomputed, where that would fit.
        recomputed: Option<f64>,
    },
    /// A recipe that is neither a file nor built in.
    #[error("`{name}` is neither a file nor a built-in recipe{}", hint(nearest))]
    UnknownRecipe {
        /// What was asked for.
        name: String,
        /// The built-in recipe with the most similar name.
        nearest: Option<String>,
    },
    /// A `+variant` that is not known.
    #[error("unknown variant `{name}`{}", hint(nearest))]
    UnknownVariant {
        /// What was asked for.
        name: String,
        /// The variant with the most similar name.
        nearest: Option<String>,
    },
    /// A key that no recipe has.
    #[error("{origin}: unknown key `{key}`{}", hint(nearest))]
    UnknownKey {
        /// The recipe.
        origin: String,
        /// The key with its section, e.g. `training.tokenz`.
        key: String,
        /// The known key with the most similar name.
        nearest: Option<String>,
    },
    /// A value that does not fit its key.
    #[error("{origin}: `{key}` {detail}")]
    BadValue {
        /// The recipe.
        origin: String,
        /// The key with its section.
        key: String,
        /// What is wrong and what would be right.
        detail: String,
    },
    /// A file that is not TOML.
    #[error("{} is not valid TOML: {detail}", file.display())]
    Toml {
        /// The file.
        file: PathBuf,
        /// The parser's words.
        detail: String,
    },
    /// Recipes that extend each other in a circle, or too deeply.
    #[error("{origin} extends itself through `{name}`; remove one of the `extends`")]
    ExtendsItself {
        /// The recipe that was asked for.
        origin: String,
        /// Where the circle closes.
        name: String,
    },
    /// An override that is not `key=value`.
    #[error("`{text}` is not an override; write key=value, e.g. training.tokens=1000000")]
    BadOverride {
        /// What was given.
        text: String,
    },
    /// The operating system refused something.
    #[error(transparent)]
    File(#[from] FileError),
    /// A checkpoint that could not be written; training stops rather than losing more work.
    #[error(
        "cannot write the checkpoint of step {step} ({cause}); {}, free some space or repair the disk and run the same command again",
        last_good(*last)
    )]
    CheckpointWrite {
        /// The step that was to be kept.
        step: u64,
        /// What failed.
        cause: Box<Error>,
        /// Step of the newest complete checkpoint.
        last: Option<u64>,
    },
    /// A checkpoint that another process writes or reads and this one does not see.
    #[error(
        "rank {rank} does not find {}, which rank 0 has; give all ranks the same run folder on a file system that they share",
        path.display()
    )]
    NotShared {
        /// The folder.
        path: PathBuf,
        /// This process.
        rank: usize,
    },
    /// A run folder that belongs to another run.
    #[error(
        "{} holds another run ({detail}); remove that folder or choose another one",
        path.display()
    )]
    DifferentRun {
        /// The folder.
        path: PathBuf,
        /// What differs.
        detail: String,
    },
    /// A folder with something else in it.
    #[error("{} is not empty and holds no run of fox; choose another folder", path.display())]
    NotARun {
        /// The folder.
        path: PathBuf,
    },
    /// A run folder that is no longer where the run started.
    #[error(
        "{} is gone: the run folder was moved or removed during training; move it back, and the same command resumes from its last checkpoint",
        path.display()
    )]
    FolderMoved {
        /// Where it was.
        path: PathBuf,
    },
    /// A folder without a run.
    #[error("{} holds no run of fox; give the folder of a training run", path.display())]
    NoRun {
        /// The folder.
        path: PathBuf,
    },
    /// A run without a checkpoint.
    #[error("{} holds no checkpoint yet; train until the first one is written", path.display())]
    NoCheckpoint {
        /// The folder of checkpoints.
        path: PathBuf,
    },
    /// A run that keeps no average of its weights.
    #[error("{} keeps no average of the weights; train with training.ema, or export the raw ones", path.display())]
    NoAverage {
        /// The run folder.
        path: PathBuf,
    },
    /// Another process trains in this folder.
    #[error("another process is training in {}; wait for it or choose another folder", path.display())]
    Locked {
        /// The folder.
        path: PathBuf,
    },
    /// There are checkpoints, but none can be read.
    #[error(
        "no checkpoint in {} can be used ({detail}); remove that folder to start again from the beginning",
        path.display()
    )]
    NoGoodCheckpoint {
        /// The folder of checkpoints.
        path: PathBuf,
        /// What is wrong with the newest one.
        detail: String,
    },
    /// A file of a run that is not what was written.
    #[error("{} is damaged: {detail}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        detail: String,
    },
    /// The gradients stay non-finite.
    #[error(
        "the gradient was not finite in {steps} steps in a row (the last was step {last}); lower optimizer.peak_lr or look at the data, and start again from an earlier checkpoint"
    )]
    NotFinite {
        /// How many steps.
        steps: u64,
        /// The last of them.
        last: u64,
    },
    /// A run that came to its end with a model that computes nothing.
    #[error(
        "the weights or their held-out loss are not finite after step {step}, the last one; lower optimizer.peak_lr or look at the data, and start again from an earlier checkpoint"
    )]
    Diverged {
        /// The step.
        step: u64,
    },
    /// The data end before the run does.
    #[error(
        "the data end after {batches} batches, before the run does; set data.epochs higher or leave it out"
    )]
    DataEnd {
        /// Batches there are.
        batches: u64,
    },
    /// A text that is too short for any recipe.
    #[error("{} has {tokens} tokens, too few to learn from; give it at least {least} kB of text", path.display())]
    TooShort {
        /// The text or its prepared data.
        path: PathBuf,
        /// Tokens it has.
        tokens: u64,
        /// Kilobytes that are enough.
        least: u64,
    },
    /// A line of conversations that is none.
    #[error(
        "{} line {line} has no list `messages` of role and content; every line needs one",
        path.display()
    )]
    NotAConversation {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
    },
    /// Held-out data without a document that is long enough.
    #[error(
        "no held-out document has {length} tokens (the longest has {longest}); lower evaluation.length, or set evaluation.sequences to 0 for no evaluation"
    )]
    HeldOutTooShort {
        /// Tokens that were asked for.
        length: usize,
        /// Tokens of the longest document.
        longest: u64,
    },
    /// A value that cannot be put into a file.
    #[error("cannot write {} as {format}: {detail}", path.display())]
    Encode {
        /// The file.
        path: PathBuf,
        /// JSON or TOML.
        format: &'static str,
        /// The library's words.
        detail: String,
    },
    /// A number of processes that the recipe cannot be divided among.
    #[error("{origin}: {ranks} process{} cannot share it: {detail}", if *ranks == 1 { "" } else { "es" })]
    Ranks {
        /// The recipe.
        origin: String,
        /// How many there are.
        ranks: usize,
        /// What does not fit, and what would.
        detail: String,
    },
    /// The other processes of the run.
    #[error(transparent)]
    Group(#[from] fox_dist::Error),
    /// The data or tokenizer.
    #[error(transparent)]
    Data(#[from] fox_data::Error),
    /// The model.
    #[error(transparent)]
    Model(#[from] fox_model::Error),
    /// The engine.
    #[error(transparent)]
    Tensor(#[from] fox_tensor::Error),
}

impl Error {
    /// For `map_err`: says what was tried with which path.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let named = FileError::at(action, path);
        move |source| named(source).into()
    }

    /// The setting that would have to change, for callers that name it differently.
    pub fn setting(&self) -> Option<Setting> {
        match self {
            Error::UnknownRecipe { .. } | Error::UnknownVariant { .. } => Some(Setting::Recipe),
            Error::NotShared { .. }
            | Error::DifferentRun { .. }
            | Error::NotARun { .. }
            | Error::NoRun { .. }
            | Error::Locked { .. } => Some(Setting::RunFolder),
            _ => None,
        }
    }

    /// Shorthand for [`Error::BadValue`].
    pub(crate) fn value(origin: &str, key: &str, detail: impl Into<String>) -> Self {
        Self::BadValue { origin: origin.into(), key: key.into(), detail: detail.into() }
    }
}

fn recompute_hint(needed: &Option<f64>) -> String {
    needed.map_or_else(String::new, |gib| {
        format!(" or set training.recompute=true, which needs about {gib:.1} GiB")
    })
}

fn hint(nearest: &Option<String>) -> String {
    nearest.as_ref().map(|name| format!("; did you mean `{name}`?")).unwrap_or_default()
}

fn last_good(step: Option<u64>) -> String {
    match step {
        Some(step) => format!("the checkpoint of step {step} is whole"),
        None => "there is no earlier checkpoint".into(),
    }
}
