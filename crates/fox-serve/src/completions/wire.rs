//! What goes over the wire, in the shape that OpenAI gave it.

use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::Prompt;
use super::choice::{Delta, Entry};
use super::request::Kind;
use crate::app::{now, random};

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

/// What all parts of an answer have in common.
pub(crate) struct Head {
    id: String,
    created: u64,
    model: String,
    kind: Kind,
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

impl Head {
    pub fn new(model: &str, kind: Kind) -> Head {
        let mark = if kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
        let id = format!("{mark}-{:016x}{:016x}", random(), random());
        Head { id, created: now(), model: model.to_string(), kind }
    }

    fn message<C>(&self, object: &'static str, choices: C, usage: Option<Value>) -> Message<'_, C> {
        let (id, model) = (&self.id, &self.model);
        Message { id, object, created: self.created, model, choices, usage }
    }

    fn chunk_object(&self) -> &'static str {
        if self.kind == Kind::Chat { "chat.completion.chunk" } else { "text_completion" }
    }

    /// A whole response.
    pub fn whole<'a>(
        &'a self,
        choices: &'a [FullChoice],
        usage: Usage,
    ) -> Message<'a, Vec<ChoiceJson<'a>>> {
        let (object, part): (_, fn(&'a Delta) -> ChoiceJson<'a>) = match self.kind {
            Kind::Text => ("text_completion", ChoiceJson::text),
            Kind::Chat => ("chat.completion", ChoiceJson::message),
        };
        let choices = choices.iter().map(|choice| part(&choice.0)).collect();
        self.message(object, choices, Some(usage.json()))
    }

    /// The chunk that begins an answer, where there is one. Where usage is wanted, chunks before the last have
    /// a null.
    pub fn first_chunk(
        &self,
        index: usize,
        include_usage: bool,
    ) -> Option<Message<'_, [Value; 1]>> {
        let delta = json!({ "role": "assistant", "content": "" });
        let choice =
            json!({ "index": index, "delta": delta, "logprobs": null, "finish_reason": null });
        let usage = include_usage.then_some(Value::Null);
        (self.kind == Kind::Chat).then(|| self.message(self.chunk_object(), [choice], usage))
    }

    /// One chunk of a stream.
    pub fn chunk<'a>(
        &'a self,
        delta: &'a Delta,
        include_usage: bool,
    ) -> Message<'a, [ChoiceJson<'a>; 1]> {
        let part = match self.kind {
            Kind::Text => ChoiceJson::text(delta),
            Kind::Chat => ChoiceJson::delta(delta),
        };
        self.message(self.chunk_object(), [part], include_usage.then_some(Value::Null))
    }

    /// The chunk after the last one.
    pub fn usage_chunk(&self, usage: Usage) -> Message<'_, [(); 0]> {
        self.message(self.chunk_object(), [], Some(usage.json()))
    }
}

/// An answer that is not streamed.
pub(crate) struct FullChoice(Delta);

impl FullChoice {
    pub fn new(index: usize) -> Self {
        FullChoice(Delta { index, ..Delta::default() })
    }

    pub fn add(&mut self, delta: Delta) {
        self.0.text.push_str(&delta.text);
        self.0.entries.extend(delta.entries);
        self.0.finish = self.0.finish.or(delta.finish);
        self.0.score = (self.0.score.0 + delta.score.0, self.0.score.1 + delta.score.1);
        self.0.prompt_logprobs = self.0.prompt_logprobs.take().or(delta.prompt_logprobs);
    }

    pub fn set_index(&mut self, index: usize) {
        self.0.index = index;
    }

    /// Of its tokens; the worst when it has none.
    pub fn mean_logprob(&self) -> f64 {
        match self.0.score {
            (0, _) => f64::NEG_INFINITY,
            (count, sum) => sum / count as f64,
        }
    }
}

/// A choice, or what is new of it.
#[derive(Serialize)]
#[serde(untagged)]
pub(crate) enum ChoiceJson<'a> {
    Text {
        text: &'a str,
        index: usize,
        logprobs: Option<Logprobs<'a>>,
        finish_reason: Option<&'static str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        prompt_logprobs: Option<&'a Value>,
    },
    Message {
        index: usize,
        message: ChatMessage<'a>,
        logprobs: Option<ChatLogprobs<'a>>,
        finish_reason: Option<&'static str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        prompt_logprobs: Option<&'a Value>,
    },
    Delta {
        index: usize,
        delta: ChatDelta<'a>,
        logprobs: Option<ChatLogprobs<'a>>,
        finish_reason: Option<&'static str>,
    },
}

#[derive(Serialize)]
pub(crate) struct ChatMessage<'a> {
    role: &'static str,
    content: &'a str,
}

#[derive(Serialize)]
pub(crate) struct ChatDelta<'a> {
    #[serde(skip_serializing_if = "str::is_empty")]
    content: &'a str,
}

impl<'a> ChoiceJson<'a> {
    fn text(delta: &'a Delta) -> Self {
        let entries = &delta.entries;
        ChoiceJson::Text {
            text: &delta.text,
            index: delta.index,
            logprobs: (!entries.is_empty()).then(|| Logprobs::new(entries)),
            finish_reason: delta.finish,
            prompt_logprobs: delta.prompt_logprobs.as_ref(),
        }
    }

    fn message(delta: &'a Delta) -> Self {
        ChoiceJson::Message {
            index: delta.index,
            message: ChatMessage { role: "assistant", content: &delta.text },
            logprobs: ChatLogprobs::new(&delta.entries),
            finish_reason: delta.finish,
            prompt_logprobs: delta.prompt_logprobs.as_ref(),
        }
    }

    fn delta(delta: &'a Delta) -> Self {
        ChoiceJson::Delta {
            index: delta.index,
            delta: ChatDelta { content: &delta.text },
            logprobs: ChatLogprobs::new(&delta.entries),
            finish_reason: delta.finish,
        }
    }
}

/// Lists of equal length, an element per token.
#[derive(Serialize)]
pub(crate) struct Logprobs<'a> {
    tokens: Vec<&'a str>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<Alternatives<'a>>>,
    text_offset: Vec<usize>,
}

impl<'a> Logprobs<'a> {
    fn new(entries: &'a [Entry]) -> Self {
        Logprobs {
            tokens: entries.iter().map(|entry| entry.token.as_str()).collect(),
            token_logprobs: entries.iter().map(|entry| entry.logprob).collect(),
            top_logprobs: entries.iter().map(|e| e.top.as_deref().map(Alternatives)).collect(),
            text_offset: entries.iter().map(|entry| entry.offset).collect(),
        }
    }
}

/// Written as `token_logprobs` are, so that equal numbers are equal texts.
struct Alternatives<'a>(&'a [(String, f32)]);

impl Serialize for Alternatives<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, logprob)| (name, logprob)))
    }
}

/// A list of tokens, each with its likeliest alternatives.
#[derive(Serialize)]
pub(crate) struct ChatLogprobs<'a> {
    content: Vec<ChatToken<'a>>,
}

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
    /// Absent where the token is no text of its own.
    bytes: Option<&'a [u8]>,
}

impl<'a> NamedToken<'a> {
    fn new(token: &'a str, logprob: Option<f32>) -> Self {
        let bytes = (!token.starts_with("token_id:")).then_some(token.as_bytes());
        NamedToken { token, logprob, bytes }
    }
}

impl<'a> ChatLogprobs<'a> {
    /// `None` when there are no tokens.
    fn new(entries: &'a [Entry]) -> Option<Self> {
        let token = |entry: &'a Entry| ChatToken {
            own: NamedToken::new(&entry.token, entry.logprob),
            top_logprobs: entry
                .alternatives()
                .iter()
                .map(|(name, logprob)| NamedToken::new(name, Some(*logprob)))
                .collect(),
        };
        (!entries.is_empty()).then(|| ChatLogprobs { content: entries.iter().map(token).collect() })
    }
}
