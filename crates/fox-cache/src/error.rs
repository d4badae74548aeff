//! Errors of decode states.

/// Why a decode state cannot do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An empty batch.
    #[error("a cache needs at least one sequence")]
    NoSequences,
    /// A size beyond what can be addressed.
    #[error("a cache of {batch} sequences of {capacity} tokens is too large; ask for less")]
    TooLarge {
        /// Sequences.
        batch: usize,
        /// Tokens of each.
        capacity: usize,
    },
    /// A step for another number of sequences.
    #[error("a step has {step} sequences, but the cache has {cache}")]
    BatchMismatch {
        /// Sequences of the step.
        step: usize,
        /// Sequences of the cache.
        cache: usize,
    },
    /// A step that brings keys without queries, or the other way round.
    #[error("a step of {queries} queries against {keys} keys: with a cache the keys are its own")]
    ForeignKeys {
        /// New queries of a sequence.
        queries: usize,
        /// Its new keys.
        keys: usize,
    },
    /// An operation for paged states on a contiguous one.
    #[error("only paged states can be {0}; make them with `Cache::paged`")]
    NotPaged(&'static str),
    /// States of different models.
    #[error("states with {0} and {1} layers are of different models and cannot be joined")]
    LayerMismatch(usize, usize),
    /// More sequences than slots.
    #[error("all slots of the device are taken; decode fewer sequences together")]
    NoFreeSlot,
    /// A sequence that entered a slot of another model.
    #[error("the sequence is in a slot of another model")]
    ForeignSlot,
    /// The device's error.
    #[error(transparent)]
    Tensor(#[from] fox_tensor::Error),
}

/// Results of this crate.
pub type Result<T> = std::result::Result<T, Error>;
