//! The inference engine: token ids in, token ids out.
//!
//! ```
//! use fox_infer::{Engine, EngineOptions, Event, Request, Sampling};
//! use fox_model::{Model, ModelConfig};
//!
//! let mut config = ModelConfig::fox_pro(64, 2, 2);
//! config.vocab_size = 100;
//! // A trained one: Model::from_checkpoint(Path::new("runs/tiny/export"), &device).
//! let model = Model::init(&config, 1, &fox_cpu::device())?;
//! let engine = Engine::start(model, EngineOptions::default())?;          // one thread owns the model
//!
//! let sampling = Sampling { temperature: 0.8, top_p: 0.9, seed: 7, ..Sampling::default() };
//! let request = Request { sampling, ..Request::greedy(vec![1, 2, 3], 5) };
//! let mut answer = Vec::new();
//! for event in engine.submit(request)? {                                 // any thread asks it
//!     match event {
//!         Event::Prompt(_) => {}                                         // where `echo` asks for it
//!         Event::Token(token) => answer.push((token.id, token.logprob)), // as they come
//!         Event::Finished(end) => println!("{:?}, {:?}", end.reason, end.usage),
//!     }
//! }
//! assert_eq!(answer.len(), 5);
//! assert!(answer.iter().all(|(id, logprob)| *id < 100 && *logprob < 0.0));
//! # Ok::<(), Box<dyn std::error::Error>>(())
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
//! - Text exists only at the edge: [`TextDecoder`] turns ids into text as they come and finds stop strings.

mod admission;
mod engine;
mod error;
mod filtered_draw;
mod forward;
mod limits;
mod options;
mod penalties;
mod prefill;
mod prefix_cache;
mod request;
mod resident;
mod retention;
mod sampler;
mod scheduler;
mod scores;
mod sequence;
mod stats;
mod text;
mod warm;

pub use engine::{Completion, Engine, Ticket};
pub use error::{Error, Refusal, Result};
pub use fox_tensor::WeightFormat;
pub use options::{EngineOptions, Eviction};
pub use request::{
    CacheUsage, Event, FinishReason, Finished, Request, Sampling, ScoredToken, Usage,
};
pub use stats::{HeadPages, Stats};
pub use text::{TextDecoder, TextDelta};
