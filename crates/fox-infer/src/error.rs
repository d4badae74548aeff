//! Errors of starting an engine, and refusals of requests.

/// An error of starting an engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option is out of range.
    #[error("{0}")]
    Option(String),
    /// A `generation_config.json` that cannot be used.
    #[error("{}: {detail}; correct or remove the file", path.display())]
    GenerationConfig {
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong.
        detail: String,
    },
    /// The operating system did not start a thread.
    #[error("cannot start the engine's thread: {0}")]
    Thread(#[from] std::io::Error),
    /// An error of the model.
    #[error(transparent)]
    Model(#[from] fox_model::Error),
    /// An error of the device.
    #[error(transparent)]
    Tensor(#[from] fox_tensor::Error),
    /// An error of the tokenizer.
    #[error(transparent)]
    Data(#[from] fox_data::Error),
}

/// Results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The prompt has no tokens.
    #[error("the prompt is empty; give at least the start marker")]
    EmptyPrompt,
    /// An id outside the model's vocabulary.
    #[error(
        "token {id} at position {position} of the prompt is not below the vocabulary of {vocab}"
    )]
    UnknownToken {
        /// Position in the prompt.
        position: usize,
        /// The id.
        id: i32,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// Prompt and answer exceed the context.
    #[error(
        "{prompt} prompt tokens and {max_tokens} to generate exceed the context of {max_context} tokens"
    )]
    TooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens asked for.
        max_tokens: usize,
        /// The engine's limit.
        max_context: usize,
    },
    /// The request needs more cache than the whole budget.
    #[error(
        "the request needs {needed} bytes of cache, but the engine has {budget}; increase cache_bytes"
    )]
    NeverFits {
        /// Bytes that it needs at least.
        needed: usize,
        /// The engine's budget.
        budget: usize,
    },
    /// A sampling parameter out of range.
    #[error("{parameter} {rule}")]
    Parameter {
        /// Name of the field of [`Request`](crate::Request) or [`Sampling`](crate::Sampling).
        parameter: &'static str,
        /// The rule that the value breaks, e.g. `must be 0 or more, not -1`.
        rule: String,
    },
    /// The queue is full; the request may be submitted again later.
    #[error("{0} requests are waiting already; try again later")]
    QueueFull(usize),
    /// The engine is shutting down.
    #[error("the engine is shutting down")]
    Closed,
}
