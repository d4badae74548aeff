//! Chat templates: from the messages of a conversation to the text of a prompt.
//!
//! Templates come with checkpoints, which may be hostile, so rendering is bounded ([`limits`]) and runs on a thread with
//! a stack of known size.

mod engine;
mod files;
mod limits;

use std::thread;

use serde::Serialize;
use serde_json::Value;

pub use limits::TemplateLimit;

use crate::Tokenizer;

/// Stack of the thread that compiles and renders a template. The depth of values, expressions and macros is limited
/// such that a fraction of it is used.
const STACK_BYTES: usize = 32 << 20;

/// How a conversation is written for the model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatTemplate {
    /// A Jinja template, as in `chat_template` of `tokenizer_config.json`. Without one, every message is a paragraph
    /// that starts with `User:` or `Assistant:`.
    pub source: Option<String>,
    /// The start marker, for the template.
    pub bos_token: String,
    /// The marker that ends a document, for the template.
    pub eos_token: String,
}

/// A message, as templates see it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant` or another role that the template knows.
    pub role: String,
    /// The text.
    pub content: String,
    /// The author's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Calls of tools by the assistant, in OpenAI's form, with their arguments as objects.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<Value>,
    /// The call that a message of the role `tool` answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
}

/// Why a conversation has no prompt. Every message is one sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// The template is not valid Jinja.
    #[error("the chat template has a syntax error: {detail}")]
    Syntax {
        /// What and where.
        detail: String,
    },
    /// The template called `raise_exception`.
    #[error("the chat template refuses these messages: {detail}")]
    Refused {
        /// The template's words.
        detail: String,
    },
    /// The template exceeds a limit on size, depth or time.
    #[error("the chat template {0}; use another template")]
    Limit(TemplateLimit),
    /// The template uses something undefined or a wrong type.
    #[error("the chat template failed: {detail}")]
    Failed {
        /// What and where.
        detail: String,
    },
}

impl ChatTemplate {
    /// Compiles the template, to report mistakes before the first conversation.
    ///
    /// # Errors
    /// [`ChatError::Syntax`] or [`ChatError::Limit`].
    pub fn check(&self) -> Result<(), ChatError> {
        self.with_renderer(|_| Ok(()))
    }

    /// The template of a model that has none, with the markers of its tokenizer.
    pub fn without_source(tokenizer: &Tokenizer) -> Self {
        let marker = tokenizer.marker_text().to_owned();
        Self { source: None, bos_token: marker.clone(), eos_token: marker }
    }

    /// Whether the template writes the start marker itself.
    pub fn writes_bos(&self) -> bool {
        self.source.is_some()
    }

    /// Strings that end an answer besides those of the request.
    pub fn stop_strings(&self) -> &[&str] {
        if self.source.is_none() { &["\nUser:"] } else { &[] }
    }

    /// Renders the prompt that the model continues with its answer.
    ///
    /// # Errors
    /// Messages that the template refuses, and templates that fail or exceed a limit.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
    ) -> Result<String, ChatError> {
        self.render_with_tools(messages, &[], add_generation_prompt)
    }

    /// As [`ChatTemplate::render`], with the tools that the answer may call, in OpenAI's form.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`].
    pub fn render_with_tools(
        &self,
        messages: &[ChatMessage],
        tools: &[Value],
        add_generation_prompt: bool,
    ) -> Result<String, ChatError> {
        self.with_renderer(|renderer| renderer.write(messages, tools, add_generation_prompt))
    }

    /// Compiles the template once for many conversations; `work` runs on a thread with a large stack.
    ///
    /// # Errors
    /// [`ChatError::Syntax`], [`ChatError::Limit`], and the errors of `work`.
    pub fn with_renderer<T: Send>(
        &self,
        work: impl FnOnce(&ChatRenderer<'_>) -> Result<T, ChatError> + Send,
    ) -> Result<T, ChatError> {
        let Some(source) = &self.source else {
            return work(&ChatRenderer { template: self, compiled: None });
        };
        on_large_stack(|| {
            engine::with_compiled(source, |compiled| {
                work(&ChatRenderer { template: self, compiled: Some(compiled) })
            })
        })
    }
}

/// A compiled [`ChatTemplate`].
pub struct ChatRenderer<'a> {
    template: &'a ChatTemplate,
    compiled: Option<&'a engine::Compiled<'a>>,
}

impl ChatRenderer<'_> {
    /// As [`ChatTemplate::render`].
    ///
    /// # Errors
    /// As [`ChatTemplate::render`].
    pub fn render(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
    ) -> Result<String, ChatError> {
        self.write(messages, &[], add_generation_prompt)
    }

    fn write(
        &self,
        messages: &[ChatMessage],
        tools: &[Value],
        add_generation_prompt: bool,
    ) -> Result<String, ChatError> {
        let Some(compiled) = self.compiled else {
            return Ok(paragraphs(messages, add_generation_prompt));
        };
        compiled.render(&engine::Context {
            messages,
            tools,
            add_generation_prompt,
            bos_token: &self.template.bos_token,
            eos_token: &self.template.eos_token,
        })
    }
}

fn on_large_stack<T: Send>(
    work: impl FnOnce() -> Result<T, ChatError> + Send,
) -> Result<T, ChatError> {
    let failed = |detail: &str| ChatError::Failed { detail: detail.to_owned() };
    thread::scope(|scope| {
        let name = "chat-template".to_owned();
        let thread =
            thread::Builder::new().name(name).stack_size(STACK_BYTES).spawn_scoped(scope, work);
        let thread = thread.map_err(|error| failed(&format!("no thread for it ({error})")))?;
        thread.join().unwrap_or_else(|_| Err(failed("the template engine panicked")))
    })
}

fn paragraphs(messages: &[ChatMessage], add_generation_prompt: bool) -> String {
    let mut text = String::new();
    for message in messages {
        match message.role.as_str() {
            "user" => text.push_str("User: "),
            "assistant" => text.push_str("Assistant: "),
            _ => {}
        }
        text.push_str(&message.content);
        text.push('\n');
    }
    if add_generation_prompt {
        text.push_str("Assistant:");
    }
    text
}
