//! Serving a model over HTTP: OpenAI-compatible completions with exact log-probabilities, and a web page.
//!
//! ```
//! use fox_data::Tokenizer;
//! use fox_infer::{Engine, EngineOptions};
//! use fox_model::{Model, ModelConfig};
//! use fox_serve::{ServeOptions, ServedModel, Server};
//!
//! let tokenizer = Tokenizer::from_name("bytes")?;
//! let mut config = ModelConfig::fox_pro(32, 1, 2);
//! config.vocab_size = tokenizer.vocab_size();
//! let model = Model::init(&config, 1, &fox_cpu::device())?;
//! let engine = Engine::start(model, EngineOptions::default())?;
//! let served = ServedModel { name: "tiny".into(), engine, tokenizer };
//! let options = ServeOptions { address: ([127, 0, 0, 1], 0).into(), ..ServeOptions::default() };
//! let server = Server::bind(served, options)?;
//!
//! // One request without a connection.
//! let (status, body) = server.complete(br#"{"prompt": "Ann", "max_tokens": 3}"#)?;
//! assert_eq!(status, 200, "{}", String::from_utf8_lossy(&body));
//!
//! // Until another thread asks it to stop: no new requests, the old ones end.
//! let stop = server.shutdown_handle();
//! let running = std::thread::spawn(move || server.run());
//! stop.stop();
//! running.join().map_err(|_| "the server panicked")??;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Data flow of a request: `server` accepts connections with limits on everything, `routes` finds the handler,
//! `completions` turns JSON into engine requests and engine events into text, log-probabilities and chunks. That
//! happens on the worker threads of `text_runtime`; the threads of `server` only read and write sockets. A client
//! that disconnects drops its worker, and with it the engine's work. `memory` bounds the bytes that all requests hold.

mod access;
mod app;
mod body;
mod chat;
mod completions;
mod error;
mod fields;
mod inspect;
mod memory;
mod metrics;
mod models;
mod options;
mod origin;
mod page;
mod reference;
mod routes;
mod server;
mod stall_guard;
mod text_runtime;
mod token_names;
mod tokens;

pub use access::AccessLog;
pub use app::ServedModel;
pub use chat::ChatTemplate;
pub use error::{Error, Result};
pub use options::ServeOptions;
pub use server::{Server, ShutdownHandle};
