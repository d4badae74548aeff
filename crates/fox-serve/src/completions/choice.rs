//! One choice of an answer: tokens in, text with log-probabilities out.

use std::collections::VecDeque;

use fox_data::Tokenizer;
use fox_infer::{FinishReason, ScoredToken, TextDecoder};
use serde::Serialize;

use super::Prompt;
use super::request::CompletionRequest;
use super::tools::{ToolCall, ToolFilter, Tools};
use crate::error::{ApiError, ApiResult};

/// Prompt tokens of a chunk of echoed text.
const ECHO_CHUNK: usize = 2048;

/// A token with its log-probabilities. Texts are looked up when it is serialized.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Entry {
    pub id: i32,
    /// Absent for the first token of a prompt.
    pub logprob: Option<f32>,
    /// The likeliest ids, best first.
    pub top: Vec<(i32, f32)>,
    /// Characters of prompt and answer before it.
    pub offset: usize,
}

impl Entry {
    /// # Errors
    /// A log-probability that is NaN: the model is broken, which must not look like an unlikely token.
    fn new(scored: ScoredToken, offset: usize) -> ApiResult<Entry> {
        if scored.logprob.is_nan() {
            return Err(ApiError::internal("the model's logits are not numbers"));
        }
        let ScoredToken { id, logprob, top, .. } = scored;
        Ok(Entry { id, logprob: Some(logprob), top, offset })
    }

    /// Bytes of memory that an entry with `top` alternatives takes.
    pub fn bytes(top: usize) -> usize {
        size_of::<Entry>() + top * size_of::<(i32, f32)>()
    }
}

/// Why a choice ended, in OpenAI's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Finish {
    Stop,
    Length,
    ToolCalls,
}

/// New text and tokens of a choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Delta {
    pub index: usize,
    pub text: String,
    /// Tokens whose text has begun; empty when no log-probabilities are wanted.
    pub entries: Vec<Entry>,
    /// With the end of the choice.
    pub tool_calls: Vec<ToolCall>,
    pub finish: Option<Finish>,
    /// Number of tokens, and the sum of their log-probabilities.
    pub score: (usize, f64),
}

impl Delta {
    /// Whether there is nothing to send.
    pub fn is_silent(&self) -> bool {
        self.text.is_empty() && self.entries.is_empty() && self.finish.is_none()
    }
}

/// Text and log-probabilities of a prompt, shared by all its choices.
pub(crate) struct PromptEcho {
    pub text: String,
    /// One per token so far when log-probabilities of the prompt are wanted.
    pub entries: Vec<Entry>,
    /// Ends of the chunks in which a choice is sent the echo: entries and bytes of text.
    chunks: Vec<(usize, usize)>,
    decoder: TextDecoder,
    offset: usize,
}

impl PromptEcho {
    /// The echo of `prompt` before any scores. Without scores, `has_text` gives the text at once.
    pub fn new(
        tokenizer: &Tokenizer,
        prompt: &Prompt,
        has_scores: bool,
        has_text: bool,
    ) -> ApiResult<PromptEcho> {
        let decoder = TextDecoder::new(tokenizer, &[], &[]).map_err(internal)?;
        let (text, entries, chunks) = Default::default();
        let mut echo = PromptEcho { text, entries, chunks, decoder, offset: 0 };
        if has_scores {
            let first = Entry { id: prompt.ids[0], logprob: None, top: Vec::new(), offset: 0 };
            echo.entries.push(first);
            echo.decode(prompt, 0, 1, has_text)?;
        } else if has_text {
            for start in (0..prompt.ids.len()).step_by(ECHO_CHUNK) {
                let end = prompt.ids.len().min(start + ECHO_CHUNK);
                echo.decode(prompt, start, end, true)?;
            }
        }
        Ok(echo)
    }

    /// Appends the scores of the next tokens.
    pub fn extend(
        &mut self,
        prompt: &Prompt,
        scores: Vec<ScoredToken>,
        has_text: bool,
    ) -> ApiResult<()> {
        for scored in scores {
            let at = self.entries.len();
            self.entries.push(Entry::new(scored, self.offset)?);
            self.decode_one(prompt, at, has_text)?;
        }
        self.seal_chunk(prompt, self.entries.len(), has_text)
    }

    fn decode(&mut self, prompt: &Prompt, from: usize, to: usize, has_text: bool) -> ApiResult<()> {
        (from..to).try_for_each(|at| self.decode_one(prompt, at, has_text))?;
        self.seal_chunk(prompt, to, has_text)
    }

    /// Adds the text of the token at a position, and the offset of the next one.
    fn decode_one(&mut self, prompt: &Prompt, at: usize, has_text: bool) -> ApiResult<()> {
        if has_text && at >= prompt.marks {
            let delta = self.decoder.push(prompt.ids[at]).map_err(internal)?;
            self.offset += delta.text.chars().count();
            self.text.push_str(&delta.text);
        }
        Ok(())
    }

    fn seal_chunk(&mut self, prompt: &Prompt, tokens: usize, has_text: bool) -> ApiResult<()> {
        if has_text && tokens == prompt.ids.len() {
            self.text.push_str(&self.decoder.finish().map_err(internal)?.text);
        }
        self.chunks.push((self.entries.len(), self.text.len()));
        Ok(())
    }

    /// The chunk with this number, as a delta of a choice, if there is one yet.
    pub fn chunk(&self, number: usize, index: usize) -> Option<Delta> {
        let &(entries, bytes) = self.chunks.get(number)?;
        let start = number.checked_sub(1).map_or((0, 0), |before| self.chunks[before]);
        Some(Delta {
            index,
            text: self.text[start.1..bytes].to_string(),
            entries: self.entries[start.0..entries].to_vec(),
            ..Delta::default()
        })
    }
}

/// The state of a choice.
pub(crate) struct Choice {
    index: usize,
    decoder: TextDecoder,
    has_logprobs: bool,
    /// Ids that end the choice and have no text.
    end_ids: Vec<i32>,
    /// Characters sent so far, those of the prompt included.
    sent: usize,
    /// Tokens whose text is withheld: part of a character, or of a possible stop string.
    withheld: VecDeque<Entry>,
    /// Separates tool calls from text, if the request has tools.
    tools: Option<ToolFilter>,
    /// Chunks of the prompt's echo that were sent.
    pub echoed: usize,
    pub ended: bool,
}

impl Choice {
    /// A choice that continues `prompt`, whose text has `prompt_chars` characters.
    pub fn new(
        tokenizer: &Tokenizer,
        request: &CompletionRequest,
        end_ids: Vec<i32>,
        (index, prompt_chars): (usize, usize),
    ) -> ApiResult<Self> {
        let prompt = &request.prompts[index / request.best_of];
        let decoder = TextDecoder::new(tokenizer, &prompt.ids, &request.stops);
        Ok(Choice {
            index,
            decoder: decoder.map_err(|error| ApiError::invalid("prompt", error.to_string()))?,
            has_logprobs: request.logprobs.is_some(),
            end_ids,
            sent: prompt_chars,
            withheld: VecDeque::new(),
            tools: request.tools.as_ref().map(Tools::filter),
            echoed: 0,
            ended: false,
        })
    }

    /// Takes the next token.
    pub fn push(&mut self, scored: ScoredToken) -> ApiResult<Delta> {
        let (id, score) = (scored.id, (1, f64::from(scored.logprob)));
        if self.has_logprobs {
            let offset = self.sent + self.decoder.withheld().chars().count();
            self.withheld.push_back(Entry::new(scored, offset)?);
        }
        let delta = if self.end_ids.contains(&id) {
            self.finish(&FinishReason::Stop)?
        } else {
            let delta = self.decoder.push(id).map_err(internal)?;
            self.release(delta.text, delta.stopped.then_some(Finish::Stop))
        };
        Ok(Delta { score, ..delta })
    }

    /// Ends the choice for the engine's reason.
    pub fn finish(&mut self, reason: &FinishReason) -> ApiResult<Delta> {
        let last = self.decoder.finish().map_err(internal)?;
        let reason = match reason {
            FinishReason::Stop => Finish::Stop,
            FinishReason::Length if last.stopped => Finish::Stop,
            FinishReason::Length => Finish::Length,
            FinishReason::Interrupted => return Err(fox_infer::Refusal::Closed.into()),
            FinishReason::Grammar(words) => {
                let message = format!("the answer cannot follow its grammar any further: {words}");
                return Err(ApiError::invalid(None, message));
            }
            FinishReason::Failed(words) => return Err(ApiError::internal(words)),
            other => return Err(ApiError::internal(format!("the engine ended with {other:?}"))),
        };
        let mut delta = self.release(last.text, Some(reason));
        if !last.stopped {
            delta.entries.extend(self.withheld.drain(..));
        }
        Ok(delta)
    }

    fn release(&mut self, text: String, finish: Option<Finish>) -> Delta {
        self.sent += text.chars().count();
        self.ended = finish.is_some();
        let begun = self.withheld.iter().take_while(|entry| entry.offset < self.sent).count();
        let entries = self.withheld.drain(..begun).collect();
        let mut delta = Delta { index: self.index, text, entries, finish, ..Delta::default() };
        if let Some(filter) = &mut self.tools {
            delta.text = filter.push(&delta.text);
            if finish.is_some() {
                let (rest, calls) = filter.finish();
                delta.text.push_str(&rest);
                delta.tool_calls = calls;
            }
            if finish == Some(Finish::Stop) && !delta.tool_calls.is_empty() {
                delta.finish = Some(Finish::ToolCalls);
            }
        }
        delta
    }
}

fn internal(error: fox_infer::Error) -> ApiError {
    ApiError::internal(error.to_string())
}
