//! `/v1/messages`, Anthropic's API: translated to a chat request, and its answer to content blocks.

use std::sync::Arc;

use hyper::body::Bytes;
use serde_json::{Map, Value, json};

use super::choice::{Delta, Finish};
use super::format::{AnswerFormat, write_event};
use super::generation::Generation;
use super::tools::ToolCall;
use super::wire::FullChoice;
use crate::app::{App, random};
use crate::error::{ApiError, ApiResult};
use crate::fields::{Fields, UnknownFields};
use crate::memory::LeasedWriter;
use crate::reference::{COMMON, MESSAGES};

/// Fields with the meaning that they have in chat requests.
pub(crate) const SAME_MESSAGES: &[&str] =
    &["model", "temperature", "top_p", "top_k", "stream", "seed", "ignore_eos"];
/// Fields that do not change the answer.
pub(crate) const IGNORED_MESSAGES: &[&str] =
    &["metadata", "service_tier", "thinking", "container", "betas"];

/// The body of the chat request that a request stands for.
pub(super) fn translate(body: &[u8], strict: bool) -> ApiResult<(Vec<u8>, UnknownFields)> {
    let mut fields = Fields::parse(body, &[MESSAGES, COMMON])?;
    let mut chat = Map::new();
    let mut messages = Vec::new();
    if let Some(system) = fields.take::<Value>("system")? {
        let text = text_of(&system).ok_or_else(|| {
            ApiError::invalid("system", "system must be a text or blocks of text")
        })?;
        messages.push(json!({ "role": "system", "content": text }));
    }
    let list: Vec<Value> = fields
        .take("messages")?
        .ok_or_else(|| ApiError::invalid("messages", "messages is missing"))?;
    for (at, message) in list.iter().enumerate() {
        let translated = translate_message(message).ok_or_else(|| {
            let kinds = "a text, or blocks of type text, tool_use or tool_result";
            ApiError::invalid("messages", format!("message {at} must have {kinds} as content"))
        })?;
        messages.extend(translated);
    }
    chat.insert("messages".into(), Value::Array(messages));
    for &name in SAME_MESSAGES {
        if let Some(value) = fields.take::<Value>(name)? {
            chat.insert(name.into(), value);
        }
    }
    match fields.take::<Value>("max_tokens")? {
        Some(count) => chat.insert("max_tokens".into(), count),
        None => return Err(ApiError::invalid("max_tokens", "max_tokens is missing")),
    };
    if let Some(stops) = fields.take::<Value>("stop_sequences")? {
        chat.insert("stop".into(), stops);
    }
    if let Some(tools) = fields.take::<Vec<Value>>("tools")? {
        let nested = |tool: &Value| {
            let function = json!({ "name": tool["name"], "description": tool["description"],
                "parameters": tool["input_schema"] });
            json!({ "type": "function", "function": function })
        };
        chat.insert("tools".into(), tools.iter().map(nested).collect());
    }
    if let Some(choice) = fields.take::<Value>("tool_choice")? {
        if choice["disable_parallel_tool_use"] == true {
            chat.insert("parallel_tool_calls".into(), json!(false));
        }
        let choice = match choice["type"].as_str() {
            Some("any") => json!("required"),
            Some("tool") => json!({ "type": "function", "function": { "name": choice["name"] } }),
            other => json!(other),
        };
        chat.insert("tool_choice".into(), choice);
    }
    fields.drop(IGNORED_MESSAGES);
    let unknown = fields.finish(strict)?;
    Ok((Value::Object(chat).to_string().into_bytes(), unknown))
}

/// A text, or the texts of blocks.
fn text_of(content: &Value) -> Option<String> {
    match content {
        Value::String(text) => Some(text.clone()),
        Value::Array(blocks) => {
            let texts = blocks.iter().map(|block| match block["type"].as_str() {
                Some("text") => block["text"].as_str(),
                _ => None,
            });
            Some(texts.collect::<Option<Vec<&str>>>()?.concat())
        }
        _ => None,
    }
}

/// A message as chat messages: the result of a tool is a separate one.
fn translate_message(message: &Value) -> Option<Vec<Value>> {
    let Value::Array(blocks) = &message["content"] else {
        let text = message["content"].as_str()?;
        return Some(vec![json!({ "role": message["role"], "content": text })]);
    };
    let (mut messages, mut text, mut calls) = (Vec::new(), String::new(), Vec::new());
    for block in blocks {
        match block["type"].as_str()? {
            "text" => text.push_str(block["text"].as_str()?),
            "tool_use" => {
                let function =
                    json!({ "name": block["name"], "arguments": block["input"].to_string() });
                calls.push(json!({ "id": block["id"], "type": "function", "function": function }));
            }
            "tool_result" => {
                let content = match &block["content"] {
                    Value::Null => String::new(),
                    content => text_of(content)?,
                };
                messages.push(json!({ "role": "tool", "tool_call_id": block["tool_use_id"],
                    "content": content }));
            }
            _ => return None,
        }
    }
    if !calls.is_empty() {
        let role = &message["role"];
        messages.push(json!({ "role": role, "content": text, "tool_calls": calls }));
    } else if !text.is_empty() || messages.is_empty() {
        messages.push(json!({ "role": message["role"], "content": text }));
    }
    Some(messages)
}

/// The shape of a message.
pub(super) struct MessageFormat {
    app: Arc<App>,
    id: String,
    /// Number of the open block, once there is one.
    block: Option<usize>,
    finish: Option<Finish>,
}

impl MessageFormat {
    pub fn new(app: &Arc<App>) -> MessageFormat {
        let id = format!("msg_{:016x}{:016x}", random(), random());
        MessageFormat { app: app.clone(), id, block: None, finish: None }
    }

    fn message(
        &self,
        content: Vec<Value>,
        finish: Option<Finish>,
        generation: &Generation,
    ) -> Value {
        let usage = generation.usage();
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.app.name,
            "content": content, "stop_reason": finish.map(stop_reason), "stop_sequence": null,
            "usage": { "input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens },
        })
    }

    /// Begins the next block.
    fn open(&mut self, content: &Value, bytes: &mut Vec<u8>) {
        self.close(bytes);
        let index = self.block.map_or(0, |block| block + 1);
        self.block = Some(index);
        let event =
            json!({ "type": "content_block_start", "index": index, "content_block": content });
        write_event(bytes, &event);
    }

    fn change(&self, delta: &Value, bytes: &mut Vec<u8>) {
        let event = json!({ "type": "content_block_delta", "index": self.block, "delta": delta });
        write_event(bytes, &event);
    }

    fn close(&self, bytes: &mut Vec<u8>) {
        if let Some(block) = self.block {
            write_event(bytes, &json!({ "type": "content_block_stop", "index": block }));
        }
    }
}

fn stop_reason(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop => "end_turn",
        Finish::Length => "max_tokens",
        Finish::ToolCalls => "tool_use",
    }
}

fn tool_use(call: &ToolCall, input: Value) -> Value {
    json!({ "type": "tool_use", "id": call.id, "name": call.name, "input": input })
}

impl AnswerFormat for MessageFormat {
    fn begin(&mut self, generation: &Generation, bytes: &mut Vec<u8>) {
        let message = self.message(Vec::new(), None, generation);
        write_event(bytes, &json!({ "type": "message_start", "message": message }));
    }

    fn delta(&mut self, delta: &Delta, _: &Generation, bytes: &mut Vec<u8>) -> ApiResult<()> {
        self.finish = self.finish.or(delta.finish);
        if !delta.text.is_empty() {
            if self.block.is_none() {
                self.open(&json!({ "type": "text", "text": "" }), bytes);
            }
            self.change(&json!({ "type": "text_delta", "text": delta.text }), bytes);
        }
        for call in &delta.tool_calls {
            self.open(&tool_use(call, json!({})), bytes);
            let change = json!({ "type": "input_json_delta", "partial_json": call.arguments });
            self.change(&change, bytes);
        }
        Ok(())
    }

    fn end(&mut self, generation: &Generation, bytes: &mut Vec<u8>) {
        self.close(bytes);
        let change = json!({ "stop_reason": self.finish.map(stop_reason), "stop_sequence": null });
        let usage = json!({ "output_tokens": generation.usage().completion_tokens });
        write_event(bytes, &json!({ "type": "message_delta", "delta": change, "usage": usage }));
        write_event(bytes, &json!({ "type": "message_stop" }));
    }

    fn full(&self, choices: &[FullChoice], generation: &Generation) -> ApiResult<Vec<Bytes>> {
        let empty = Delta::default();
        let delta = choices.first().map_or(&empty, FullChoice::delta);
        // The copy of the text.
        generation.lease().grow(delta.text.len())?;
        let mut content = Vec::new();
        if !delta.text.is_empty() || delta.tool_calls.is_empty() {
            content.push(json!({ "type": "text", "text": delta.text }));
        }
        content.extend(delta.tool_calls.iter().map(|call| {
            let input = serde_json::from_str(&call.arguments).unwrap_or(json!({}));
            tool_use(call, input)
        }));
        let message = self.message(content, delta.finish, generation);
        LeasedWriter::json(generation.lease(), &message)
    }
}
