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
//! for event in engine.submit(request)? {                                 // from any thread
//!     match event {
//!         Event::Token(token) => answer.push((token.id, token.logprob)), // as it is generated
//!         Event::Finished(end) => println!("{:?}, {:?}", end.reason, end.usage),
//!         _ => {} // scores of the prompt, with `echo`
//!     }
//! }
//! assert_eq!(answer.len(), 5);
//! assert!(answer.iter().all(|(id, logprob)| *id < 100 && *logprob < 0.0));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! - [`Engine`] is a cheap handle. Requests queue, are batched (continuous batching), and may be dropped at any time.
//! - Results are batch-invariant to the bit: prompts are prefilled in chunks of fixed length, and the matrix products
//!   of decode steps add every row in the same order whatever the batch size.
//! - A step decodes every sequence, then prefills chunks of prompts, the shortest first, for about as long as decoding
//!   took: a short prompt does not wait for long ones, and inter-token latency at most doubles.
//! - Pages of the KV cache that every later query has provably forgotten are evicted ([`Eviction`]), and the cache
//!   never exceeds [`EngineOptions::cache_bytes`]. Requests are admitted by their expected size after eviction; when
//!   that was too optimistic, the youngest is preempted and recomputed later, to the same bits.
//! - Answers that must match a JSON schema, an expression or a grammar ([`Grammar`]) are sampled from the tokens that may
//!   follow.
//! - Text exists only at the edge: [`TextDecoder`] turns ids into text token by token and finds stop strings.

mod admission;
mod engine;
mod error;
mod filtered_draw;
mod forward;
mod generation_config;
mod grammar;
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
pub use generation_config::GenerationConfig;
pub use grammar::{Grammar, GrammarCompiler, GrammarError, GrammarSpec};
pub use options::{EngineOptions, Eviction};
pub use request::{
    CacheUsage, Event, FinishReason, Finished, Request, Sampling, ScoredToken, Usage,
};
pub use stats::{HeadPages, Stats};
pub use text::{TextDecoder, TextDelta};
