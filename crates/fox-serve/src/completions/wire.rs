//! What goes over the wire, in the shape that OpenAI gave it.

use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::Prompt;
use super::choice::{Delta, Entry};
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
    pub fn new(model: &str) -> Head {
        let id = format!("cmpl-{:016x}{:016x}", random(), random());
        Head { id, created: now(), model: model.to_string() }
    }

    fn message<C>(&self, choices: C, usage: Option<Value>) -> Message<'_, C> {
        Message {
            id: &self.id,
            object: "text_completion",
            created: self.created,
            model: &self.model,
            choices,
            usage,
        }
    }

    /// A whole response.
    pub fn whole<'a>(
        &'a self,
        choices: &'a [WholeChoice],
        usage: Usage,
    ) -> Message<'a, Vec<ChoicePart<'a>>> {
        let choices = choices.iter().map(|choice| ChoicePart::new(&choice.0)).collect();
        self.message(choices, Some(usage.json()))
    }

    /// One chunk of a stream. Where usage is wanted, chunks before the last have a null.
    pub fn chunk<'a>(
        &'a self,
        delta: &'a Delta,
        include_usage: bool,
    ) -> Message<'a, [ChoicePart<'a>; 1]> {
        self.message([ChoicePart::new(delta)], include_usage.then_some(Value::Null))
    }

    /// The chunk after the last one.
    pub fn usage_chunk(&self, usage: Usage) -> Message<'_, [(); 0]> {
        self.message([], Some(usage.json()))
    }
}

/// An answer that is not streamed.
pub(crate) struct WholeChoice(Delta);

impl WholeChoice {
    pub fn new(index: usize) -> Self {
        WholeChoice(Delta { index, ..Delta::default() })
    }

    pub fn add(&mut self, delta: Delta) {
        self.0.text.push_str(&delta.text);
        self.0.entries.extend(delta.entries);
        self.0.finish = self.0.finish.or(delta.finish);
    }
}

/// A choice, or what is new of it.
#[derive(Serialize)]
pub(crate) struct ChoicePart<'a> {
    text: &'a str,
    index: usize,
    logprobs: Option<Logprobs<'a>>,
    finish_reason: Option<&'static str>,
}

impl<'a> ChoicePart<'a> {
    fn new(delta: &'a Delta) -> Self {
        let entries = &delta.entries;
        ChoicePart {
            text: &delta.text,
            index: delta.index,
            logprobs: (!entries.is_empty()).then(|| Logprobs::new(entries)),
            finish_reason: delta.finish,
        }
    }
}

/// Lists of equal length, an element per token.
#[derive(Serialize)]
struct Logprobs<'a> {
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
