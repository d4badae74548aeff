//! One answer in the making: tokens in, text with log-probabilities out.

use std::collections::VecDeque;

use fox_infer::{FinishReason, ScoredToken, TextDecoder};

use serde_json::{Map, Value, json};

use super::Prompt;
use super::request::CompletionRequest;
use crate::app::App;
use crate::error::{ApiError, ApiResult};

/// A log-probability of zero probability, which JSON could not write.
const LEAST: f32 = -9999.0;

/// A token and what is told about it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Entry {
    pub token: String,
    /// Absent for the first token of a prompt.
    pub logprob: Option<f32>,
    /// The likeliest tokens, best first, and the token itself.
    pub top: Option<Vec<(String, f32)>>,
    /// How many of `top` were asked for.
    pub count: usize,
    /// Characters of prompt and answer before it.
    pub offset: usize,
}

impl Entry {
    /// The likeliest tokens that were asked for.
    pub fn alternatives(&self) -> &[(String, f32)] {
        let top = self.top.as_deref().unwrap_or(&[]);
        &top[..top.len().min(self.count)]
    }
}

/// What is new about an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Delta {
    pub index: usize,
    pub text: String,
    /// Tokens whose text has begun to be told; empty when no log-probabilities are wanted.
    pub entries: Vec<Entry>,
    pub finish: Option<&'static str>,
    /// Tokens and the sum of their log-probabilities.
    pub score: (usize, f64),
    /// The prompt's, as vLLM writes them, when they are wanted.
    pub prompt_logprobs: Option<Value>,
}

impl Delta {
    pub fn is_empty(&self) -> bool {
        self.text.is_empty()
            && self.entries.is_empty()
            && self.finish.is_none()
            && self.score.0 == 0
            && self.prompt_logprobs.is_none()
    }

    /// Whether there is something to stream.
    pub fn is_silent(&self) -> bool {
        self.text.is_empty() && self.entries.is_empty() && self.finish.is_none()
    }
}

/// The state of an answer.
pub(crate) struct Choice {
    index: usize,
    stream: TextDecoder,
    /// Alternatives per token, when log-probabilities are wanted.
    logprobs: Option<usize>,
    /// Ids that end the answer and have no text.
    end_ids: Vec<i32>,
    /// Characters told so far, those of the prompt included.
    told: usize,
    /// Tokens whose text is held back: a part of a character, or of what may be a stop string.
    waiting: VecDeque<Entry>,
    pub ended: bool,
}

impl Choice {
    pub fn new(
        app: &App,
        request: &CompletionRequest,
        end_ids: Vec<i32>,
        index: usize,
    ) -> ApiResult<Self> {
        let prompt = &request.prompts[index / request.best_of];
        let told = match request.logprobs {
            Some(_) => prompt_text(app, prompt)?.chars().count(),
            None => 0,
        };
        Ok(Choice {
            index,
            stream: TextDecoder::new(&app.tokenizer, &prompt.ids, &request.stops),
            logprobs: request.logprobs,
            end_ids,
            told,
            waiting: VecDeque::new(),
            ended: false,
        })
    }

    /// What is told about the prompt, with the scores of its tokens from the second on, or without any.
    pub fn echo(
        &self,
        app: &App,
        request: &CompletionRequest,
        scores: &[ScoredToken],
    ) -> ApiResult<Delta> {
        let prompt = &request.prompts[self.index / request.best_of];
        let mut delta = Delta { index: self.index, ..Delta::default() };
        if let Some(count) =
            request.prompt_logprobs.filter(|_| scores.len() + 1 == prompt.ids.len())
        {
            delta.prompt_logprobs = Some(prompt_logprobs(app, scores, count)?);
        }
        // Without log-probabilities the text has been told before.
        if !request.echo || (request.logprobs.is_none() && !scores.is_empty()) {
            return Ok(delta);
        }
        let mut stream = TextDecoder::new(&app.tokenizer, &[], &[]);
        let mut offset = 0;
        for (i, &id) in prompt.ids.iter().enumerate() {
            if let Some(count) = self.logprobs {
                let scored = i.checked_sub(1).and_then(|before| scores.get(before));
                delta.entries.push(entry(app, id, scored, count, offset)?);
            }
            if i >= prompt.marks {
                let piece = stream.push(id).map_err(internal)?;
                offset += piece.text.chars().count();
                delta.text.push_str(&piece.text);
            }
        }
        delta.text.push_str(&stream.finish().map_err(internal)?.text);
        Ok(delta)
    }

    /// The next token.
    pub fn push(&mut self, app: &App, scored: &ScoredToken) -> ApiResult<Delta> {
        if let Some(count) = self.logprobs {
            let offset = self.told + self.stream.held().chars().count();
            self.waiting.push_back(entry(app, scored.id, Some(scored), count, offset)?);
        }
        let delta = if self.end_ids.contains(&scored.id) {
            self.finish(&FinishReason::Stop)?
        } else {
            let piece = self.stream.push(scored.id).map_err(internal)?;
            self.tell(piece.text, piece.stopped.then_some("stop"))
        };
        Ok(Delta { score: (1, f64::from(scored.logprob)), ..delta })
    }

    /// The end, as the engine sees it.
    pub fn finish(&mut self, reason: &FinishReason) -> ApiResult<Delta> {
        let piece = self.stream.finish().map_err(internal)?;
        let reason = match reason {
            FinishReason::Stop => "stop",
            FinishReason::Length if piece.stopped => "stop",
            FinishReason::Length => "length",
            FinishReason::Interrupted => return Err(fox_infer::Refusal::Closed.into()),
            FinishReason::Failed(words) => return Err(ApiError::internal(words)),
        };
        let mut delta = self.tell(piece.text, Some(reason));
        if !piece.stopped {
            delta.entries.extend(self.waiting.drain(..));
        }
        Ok(delta)
    }

    fn tell(&mut self, text: String, finish: Option<&'static str>) -> Delta {
        self.told += text.chars().count();
        self.ended = finish.is_some();
        let begun = self.waiting.iter().take_while(|entry| entry.offset < self.told).count();
        let entries = self.waiting.drain(..begun).collect();
        Delta { index: self.index, text, entries, finish, ..Delta::default() }
    }
}

/// The text of a prompt as the model sees it.
fn prompt_text(app: &App, prompt: &Prompt) -> ApiResult<String> {
    let ids: Vec<u32> = prompt.ids[prompt.marks..].iter().map(|&id| id as u32).collect();
    Ok(app.tokenizer.decode(&ids)?)
}

/// # Errors
/// A log-probability that is no number: the model is broken, which must not look like an unlikely token.
fn entry(
    app: &App,
    id: i32,
    scored: Option<&ScoredToken>,
    count: usize,
    offset: usize,
) -> ApiResult<Entry> {
    if scored.is_some_and(|scored| scored.logprob.is_nan()) {
        return Err(ApiError::internal("the model's logits are not numbers"));
    }
    let token = app.token_name(id);
    let top = scored.map(|scored| {
        let mut top: Vec<(String, f32)> = Vec::with_capacity(scored.top.len() + 1);
        let own = (id, scored.logprob);
        for (id, logprob) in scored.top.iter().take(count).chain([&own]) {
            let name = app.token_name(*id);
            // Names are keys in JSON; the first is the likeliest.
            if !top.iter().any(|(other, _)| *other == name) {
                top.push((name, logprob.max(LEAST)));
            }
        }
        top
    });
    let logprob = scored.map(|scored| scored.logprob.max(LEAST));
    Ok(Entry { token, logprob, top, count, offset })
}

/// A list with null for the first token and `{ID: {logprob, rank, decoded_token}}` for the others; the rank is
/// known for the likeliest `count`.
fn prompt_logprobs(app: &App, scores: &[ScoredToken], count: usize) -> ApiResult<Value> {
    let mut list = vec![Value::Null];
    for scored in scores {
        if scored.logprob.is_nan() {
            return Err(ApiError::internal("the model's logits are not numbers"));
        }
        let about = |id: i32, logprob: f32, rank: Option<usize>| {
            let (logprob, token) = (shortest(logprob.max(LEAST)), app.token_name(id));
            json!({ "logprob": logprob, "rank": rank, "decoded_token": token })
        };
        let mut tokens = Map::new();
        for (rank, &(id, logprob)) in scored.top.iter().take(count).enumerate() {
            tokens.insert(id.to_string(), about(id, logprob, Some(rank + 1)));
        }
        let own = tokens.entry(scored.id.to_string());
        own.or_insert_with(|| about(scored.id, scored.logprob, None));
        list.push(Value::Object(tokens));
    }
    Ok(Value::Array(list))
}

/// The f64 that is written with the digits of an f32, so that equal numbers are equal texts everywhere.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

fn internal(error: fox_infer::Error) -> ApiError {
    ApiError::internal(error.to_string())
}
