//! What all requests share.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use fox_data::Tokenizer;
use fox_infer::Engine;
use hyper::body::Bytes;
use tokio::sync::Semaphore;

use crate::chat::Chat;
use crate::completions::longest_token;
use crate::error::{ApiError, ApiResult};
use crate::metrics::Metrics;
use crate::{Error, Result, ServeOptions};

/// Bytes of a body that is parsed and tokenized at once, on the thread that read it.
const SMALL_BODY: usize = 4 << 10;
/// Larger ones that are at a time.
const PARSERS: usize = 2;

/// What is served.
#[derive(Clone, Debug)]
pub struct ServedModel {
    /// What clients call the model.
    pub name: String,
    /// Where it runs.
    pub engine: Engine,
    /// Its text.
    pub tokenizer: Tokenizer,
}

pub(crate) struct App {
    pub name: String,
    pub engine: Engine,
    pub tokenizer: Tokenizer,
    pub options: ServeOptions,
    pub metrics: Metrics,
    /// Seconds since 1970 when the server started.
    pub created: u64,
    /// Ids that end an answer.
    pub end_ids: Vec<i32>,
    /// Bytes of text that a token stands for, at most.
    pub longest_token: usize,
    pub chat: Chat,
    /// Parsing and tokenizing large bodies, a few at a time.
    parsing: Semaphore,
    /// Looking inside takes all cores for a moment: one at a time.
    pub inspecting: Semaphore,
}

impl App {
    pub fn new(served: ServedModel, options: ServeOptions) -> Result<App> {
        let ServedModel { name, engine, tokenizer } = served;
        let config = engine.model().config();
        if tokenizer.vocab_size() > config.vocab_size {
            return Err(Error::Option(format!(
                "the tokenizer has {} ids, but the model {name} has {}; name the model's own with --tokenizer",
                tokenizer.vocab_size(),
                config.vocab_size
            )));
        }
        if options.max_choices == 0 || options.max_connections == 0 {
            return Err(Error::Option("limits must be at least 1".into()));
        }
        let mut end_ids = vec![tokenizer.bos() as i32];
        end_ids.extend(config.tokens.eos.map(|id| id as i32));
        end_ids.dedup();
        Ok(App {
            created: now(),
            metrics: Metrics::default(),
            inspecting: Semaphore::new(1),
            parsing: Semaphore::new(PARSERS),
            longest_token: longest_token(&tokenizer),
            chat: Chat::new(options.chat.clone())?,
            name,
            engine,
            tokenizer,
            options,
            end_ids,
        })
    }

    /// Parses a body, off the threads that read and write unless it is small: a long text takes seconds to
    /// tokenize.
    pub async fn parse<T: Send + 'static>(
        self: &Arc<Self>,
        body: Bytes,
        parse: impl FnOnce(&App, &[u8]) -> ApiResult<T> + Send + 'static,
    ) -> ApiResult<T> {
        if body.len() <= SMALL_BODY {
            return parse(self, &body);
        }
        let internal = |error: &dyn std::error::Error| ApiError::internal(error.to_string());
        let _turn = self.parsing.acquire().await.map_err(|error| internal(&error))?;
        let app = self.clone();
        let parsed = tokio::task::spawn_blocking(move || parse(&app, &body)).await;
        parsed.map_err(|error| internal(&error))?
    }

    /// The name that logs and clients see for one token: its text, or its number where it has none of its
    /// own (a part of a character, a marker).
    pub fn token_name(&self, id: i32) -> String {
        match self.tokenizer.decode(&[id as u32]) {
            Ok(text) if !text.is_empty() && !text.contains('\u{fffd}') => text,
            _ => format!("token_id:{id}"),
        }
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// A number that nobody could guess, and that differs from call to call.
pub(crate) fn random() -> u64 {
    RandomState::new().hash_one(0)
}
