//! Constrained decoding: answers that match a JSON schema, a regular expression, a list of choices or a grammar.
//!
//! The `llguidance` crate computes, from the text so far, the set of tokens that may follow; all other logits become
//! minus infinity before sampling. Schemas come from clients, which may be hostile, so their size, the work of compiling
//! them, the work per token and the number of lexer states are limited. All limits count work, not time: a request fails
//! or succeeds whatever else runs.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use fox_data::Tokenizer;
use llguidance::api::{ParserLimits, StopReason, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

/// Bytes of a schema, an expression or a grammar.
const MAX_SOURCE: usize = 64 << 10;
/// Nesting of brackets in a schema, an expression or a grammar; the compiler recurses.
const MAX_DEPTH: usize = 64;
/// Lengths and numbers of items in a schema: the compiler unrolls some of them.
const MAX_COUNT: u64 = 4096;
/// States of a lexer, at 1 to 2 KiB each.
const MAX_LEXER_STATES: usize = 8192;
/// Stack of the thread that compiles.
const STACK_BYTES: usize = 64 << 20;
/// At most so much whitespace between two tokens of JSON, so that a small model does not write spaces forever.
const WHITESPACE: &str = r"[\x20\x0A\x0D\x09]{1,16}";

/// What an answer must match.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum GrammarSpec {
    /// JSON that is valid against a schema.
    JsonSchema(Value),
    /// A text that matches a regular expression as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A text of a context-free grammar in Lark's syntax; its rule `start` is the whole text.
    Lark(String),
}

/// Why a grammar cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrammarError {
    /// Single ids of the tokenizer have no bytes.
    #[error("answers cannot be constrained with this tokenizer: {0}")]
    Tokenizer(String),
    /// A limit on size or depth.
    #[error("the {what} has more than {most} {unit}")]
    TooLarge {
        /// What is too large.
        what: &'static str,
        /// The limit.
        most: usize,
        /// Its unit.
        unit: &'static str,
    },
    /// The source has an error, or needs more work than a grammar may.
    #[error("the {what} cannot be used: {detail}")]
    Invalid {
        /// What has the error.
        what: &'static str,
        /// The error of the compiler.
        detail: String,
    },
}

impl GrammarSpec {
    /// Any JSON object.
    pub fn json_object() -> GrammarSpec {
        GrammarSpec::JsonSchema(json!({ "type": "object" }))
    }

    fn name(&self) -> &'static str {
        match self {
            GrammarSpec::JsonSchema(_) => "JSON schema",
            GrammarSpec::Regex(_) => "regular expression",
            GrammarSpec::Choice(_) => "list of choices",
            GrammarSpec::Lark(_) => "grammar",
        }
    }

    /// Checks the limits on size, depth and counts.
    fn check(&self) -> Result<(), GrammarError> {
        let what = self.name();
        let source = match self {
            GrammarSpec::JsonSchema(schema) => schema.to_string(),
            GrammarSpec::Regex(source) | GrammarSpec::Lark(source) => source.clone(),
            GrammarSpec::Choice(texts) if texts.is_empty() => {
                let detail = "it is empty; give at least one text".into();
                return Err(GrammarError::Invalid { what, detail });
            }
            GrammarSpec::Choice(texts) => texts.concat(),
        };
        if source.len() > MAX_SOURCE {
            return Err(GrammarError::TooLarge { what, most: MAX_SOURCE, unit: "bytes" });
        }
        if !matches!(self, GrammarSpec::Choice(_)) && depth(&source) > MAX_DEPTH {
            return Err(GrammarError::TooLarge { what, most: MAX_DEPTH, unit: "nested brackets" });
        }
        match self {
            GrammarSpec::JsonSchema(schema) if largest_count(schema) > MAX_COUNT => {
                let most = MAX_COUNT as usize;
                Err(GrammarError::TooLarge { what, most, unit: "items or characters of one value" })
            }
            _ => Ok(()),
        }
    }

    fn grammar(&self) -> TopLevelGrammar {
        match self {
            GrammarSpec::JsonSchema(schema) => {
                let mut schema = schema.clone();
                if let Some(object) = schema.as_object_mut() {
                    object
                        .entry("x-guidance")
                        .or_insert(json!({ "whitespace_pattern": WHITESPACE }));
                }
                TopLevelGrammar::from_json_schema(schema)
            }
            GrammarSpec::Regex(source) => TopLevelGrammar::from_regex(source),
            GrammarSpec::Lark(source) => TopLevelGrammar::from_lark(source.clone()),
            GrammarSpec::Choice(texts) => {
                // A terminal, whose name is in capitals, is a matter of the lexer: thousands of texts are fast.
                let texts: Vec<String> = texts.iter().map(|text| json!(text).to_string()).collect();
                TopLevelGrammar::from_lark(format!("start: TEXT\nTEXT: {}", texts.join(" | ")))
            }
        }
    }
}

/// The deepest nesting of brackets, those in strings included.
fn depth(source: &str) -> usize {
    let (mut depth, mut deepest) = (0_usize, 0);
    for byte in source.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    deepest
}

/// The largest length or number of items in a schema.
fn largest_count(schema: &Value) -> u64 {
    const COUNTS: [&str; 6] =
        ["minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"];
    match schema {
        Value::Array(items) => items.iter().map(largest_count).max().unwrap_or(0),
        Value::Object(fields) => {
            let of = |(name, value): (&String, &Value)| match value {
                Value::Number(count) if COUNTS.contains(&name.as_str()) => {
                    count.as_u64().unwrap_or(u64::MAX)
                }
                value => largest_count(value),
            };
            fields.iter().map(of).max().unwrap_or(0)
        }
        _ => 0,
    }
}

/// Compiles grammars for one tokenizer and model.
pub struct GrammarCompiler {
    factory: ParserFactory,
    /// The id that stands for the end of the text in masks.
    end: u32,
}

impl GrammarCompiler {
    /// For a model with `vocab_size` logits.
    ///
    /// # Errors
    /// [`GrammarError::Tokenizer`].
    pub fn new(tokenizer: &Tokenizer, vocab_size: usize) -> Result<Self, GrammarError> {
        let refused = |detail: String| GrammarError::Tokenizer(detail);
        let bytes = tokenizer.token_bytes().map_err(|error| refused(error.to_string()))?;
        // Ids without text are no part of an answer; the empty word is never allowed.
        let mut words: Vec<Vec<u8>> = bytes.into_iter().map(Option::unwrap_or_default).collect();
        words.resize(vocab_size, Vec::new());
        let end = tokenizer.bos();
        let Some(word) = words.get_mut(end as usize) else {
            return Err(refused(format!("the model has {vocab_size} logits and no end marker")));
        };
        *word = b"\xff<end>".to_vec();
        let info = TokRxInfo::new(vocab_size as u32, end);
        let trie = TokTrie::from(&info, &words);
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let factory = ParserFactory::new(
            &environment,
            InferenceCapabilities::default(),
            &SlicedBiasComputer::general_slices(),
        );
        let mut factory = factory.map_err(|error| refused(error.to_string()))?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            max_lexer_states: MAX_LEXER_STATES,
            max_grammar_size: 100_000,
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Ok(GrammarCompiler { factory, end })
    }

    /// Compiles a grammar, on a thread with a stack of known size. This may take some 100 ms.
    ///
    /// # Errors
    /// [`GrammarError::TooLarge`] or [`GrammarError::Invalid`].
    pub fn compile(&self, spec: &GrammarSpec) -> Result<Grammar, GrammarError> {
        spec.check()?;
        let what = spec.name();
        let invalid = |detail: String| GrammarError::Invalid { what, detail: one_line(&detail) };
        let compile = || {
            let parser = self.factory.create_parser(spec.grammar());
            let mut matcher = Matcher::new(parser);
            if let Some(error) = matcher.get_error() {
                return Err(error);
            }
            // The first mask builds most of the lexer; a grammar that is too much for it is refused here.
            match matcher.compute_mask_or_eos() {
                Ok(mask) if mask.is_zero() => Err("no text matches it".to_string()),
                Ok(_) => Ok(matcher),
                // The name of the reason is the whole message.
                Err(error) if error.to_string() == StopReason::NoExtensionBias.to_string() => {
                    Err("no text matches it".to_string())
                }
                Err(error) => Err(error.to_string()),
            }
        };
        let matcher = thread::scope(|scope| {
            let builder = thread::Builder::new().name("grammar".into()).stack_size(STACK_BYTES);
            let thread = builder.spawn_scoped(scope, compile).map_err(|error| error.to_string())?;
            thread.join().unwrap_or_else(|_| Err("the compiler panicked".into()))
        });
        let matcher = Mutex::new(matcher.map_err(invalid)?);
        Ok(Grammar(Arc::new(Compiled { matcher, end: self.end })))
    }
}

impl fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarCompiler").field("end", &self.end).finish_non_exhaustive()
    }
}

/// The first line of a message, at most 300 characters.
fn one_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().chars().take(300).collect()
}

/// A compiled grammar. Cheap to clone; requests with the same one share its lexer.
#[derive(Clone)]
pub struct Grammar(Arc<Compiled>);

struct Compiled {
    /// At the start of an answer.
    matcher: Mutex<Matcher>,
    end: u32,
}

impl Grammar {
    /// Bytes that a grammar and its lexer take at most, about.
    pub const MAX_BYTES: usize = MAX_LEXER_STATES << 11;

    /// The state before the first token of an answer.
    pub(crate) fn start(&self) -> GrammarState {
        let matcher = self.0.matcher.lock().unwrap_or_else(PoisonError::into_inner).clone();
        GrammarState { matcher, end: self.0.end as usize }
    }
}

/// Two grammars are equal if they are clones.
impl PartialEq for Grammar {
    fn eq(&self, other: &Grammar) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").finish_non_exhaustive()
    }
}

/// The position in a grammar of one answer.
pub(crate) struct GrammarState {
    matcher: Matcher,
    /// The bit of a mask that is set where the text may end.
    end: usize,
}

impl fmt::Debug for GrammarState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarState").finish_non_exhaustive()
    }
}

impl GrammarState {
    /// Sets the logits `[V]` of tokens that may not follow to minus infinity. `stop_ids` may follow where the text may
    /// end. Returns whether it may.
    ///
    /// # Errors
    /// The grammar exceeds a limit at this token.
    pub fn mask(&mut self, logits: &mut [f32], stop_ids: &[i32]) -> Result<bool, String> {
        let mask = self.matcher.compute_mask_or_eos();
        let mask = mask.map_err(|error| one_line(&error.to_string()))?;
        let may_end = mask.is_allowed(self.end as u32);
        let stops = stop_ids.iter().filter_map(|&id| usize::try_from(id).ok());
        let stops = stops.filter(|&id| may_end && id < logits.len());
        let kept: Vec<(usize, f32)> = stops.map(|id| (id, logits[id])).collect();
        for (word, chunk) in mask.as_slice().iter().zip(logits.chunks_mut(32)) {
            if *word == u32::MAX {
                continue;
            }
            for (bit, logit) in chunk.iter_mut().enumerate() {
                if word >> bit & 1 == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        if let Some(logit) = logits.get_mut(self.end) {
            *logit = f32::NEG_INFINITY;
        }
        kept.into_iter().for_each(|(id, logit)| logits[id] = logit);
        Ok(may_end)
    }

    /// Appends a token to the text.
    ///
    /// # Errors
    /// As [`GrammarState::mask`].
    pub fn push(&mut self, id: i32) -> Result<(), String> {
        self.matcher.consume_token(id as u32).map_err(|error| one_line(&error.to_string()))
    }

    /// Whether nothing may follow.
    pub fn is_complete(&self) -> bool {
        let reason = self.matcher.stop_reason();
        reason != StopReason::NotStopped && reason.is_ok()
    }
}
