//! Requests to an engine, and its events.

use serde::Serialize;

use crate::{Grammar, Refusal};

/// One prompt to continue. For several continuations of one prompt, submit it several times with different seeds: the
/// prompt is prefilled once and shared.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Token ids of the prompt, at least one.
    pub prompt: Vec<i32>,
    /// Largest number of tokens to generate; 0 only prefills.
    pub max_tokens: usize,
    /// Sampling parameters.
    pub sampling: Sampling,
    /// Ids that end the answer.
    pub stop_ids: Vec<i32>,
    /// Whether the id that ended the answer is reported as its last token.
    pub report_stop: bool,
    /// Number of tokens before which none of `stop_ids` is sampled.
    pub min_tokens: usize,
    /// Added to the logits of ids before sampling.
    pub logit_bias: Vec<(i32, f32)>,
    /// Number of likeliest ids reported with each token.
    pub top_logprobs: usize,
    /// Whether the log-probabilities of the prompt tokens are reported. They are recomputed: the prefix cache is not
    /// used.
    pub echo: bool,
    /// What the answer must match. It ends where nothing may follow, and where a stop id is sampled.
    pub grammar: Option<Grammar>,
}

impl Request {
    /// Greedy continuation of `prompt` by `max_tokens`, without alternatives.
    pub fn greedy(prompt: Vec<i32>, max_tokens: usize) -> Self {
        Request {
            prompt,
            max_tokens,
            sampling: Sampling::greedy(),
            stop_ids: Vec::new(),
            report_stop: false,
            min_tokens: 0,
            logit_bias: Vec::new(),
            top_logprobs: 0,
            echo: false,
            grammar: None,
        }
    }
}

/// Sampling parameters: penalties and temperature are applied first, then the filters in the order of the fields.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the likeliest token, the lowest id among equals.
    pub temperature: f32,
    /// Keep this many of the likeliest tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the likeliest tokens until their probabilities sum to this; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens with at least this fraction of the largest probability; 0 keeps all.
    pub min_p: f32,
    /// Logits of tokens that occurred are divided by this when positive, multiplied when negative; 1
    /// changes nothing.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens that occurred in the answer.
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens for every time they occurred in the answer.
    pub frequency_penalty: f32,
    /// Seed. The same request with the same seed gives the same tokens.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
        }
    }
}

impl Sampling {
    /// Always the likeliest token.
    pub fn greedy() -> Self {
        Sampling { temperature: 0.0, ..Sampling::default() }
    }

    pub(crate) fn check(&self) -> Result<(), Refusal> {
        let rules = [
            ("temperature", self.temperature, self.temperature >= 0.0, "0 or more"),
            ("top_p", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0, "above 0 and at most 1"),
            ("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "from 0 to 1"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                self.repetition_penalty > 0.0,
                "above 0",
            ),
            ("presence_penalty", self.presence_penalty, true, "a number"),
            ("frequency_penalty", self.frequency_penalty, true, "a number"),
        ];
        match rules.iter().find(|(_, value, holds, _)| !holds || !value.is_finite()) {
            Some((parameter, value, _, range)) => {
                Err(Refusal::Parameter { parameter, rule: format!("must be {range}, not {value}") })
            }
            None => Ok(()),
        }
    }
}

/// A token with its log-probability under the model, before temperature, penalty and filters.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ScoredToken {
    /// The token.
    pub id: i32,
    /// Its natural log-probability.
    pub logprob: f32,
    /// The likeliest tokens and theirs, best first, the lowest id first among equals.
    pub top: Vec<(i32, f32)>,
}

/// An event of a request, in this order: `Prompt` (with `echo`), `Token`, `Finished`.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Event {
    /// Scores of the next prompt tokens, one event per prefill chunk, from the second token on (nothing predicts the
    /// first).
    Prompt(Vec<ScoredToken>),
    /// The next token.
    Token(ScoredToken),
    /// The last event.
    Finished(Box<Finished>),
}

/// Why a request ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum FinishReason {
    /// The model chose one of `stop_ids`, or the grammar is complete.
    Stop,
    /// `max_tokens` were generated.
    Length,
    /// [`Engine::interrupt`](crate::Engine::interrupt) was called.
    Interrupted,
    /// The grammar of the request exceeds a limit, or allows no token of the vocabulary.
    Grammar(String),
    /// The engine failed with this message.
    Failed(String),
}

/// The end of a request.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Finished {
    /// Why it ended.
    pub reason: FinishReason,
    /// Tokens and times.
    pub usage: Usage,
    /// Its KV cache at the end.
    pub cache: CacheUsage,
}

/// Tokens and times of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Prompt tokens taken from the prefix cache.
    pub shared_tokens: usize,
    /// Tokens generated.
    pub generated_tokens: usize,
    /// Seconds in the queue.
    pub queue_s: f64,
    /// Seconds from admission to the end of the prefill.
    pub prefill_s: f64,
    /// Seconds from the end of the prefill to the last token.
    pub decode_s: f64,
}

/// The KV cache of one sequence.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CacheUsage {
    /// Tokens it covers.
    pub tokens: usize,
    /// Bytes it holds.
    pub bytes: usize,
    /// Bytes it would hold if nothing had been evicted.
    pub full_bytes: usize,
    /// Tokens per page.
    pub page_tokens: usize,
    /// Pages evicted, per layer and key head; no layers in recurrent models.
    pub evicted_pages: Vec<Vec<usize>>,
}

impl CacheUsage {
    /// Fraction of the cache that was evicted, from 0 to 1.
    pub fn evicted_fraction(&self) -> f64 {
        match self.full_bytes {
            0 => 0.0,
            full => 1.0 - self.bytes as f64 / full as f64,
        }
    }
}
