//! The inference engine: token ids in, token ids out.
//!
//! ```text
//! let engine = Engine::start(model, EngineOptions::default())?;       one thread owns the model
//! for event in engine.submit(request)? {                             any thread asks it
//!     match event {
//!         Event::Prompt(scores) => ...                                log-probabilities of the prompt
//!         Event::Token(scored) => ...                                 id, log-probability, alternatives
//!         Event::Finished(finished) => ...                            why, and what it took
//!     }
//! }
//! ```
//!
//! - [`Engine`] is a cheap handle; requests queue, share steps with others and may be dropped at any time.
//! - A request's tokens and log-probabilities depend on the request alone, to the bit, not on what else
//!   runs: prompts are read in pieces of fixed length, and the matrix products of decode steps give every
//!   row the same sums whatever the number of rows.
//! - A step lets every sequence decode, then reads pieces of prompts, the shortest first, for about as long
//!   as the decoding took: a short prompt does not wait for long ones, and streams keep their pace.
//! - The cache forgets: what every later query has provably forgotten is freed ([`Eviction`]), and its
//!   bytes never exceed [`EngineOptions::cache_bytes`]. Requests are let in by what others like them have
//!   kept; when that was too little, the youngest is put back and computed again later, to the same bits.
//! - Text exists only at the edge: [`TextStream`] turns ids into text as they come and finds stop strings.

mod admission;
mod capacity;
mod cut;
mod engine;
mod error;
mod options;
mod penalties;
mod plan;
mod prefixes;
mod request;
mod resident;
mod running;
mod sampler;
mod scheduler;
mod scores;
mod stats;
mod step;
mod text;
mod warm;

pub use engine::{Completion, Engine, Ticket};
pub use error::{Error, Refusal, Result};
pub use fox_tensor::WeightFormat;
pub use options::{EngineOptions, Eviction};
pub use request::{CacheUse, Event, FinishReason, Finished, Request, Sampling, Scored, Usage};
pub use stats::{HeadPages, Stats};
pub use text::{Piece, TextStream};
