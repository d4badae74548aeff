//! Serving a model over HTTP: OpenAI-compatible completions whose log-probabilities are exact, and a page
//! to play with.
//!
//! ```text
//! let server = Server::bind(Served { name, engine, tokenizer }, ServeOptions::default())?;
//! let stop = server.stopper();          another thread calls stop.stop(): no new requests, the old ones end
//! server.run()?;                        until then
//! ```
//!
//! A request's way: `server` accepts and reads with limits on everything, `routes` finds who answers,
//! `completions` turns JSON into requests to the engine and its events into text, log-probabilities and
//! chunks. An answer is pulled by the connection that wants it, so a client that goes away drops the
//! answer, and with it the engine's work.

mod access;
mod app;
mod body;
mod chat;
mod completions;
mod error;
mod fields;
mod inspect;
mod metrics;
mod models;
mod options;
mod origin;
mod page;
mod patience;
mod routes;
mod server;
mod tokens;

pub use access::AccessLog;
pub use app::Served;
pub use chat::ChatTemplate;
pub use error::{Error, Result};
pub use options::ServeOptions;
pub use server::{Server, Stopper};
