//! What can go wrong: when the engine starts, and when it is asked.

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option is out of range.
    #[error("{0}")]
    Option(String),
    /// The system gave no thread.
    #[error("cannot start the engine's thread: {0}")]
    Thread(#[from] std::io::Error),
    /// The model's error.
    #[error(transparent)]
    Model(#[from] fox_model::Error),
    /// The device's error.
    #[error(transparent)]
    Tensor(#[from] fox_tensor::Error),
    /// The tokenizer's error.
    #[error(transparent)]
    Data(#[from] fox_data::Error),
}

/// Results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a request was not accepted.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// There is nothing to continue.
    #[error("the prompt is empty; give at least the start marker")]
    EmptyPrompt,
    /// An id that the model does not have.
    #[error(
        "token {id} at position {position} of the prompt is not below the vocabulary of {vocab}"
    )]
    UnknownToken {
        /// Where in the prompt.
        position: usize,
        /// The id.
        id: i32,
        /// Number of ids the model has.
        vocab: usize,
    },
    /// Prompt and answer do not fit the context.
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
    /// Even alone, the request would need more memory than the caches may take.
    #[error(
        "the request needs {needed} bytes of cache, but the engine has {budget}; increase cache_bytes"
    )]
    NeverFits {
        /// Bytes at least.
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
    /// As many requests wait as may. Ask again later.
    #[error("{0} requests are waiting already; try again later")]
    QueueFull(usize),
    /// The engine takes no more requests.
    #[error("the engine is shutting down")]
    Closed,
}
