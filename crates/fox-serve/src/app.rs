//! State that all requests share.

use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use fox_data::Tokenizer;
use fox_infer::{Engine, GrammarCompiler, GrammarError};
use tokio::sync::Semaphore;

use crate::body::ReceivedBody;
use crate::chat::Chat;
use crate::error::{ApiError, ApiResult};
use crate::memory::ByteBudget;
use crate::metrics::Metrics;
use crate::text_runtime::{TextRuntime, Worker};
use crate::token_names::TokenNames;
use crate::{Error, Result, ServeOptions};

/// Bytes of a small body. Small and large bodies are parsed on separate threads, so that a long text, which takes
/// seconds to tokenize, does not delay short ones.
const SMALL_BODY: usize = 64 << 10;
/// Bodies that are parsed at a time.
const SMALL_PARSERS: usize = 4;
const LARGE_PARSERS: usize = 1;
/// Grammars that are compiled at a time, and that are in use at a time.
const COMPILERS: usize = 1;
const MAX_GRAMMARS: usize = 32;

/// A model with its engine and tokenizer.
#[derive(Clone, Debug)]
pub struct ServedModel {
    /// The name that clients use.
    pub name: String,
    /// The engine that runs the model.
    pub engine: Engine,
    /// The model's tokenizer.
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
    /// Ids that end a choice.
    pub end_ids: Vec<i32>,
    pub names: TokenNames,
    pub chat: Chat,
    /// Threads that detokenize and serialize answers.
    pub text: TextRuntime,
    /// Bytes of bodies that are read or wait to be parsed.
    pub bodies: ByteBudget,
    /// Bytes of answers that are generated or sent.
    pub answers: ByteBudget,
    /// Made for the first request with a grammar.
    pub grammars: OnceLock<std::result::Result<GrammarCompiler, GrammarError>>,
    pub compilers: Arc<Semaphore>,
    /// Permits of requests with a grammar; further ones wait.
    pub grammar_limit: Arc<Semaphore>,
    small_parsers: Arc<Semaphore>,
    large_parsers: Arc<Semaphore>,
    /// An inspection takes all cores: one at a time.
    pub inspecting: Arc<Semaphore>,
}

impl App {
    pub fn new(served: ServedModel, options: ServeOptions) -> Result<App> {
        let ServedModel { name, engine, tokenizer } = served;
        let config = engine.model().config();
        if tokenizer.vocab_size() > config.vocab_size {
            return Err(Error::Option(format!(
                "the tokenizer has {} ids, but the model {name} has {}; use the model's own tokenizer",
                tokenizer.vocab_size(),
                config.vocab_size
            )));
        }
        if options.max_choices == 0 || options.max_connections == 0 {
            return Err(Error::Option("limits must be at least 1".into()));
        }
        let mut end_ids = vec![tokenizer.bos() as i32];
        end_ids.extend(config.tokens.eos.iter().map(|id| *id as i32));
        end_ids.extend(&options.end_ids);
        end_ids.sort_unstable();
        end_ids.dedup();
        Ok(App {
            created: now(),
            metrics: Metrics::default(),
            inspecting: Arc::new(Semaphore::new(1)),
            grammars: OnceLock::new(),
            compilers: Arc::new(Semaphore::new(COMPILERS)),
            grammar_limit: Arc::new(Semaphore::new(MAX_GRAMMARS)),
            small_parsers: Arc::new(Semaphore::new(SMALL_PARSERS)),
            large_parsers: Arc::new(Semaphore::new(LARGE_PARSERS)),
            names: TokenNames::new(&tokenizer, config.vocab_size),
            text: TextRuntime::start()?,
            bodies: ByteBudget::new("unfinished bodies", options.body_bytes),
            answers: ByteBudget::new("answers in flight", options.answer_bytes),
            chat: Chat::new(options.chat.clone())?,
            name,
            engine,
            tokenizer,
            options,
            end_ids,
        })
    }

    /// Parses a body on a thread that may block.
    pub async fn parse<T: Send + 'static>(
        self: &Arc<Self>,
        body: ReceivedBody,
        parse: impl FnOnce(&App, &[u8]) -> ApiResult<T> + Send + 'static,
    ) -> ApiResult<T> {
        let parsers = match body.bytes.len() <= SMALL_BODY {
            true => &self.small_parsers,
            false => &self.large_parsers,
        };
        self.run_blocking(parsers, move |app| parse(app, &body.bytes)).await
    }

    /// Runs work on a thread that may block, as soon as there is a permit. The work cannot be cancelled, so it keeps its
    /// permit when the client disconnects.
    pub async fn run_blocking<T: Send + 'static>(
        self: &Arc<Self>,
        permits: &Arc<Semaphore>,
        work: impl FnOnce(&App) -> ApiResult<T> + Send + 'static,
    ) -> ApiResult<T> {
        let permit = permits.clone().acquire_owned().await;
        let permit = permit.map_err(|error| ApiError::internal(error.to_string()))?;
        let app = self.clone();
        let work = move || {
            let result = work(&app);
            drop(permit);
            result
        };
        Worker::blocking(work).await?
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// A random number that cannot be guessed.
pub(crate) fn random() -> u64 {
    RandomState::new().hash_one(0)
}
