//! The JSON of answers, in OpenAI's shapes.

use std::sync::Arc;

use hyper::body::Bytes;
use serde::ser::{SerializeMap, SerializeSeq, SerializeStruct};
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::Prompt;
use super::choice::{Delta, Entry, Finish, PromptEcho};
use super::format::{AnswerFormat, write_data};
use super::generation::Generation;
use super::request::{CompletionRequest, Kind};
use super::tools::ToolCall;
use crate::app::{App, now, random};
use crate::error::ApiResult;
use crate::memory::LeasedWriter;
use crate::token_names::{TokenName, TokenNames};

/// Written for a probability of zero, because JSON has no infinity.
const LEAST: f32 = -9999.0;

/// Tokens read and written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
}

impl Usage {
    /// Before anything was generated.
    pub fn of_prompts(prompts: &[Prompt]) -> Usage {
        let prompt_tokens = prompts.iter().map(|prompt| prompt.ids.len()).sum();
        Usage { prompt_tokens, completion_tokens: 0 }
    }

    fn json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        })
    }
}

/// What all chunks of an answer have in common.
pub(crate) struct Envelope {
    app: Arc<App>,
    id: String,
    created: u64,
    kind: Kind,
    /// Alternatives per token.
    top: usize,
}

/// A response or a chunk of one.
#[derive(Serialize)]
pub(crate) struct Message<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: C,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Value>,
}

impl Envelope {
    pub fn new(app: &Arc<App>, kind: Kind, logprobs: Option<usize>) -> Envelope {
        let mark = if kind != Kind::Text { "chatcmpl" } else { "cmpl" };
        let id = format!("{mark}-{:016x}{:016x}", random(), random());
        Envelope { id, created: now(), app: app.clone(), kind, top: logprobs.unwrap_or(0) }
    }

    fn message<C>(&self, object: &'static str, choices: C, usage: Option<Value>) -> Message<'_, C> {
        let (id, model) = (&self.id, &self.app.name);
        Message { id, object, created: self.created, model, choices, usage }
    }

    fn chunk_object(&self) -> &'static str {
        if self.kind != Kind::Text { "chat.completion.chunk" } else { "text_completion" }
    }

    fn entries<'a>(&'a self, prompt: &'a [Entry], own: &'a [Entry]) -> Entries<'a> {
        Entries { prompt, own, names: &self.app.names, top: self.top }
    }

    /// A complete response.
    fn full_message<'a>(
        &'a self,
        choices: &'a [FullChoice],
        generation: &'a Generation,
    ) -> Message<'a, Vec<ChoiceJson<'a>>> {
        let request = generation.request();
        let choices = choices.iter().map(|choice| {
            let echo = &generation.echoes()[choice.prompt];
            self.full_choice(&choice.delta, echo, request)
        });
        let object = if self.kind != Kind::Text { "chat.completion" } else { "text_completion" };
        self.message(object, choices.collect(), Some(generation.usage().json()))
    }

    fn full_choice<'a>(
        &'a self,
        delta: &'a Delta,
        echo: &'a PromptEcho,
        request: &CompletionRequest,
    ) -> ChoiceJson<'a> {
        let has_echo = request.echo && request.logprobs.is_some();
        let echoed = if has_echo { &echo.entries[..] } else { &[] };
        let entries = self.entries(echoed, &delta.entries);
        let names = &self.app.names;
        let prompt_logprobs = request.prompt_logprobs.map(|count| PromptLogprobs {
            entries: &echo.entries,
            names,
            count,
        });
        let (index, finish_reason) = (delta.index, delta.finish);
        match self.kind {
            Kind::Text => ChoiceJson::Text {
                text: JoinedText(if request.echo { &echo.text } else { "" }, &delta.text),
                index,
                logprobs: entries.into_text(),
                finish_reason,
                prompt_logprobs,
            },
            _ => ChoiceJson::Message {
                index,
                message: ChatMessage {
                    role: "assistant",
                    content: (!delta.text.is_empty() || delta.tool_calls.is_empty())
                        .then_some(&delta.text),
                    tool_calls: &delta.tool_calls,
                },
                logprobs: entries.into_chat(),
                finish_reason,
                prompt_logprobs,
            },
        }
    }

    /// The chunk that begins a choice, where there is one. Where usage is wanted, chunks before the last have
    /// a null.
    fn first_chunk(&self, index: usize, include_usage: bool) -> Option<Message<'_, [Value; 1]>> {
        let delta = json!({ "role": "assistant", "content": "" });
        let choice =
            json!({ "index": index, "delta": delta, "logprobs": null, "finish_reason": null });
        let usage = include_usage.then_some(Value::Null);
        (self.kind != Kind::Text).then(|| self.message(self.chunk_object(), [choice], usage))
    }

    /// One chunk of a streamed response.
    fn chunk<'a>(
        &'a self,
        delta: &'a Delta,
        include_usage: bool,
    ) -> Message<'a, [ChoiceJson<'a>; 1]> {
        let entries = self.entries(&[], &delta.entries);
        let (index, finish_reason) = (delta.index, delta.finish);
        let choice = match self.kind {
            Kind::Text => ChoiceJson::Text {
                text: JoinedText("", &delta.text),
                index,
                logprobs: entries.into_text(),
                finish_reason,
                prompt_logprobs: None,
            },
            _ => ChoiceJson::Delta {
                index,
                delta: ChatDelta {
                    content: &delta.text,
                    tool_calls: (delta.tool_calls.iter().enumerate())
                        .map(|(at, call)| call.json(Some(at)))
                        .collect(),
                },
                logprobs: entries.into_chat(),
                finish_reason,
            },
        };
        self.message(self.chunk_object(), [choice], include_usage.then_some(Value::Null))
    }

    /// The chunk after the last one.
    fn usage_chunk(&self, usage: Usage) -> Message<'_, [(); 0]> {
        self.message(self.chunk_object(), [], Some(usage.json()))
    }
}

impl AnswerFormat for Envelope {
    fn begin(&mut self, generation: &Generation, bytes: &mut Vec<u8>) {
        for index in 0..generation.len() {
            let include_usage = generation.request().include_usage;
            if let Some(chunk) = self.first_chunk(index, include_usage) {
                write_data(bytes, &chunk);
            }
        }
    }

    fn delta(
        &mut self,
        delta: &Delta,
        generation: &Generation,
        bytes: &mut Vec<u8>,
    ) -> ApiResult<()> {
        write_data(bytes, &self.chunk(delta, generation.request().include_usage));
        Ok(())
    }

    fn end(&mut self, generation: &Generation, bytes: &mut Vec<u8>) {
        if generation.request().include_usage {
            write_data(bytes, &self.usage_chunk(generation.usage()));
        }
        bytes.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn full(&self, choices: &[FullChoice], generation: &Generation) -> ApiResult<Vec<Bytes>> {
        LeasedWriter::json(generation.lease(), &self.full_message(choices, generation))
    }
}

/// A choice that is not streamed: the sum of its deltas.
pub(crate) struct FullChoice {
    delta: Delta,
    /// Number of its prompt.
    prompt: usize,
}

impl FullChoice {
    pub fn new(index: usize, prompt: usize) -> Self {
        FullChoice { delta: Delta { index, ..Delta::default() }, prompt }
    }

    pub fn add(&mut self, delta: Delta) {
        let sum = &mut self.delta;
        sum.text.push_str(&delta.text);
        sum.entries.extend(delta.entries);
        sum.tool_calls.extend(delta.tool_calls);
        sum.finish = sum.finish.or(delta.finish);
        sum.score = (sum.score.0 + delta.score.0, sum.score.1 + delta.score.1);
    }

    pub fn delta(&self) -> &Delta {
        &self.delta
    }

    pub fn set_index(&mut self, index: usize) {
        self.delta.index = index;
    }

    #[cfg(test)]
    pub fn text(&self) -> &str {
        &self.delta.text
    }

    /// Mean log-probability of its tokens; minus infinity when it has none.
    pub fn mean_logprob(&self) -> f64 {
        match self.delta.score {
            (0, _) => f64::NEG_INFINITY,
            (count, sum) => sum / count as f64,
        }
    }
}

/// A choice, or a delta of one.
#[derive(Serialize)]
#[serde(untagged)]
pub(crate) enum ChoiceJson<'a> {
    Text {
        text: JoinedText<'a>,
        index: usize,
        logprobs: Option<TextLogprobs<'a>>,
        finish_reason: Option<Finish>,
        #[serde(skip_serializing_if = "Option::is_none")]
        prompt_logprobs: Option<PromptLogprobs<'a>>,
    },
    Message {
        index: usize,
        message: ChatMessage<'a>,
        logprobs: Option<ChatLogprobs<'a>>,
        finish_reason: Option<Finish>,
        #[serde(skip_serializing_if = "Option::is_none")]
        prompt_logprobs: Option<PromptLogprobs<'a>>,
    },
    Delta {
        index: usize,
        delta: ChatDelta<'a>,
        logprobs: Option<ChatLogprobs<'a>>,
        finish_reason: Option<Finish>,
    },
}

#[derive(Serialize)]
pub(crate) struct ChatMessage<'a> {
    role: &'static str,
    /// Null in a choice that only calls tools.
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    tool_calls: &'a [ToolCall],
}

#[derive(Serialize)]
pub(crate) struct ChatDelta<'a> {
    #[serde(skip_serializing_if = "str::is_empty")]
    content: &'a str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Value>,
}

/// Two texts, written as one.
pub(crate) struct JoinedText<'a>(&'a str, &'a str);

impl Serialize for JoinedText<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{}{}", self.0, self.1))
    }
}

/// Entries of a prompt and of an answer, as one list.
#[derive(Clone, Copy)]
struct Entries<'a> {
    prompt: &'a [Entry],
    own: &'a [Entry],
    names: &'a TokenNames,
    /// Alternatives per token.
    top: usize,
}

impl<'a> Entries<'a> {
    fn iter(self) -> impl Iterator<Item = &'a Entry> {
        self.prompt.iter().chain(self.own)
    }

    /// `None` when there are no entries.
    fn into_text(self) -> Option<TextLogprobs<'a>> {
        (self.prompt.len() + self.own.len() > 0).then_some(TextLogprobs(self))
    }

    fn into_chat(self) -> Option<ChatLogprobs<'a>> {
        (self.prompt.len() + self.own.len() > 0).then_some(ChatLogprobs(self))
    }

    /// Names and log-probabilities of the likeliest tokens and, after them, of the token itself. Names are keys in
    /// JSON: of equal ones the first stays.
    fn alternatives(self, entry: &'a Entry) -> Vec<(&'a TokenName, f32)> {
        let own = entry.logprob.map(|logprob| (entry.id, logprob));
        let mut list: Vec<(&TokenName, f32)> = Vec::with_capacity(self.top + 1);
        for (id, logprob) in entry.top.iter().take(self.top).copied().chain(own) {
            let name = self.names.get(id);
            if !list.iter().any(|(other, _)| other.as_str() == name.as_str()) {
                list.push((name, logprob.max(LEAST)));
            }
        }
        list
    }
}

/// One value per entry, computed when it is written.
struct Column<'a, F>(Entries<'a>, F);

impl<'a, T: Serialize, F: Fn(&'a Entry) -> T> Serialize for Column<'a, F> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(&self.1))
    }
}

fn logprob(entry: &Entry) -> Option<f32> {
    entry.logprob.map(|logprob| logprob.max(LEAST))
}

/// Lists of equal length, an element per token.
pub(crate) struct TextLogprobs<'a>(Entries<'a>);

impl Serialize for TextLogprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let entries = self.0;
        let top = |entry| logprob(entry).map(|_| Alternatives(entries.alternatives(entry)));
        let mut lists = serializer.serialize_struct("logprobs", 4)?;
        let name = |entry: &Entry| entries.names.get(entry.id).as_str();
        lists.serialize_field("tokens", &Column(entries, name))?;
        lists.serialize_field("token_logprobs", &Column(entries, logprob))?;
        lists.serialize_field("top_logprobs", &Column(entries, top))?;
        lists.serialize_field("text_offset", &Column(entries, |entry: &Entry| entry.offset))?;
        lists.end()
    }
}

/// `{NAME: LOGPROB}`, best first.
struct Alternatives<'a>(Vec<(&'a TokenName, f32)>);

impl Serialize for Alternatives<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, logprob)| (name.as_str(), logprob)))
    }
}

/// A list of tokens, each with its likeliest alternatives.
pub(crate) struct ChatLogprobs<'a>(Entries<'a>);

#[derive(Serialize)]
struct ChatToken<'a> {
    #[serde(flatten)]
    own: NamedToken<'a>,
    top_logprobs: Vec<NamedToken<'a>>,
}

#[derive(Serialize)]
struct NamedToken<'a> {
    token: &'a str,
    logprob: Option<f32>,
    /// Absent where the token has no text that stands alone.
    bytes: Option<&'a [u8]>,
}

impl<'a> NamedToken<'a> {
    fn new(name: &'a TokenName, logprob: Option<f32>) -> Self {
        NamedToken { token: name.as_str(), logprob, bytes: name.bytes() }
    }
}

impl Serialize for ChatLogprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let entries = self.0;
        let token = |entry| {
            let top = entries.alternatives(entry).into_iter().take(entries.top);
            ChatToken {
                own: NamedToken::new(entries.names.get(entry.id), logprob(entry)),
                top_logprobs: top.map(|(name, x)| NamedToken::new(name, Some(x))).collect(),
            }
        };
        let mut object = serializer.serialize_struct("logprobs", 1)?;
        object.serialize_field("content", &Column(entries, token))?;
        object.end()
    }
}

/// vLLM's form for prompts: null for the first token and `{ID: {logprob, rank, decoded_token}}` for the others. The
/// rank is known for the likeliest `count`.
pub(crate) struct PromptLogprobs<'a> {
    entries: &'a [Entry],
    names: &'a TokenNames,
    count: usize,
}

#[derive(Serialize)]
struct PromptToken<'a> {
    logprob: f32,
    rank: Option<usize>,
    decoded_token: &'a str,
}

impl Serialize for PromptLogprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(self.entries.len()))?;
        for entry in self.entries {
            list.serialize_element(&PromptTokens(entry, self))?;
        }
        list.end()
    }
}

struct PromptTokens<'a>(&'a Entry, &'a PromptLogprobs<'a>);

impl Serialize for PromptTokens<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let PromptTokens(entry, PromptLogprobs { names, count, .. }) = self;
        let Some(own) = logprob(entry) else { return serializer.serialize_none() };
        let token = |id: i32, logprob: f32, rank| PromptToken {
            logprob: logprob.max(LEAST),
            rank,
            decoded_token: names.get(id).as_str(),
        };
        let mut map = serializer.serialize_map(None)?;
        let top = &entry.top[..entry.top.len().min(*count)];
        for (rank, &(id, logprob)) in top.iter().enumerate() {
            map.serialize_entry(&id.to_string(), &token(id, logprob, Some(rank + 1)))?;
        }
        if !top.iter().any(|(id, _)| *id == entry.id) {
            map.serialize_entry(&entry.id.to_string(), &token(entry.id, own, None))?;
        }
        map.end()
    }
}
