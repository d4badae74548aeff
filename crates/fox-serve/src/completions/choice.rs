//! One answer in the making: tokens in, text with log-probabilities out.

use std::collections::VecDeque;

use fox_infer::{FinishReason, Scored, TextStream};

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
    /// Characters of prompt and answer before it.
    pub offset: usize,
}

/// What is new about an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Delta {
    pub index: usize,
    pub text: String,
    /// Tokens whose text has begun to be told; empty when no log-probabilities are wanted.
    pub entries: Vec<Entry>,
    pub finish: Option<&'static str>,
}

impl Delta {
    pub fn is_empty(&self) -> bool {
        self.text.is_empty() && self.entries.is_empty() && self.finish.is_none()
    }
}

/// The state of an answer.
pub(crate) struct Choice {
    index: usize,
    stream: TextStream,
    wants_entries: bool,
    /// Ids that end the answer here, because the engine was not told to end at them.
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
        prompt: &Prompt,
        request: &CompletionRequest,
        end_ids: &[i32],
        index: usize,
    ) -> ApiResult<Self> {
        let wants_entries = request.logprobs.is_some();
        let told = match wants_entries {
            true => prompt_text(app, prompt)?.chars().count(),
            false => 0,
        };
        Ok(Choice {
            index,
            stream: TextStream::new(&app.tokenizer, &prompt.ids, &request.stops),
            wants_entries,
            end_ids: end_ids.to_vec(),
            told,
            waiting: VecDeque::new(),
            ended: false,
        })
    }

    /// The prompt, with the scores of its tokens from the second on, or without any.
    pub fn echo(&self, app: &App, prompt: &Prompt, scores: &[Scored]) -> ApiResult<Delta> {
        let mut delta = Delta { index: self.index, ..Delta::default() };
        let mut stream = TextStream::new(&app.tokenizer, &[], &[]);
        let mut offset = 0;
        for (i, &id) in prompt.ids.iter().enumerate() {
            if self.wants_entries {
                let scored = i.checked_sub(1).and_then(|before| scores.get(before));
                delta.entries.push(entry(app, id, scored, offset)?);
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
    pub fn push(&mut self, app: &App, scored: &Scored) -> ApiResult<Delta> {
        if self.wants_entries {
            let offset = self.told + self.stream.held().chars().count();
            self.waiting.push_back(entry(app, scored.id, Some(scored), offset)?);
        }
        if self.end_ids.contains(&scored.id) {
            return self.finish(&FinishReason::Stop);
        }
        let piece = self.stream.push(scored.id).map_err(internal)?;
        Ok(self.tell(piece.text, piece.stopped.then_some("stop")))
    }

    /// The end, as the engine sees it.
    pub fn finish(&mut self, reason: &FinishReason) -> ApiResult<Delta> {
        let piece = self.stream.finish().map_err(internal)?;
        let reason = match reason {
            FinishReason::Stop => "stop",
            FinishReason::Length if piece.stopped => "stop",
            FinishReason::Length => "length",
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
        Delta { index: self.index, text, entries, finish }
    }
}

/// The text of a prompt as the model sees it.
fn prompt_text(app: &App, prompt: &Prompt) -> ApiResult<String> {
    let ids: Vec<u32> = prompt.ids[prompt.marks..].iter().map(|&id| id as u32).collect();
    Ok(app.tokenizer.decode(&ids)?)
}

/// # Errors
/// A log-probability that is no number: the model is broken, which must not look like an unlikely token.
fn entry(app: &App, id: i32, scored: Option<&Scored>, offset: usize) -> ApiResult<Entry> {
    if scored.is_some_and(|scored| scored.logprob.is_nan()) {
        return Err(ApiError::internal("the model's logits are not numbers"));
    }
    let token = app.token_name(id);
    let top = scored.map(|scored| {
        let mut top: Vec<(String, f32)> = Vec::with_capacity(scored.top.len() + 1);
        let own = (id, scored.logprob);
        for (id, logprob) in scored.top.iter().chain([&own]) {
            let name = app.token_name(*id);
            // Names are keys in JSON; the first is the likeliest.
            if !top.iter().any(|(other, _)| *other == name) {
                top.push((name, logprob.max(LEAST)));
            }
        }
        top
    });
    let logprob = scored.map(|scored| scored.logprob.max(LEAST));
    Ok(Entry { token, logprob, top, offset })
}

fn internal(error: fox_infer::Error) -> ApiError {
    ApiError::internal(error.to_string())
}
