//! The setting that an error is about, so that a caller can add its own name for it.

/// A setting of a library call. Error messages describe it in words; a command line adds its flag, a Python package its
/// argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Setting {
    /// The folder that a run is written to.
    RunFolder,
    /// The name of a recipe or variant.
    Recipe,
    /// Tokens of a prompt and its answer.
    MaxLength,
    /// Number of answered examples before a question.
    Shots,
    /// Folder of the data of tasks.
    TaskData,
    /// The name of a task.
    Task,
    /// Folder of the configuration of LongBench.
    LongBench,
}
