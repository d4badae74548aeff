//! `/v1/responses`: translated to a chat request, and its answer to a response of items.

use std::sync::Arc;

use hyper::body::Bytes;
use serde_json::{Map, Value, json};

use super::choice::{Delta, Finish};
use super::format::{AnswerFormat, write_event};
use super::generation::Generation;
use super::tools::ToolCall;
use super::wire::{FullChoice, Usage};
use crate::app::{App, now, random};
use crate::error::{ApiError, ApiResult};
use crate::fields::{Fields, UnknownFields};
use crate::memory::LeasedWriter;
use crate::reference::{CHAT, COMMON, RESPONSES};

/// Fields with the meaning that they have in chat requests.
#[rustfmt::skip]
pub(crate) const SAME_RESPONSES: &[&str] = &[
    "model", "temperature", "top_p", "top_k", "min_p", "stream", "seed", "stop", "ignore_eos",
    "logit_bias", "min_tokens", "parallel_tool_calls",
];
/// Fields that do not change the answer.
#[rustfmt::skip]
pub(crate) const IGNORED_RESPONSES: &[&str] = &[
    "store", "metadata", "include", "truncation", "reasoning", "service_tier", "prompt_cache_key",
    "safety_identifier", "user", "stream_options",
];

/// The body of the chat request that a request stands for.
pub(super) fn translate(body: &[u8], strict: bool) -> ApiResult<(Vec<u8>, UnknownFields)> {
    let mut fields = Fields::parse(body, &[RESPONSES, COMMON, CHAT])?;
    let mut chat = Map::new();
    let mut messages = Vec::new();
    if let Some(text) = fields.take::<String>("instructions")? {
        messages.push(json!({ "role": "system", "content": text }));
    }
    match fields.take::<Value>("input")? {
        None => return Err(ApiError::invalid("input", "input is missing")),
        Some(Value::Array(items)) => {
            for (at, item) in items.iter().enumerate() {
                let message = input_item(item).ok_or_else(|| {
                    let message =
                        format!("item {at} of input must be a message with text, a function call or its output");
                    ApiError::invalid("input", message)
                })?;
                messages.push(message);
            }
        }
        Some(text) => messages.push(json!({ "role": "user", "content": text })),
    }
    chat.insert("messages".into(), Value::Array(messages));
    for &name in SAME_RESPONSES {
        if let Some(value) = fields.take::<Value>(name)? {
            chat.insert(name.into(), value);
        }
    }
    if let Some(count) = fields.take::<Value>("max_output_tokens")? {
        chat.insert("max_tokens".into(), count);
    }
    if let Some(tools) = fields.take::<Vec<Value>>("tools")? {
        let nested = |tool: &Value| json!({ "type": tool["type"], "function": tool });
        chat.insert("tools".into(), tools.iter().map(nested).collect());
    }
    if let Some(mut choice) = fields.take::<Value>("tool_choice")? {
        if choice.is_object() {
            choice = json!({ "type": "function", "function": { "name": choice["name"] } });
        }
        chat.insert("tool_choice".into(), choice);
    }
    if let Some(text) = fields.take::<Value>("text")?
        && text["format"].is_object()
    {
        let format = &text["format"];
        let format = match format["type"] == "json_schema" {
            true => json!({ "type": "json_schema", "json_schema": format }),
            false => format.clone(),
        };
        chat.insert("response_format".into(), format);
    }
    for name in ["previous_response_id", "conversation", "background"] {
        fields.ignore(name, &[json!(false)], "responses are not stored; send the whole input")?;
    }
    fields.drop(IGNORED_RESPONSES);
    let unknown = fields.finish(strict)?;
    Ok((Value::Object(chat).to_string().into_bytes(), unknown))
}

fn input_item(item: &Value) -> Option<Value> {
    match item["type"].as_str() {
        Some("function_call") => {
            let function = json!({ "name": item["name"], "arguments": item["arguments"] });
            let call = json!({ "id": item["call_id"], "type": "function", "function": function });
            Some(json!({ "role": "assistant", "content": null, "tool_calls": [call] }))
        }
        Some("function_call_output") => {
            let output = item["output"].as_str()?;
            Some(json!({ "role": "tool", "tool_call_id": item["call_id"], "content": output }))
        }
        Some("message") | None => {
            let content = match &item["content"] {
                Value::String(text) => text.clone(),
                Value::Array(parts) => {
                    let text = |part: &Value| {
                        let is_text = part["type"] == "input_text" || part["type"] == "output_text";
                        part["text"].as_str().filter(|_| is_text).map(str::to_string)
                    };
                    parts.iter().map(text).collect::<Option<Vec<String>>>()?.concat()
                }
                _ => return None,
            };
            Some(json!({ "role": item["role"], "content": content }))
        }
        Some(_) => None,
    }
}

/// The shape of a response.
pub(super) struct ResponseFormat {
    app: Arc<App>,
    id: String,
    message_id: String,
    created: u64,
    /// Number of the next event.
    sequence: u64,
    text: String,
    calls: Vec<ToolCall>,
    finish: Option<Finish>,
    is_open: bool,
}

impl ResponseFormat {
    pub fn new(app: &Arc<App>) -> ResponseFormat {
        ResponseFormat {
            app: app.clone(),
            id: format!("resp_{:016x}{:016x}", random(), random()),
            message_id: format!("msg_{:016x}", random()),
            created: now(),
            sequence: 0,
            text: String::new(),
            calls: Vec::new(),
            finish: None,
            is_open: false,
        }
    }

    fn object(&self, status: &str, output: Vec<Value>, usage: Option<Usage>) -> Value {
        let details = match status {
            "incomplete" => json!({ "reason": "max_output_tokens" }),
            _ => Value::Null,
        };
        let usage = usage.map(|usage| {
            json!({
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": { "cached_tokens": 0 },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": { "reasoning_tokens": 0 },
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            })
        });
        json!({
            "id": self.id, "object": "response", "created_at": self.created, "status": status,
            "error": null, "incomplete_details": details, "instructions": null, "metadata": {},
            "model": self.app.name, "output": output, "parallel_tool_calls": true, "tools": [],
            "tool_choice": "auto", "temperature": null, "top_p": null, "usage": usage,
        })
    }

    fn message(&self, status: &str, content: Vec<Value>) -> Value {
        json!({ "type": "message", "id": self.message_id, "status": status, "role": "assistant",
            "content": content })
    }

    fn output(&self, text: &str, calls: &[ToolCall]) -> Vec<Value> {
        let mut output = Vec::new();
        if !text.is_empty() || calls.is_empty() {
            output.push(self.message("completed", vec![part(text)]));
        }
        output.extend(calls.iter().map(|call| item(call, &call.arguments, "completed")));
        output
    }

    fn write(&mut self, bytes: &mut Vec<u8>, mut event: Value) {
        event["sequence_number"] = json!(self.sequence);
        self.sequence += 1;
        write_event(bytes, &event);
    }

    fn open(&mut self, bytes: &mut Vec<u8>) {
        if std::mem::replace(&mut self.is_open, true) {
            return;
        }
        let item = self.message("in_progress", Vec::new());
        self.write(
            bytes,
            json!({ "type": "response.output_item.added", "output_index": 0, "item": item }),
        );
        let event = json!({ "type": "response.content_part.added", "item_id": self.message_id,
            "output_index": 0, "content_index": 0, "part": part("") });
        self.write(bytes, event);
    }

    fn close(&mut self, bytes: &mut Vec<u8>) {
        let (id, text) = (self.message_id.clone(), self.text.clone());
        for (kind, name, value) in [
            ("response.output_text.done", "text", json!(text)),
            ("response.content_part.done", "part", part(&text)),
        ] {
            let mut event =
                json!({ "type": kind, "item_id": id, "output_index": 0, "content_index": 0 });
            event[name] = value;
            self.write(bytes, event);
        }
        let item = self.message("completed", vec![part(&text)]);
        self.write(
            bytes,
            json!({ "type": "response.output_item.done", "output_index": 0, "item": item }),
        );
    }

    fn write_call(&mut self, call: &ToolCall, index: usize, bytes: &mut Vec<u8>) {
        let id = item(call, "", "")["id"].clone();
        let begun = item(call, "", "in_progress");
        self.write(
            bytes,
            json!({ "type": "response.output_item.added", "output_index": index, "item": begun }),
        );
        for (kind, name) in [("delta", "delta"), ("done", "arguments")] {
            let kind = format!("response.function_call_arguments.{kind}");
            let mut event = json!({ "type": kind, "item_id": id, "output_index": index });
            event[name] = json!(call.arguments);
            self.write(bytes, event);
        }
        let done = item(call, &call.arguments, "completed");
        self.write(
            bytes,
            json!({ "type": "response.output_item.done", "output_index": index, "item": done }),
        );
    }
}

fn part(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] })
}

fn item(call: &ToolCall, arguments: &str, status: &str) -> Value {
    json!({ "type": "function_call", "id": call.id.replace("call_", "fc_"), "call_id": call.id,
        "name": call.name, "arguments": arguments, "status": status })
}

fn status(finish: Option<Finish>) -> &'static str {
    if finish == Some(Finish::Length) { "incomplete" } else { "completed" }
}

impl AnswerFormat for ResponseFormat {
    fn begin(&mut self, _: &Generation, bytes: &mut Vec<u8>) {
        for kind in ["response.created", "response.in_progress"] {
            let response = self.object("in_progress", Vec::new(), None);
            self.write(bytes, json!({ "type": kind, "response": response }));
        }
    }

    fn delta(
        &mut self,
        delta: &Delta,
        generation: &Generation,
        bytes: &mut Vec<u8>,
    ) -> ApiResult<()> {
        self.finish = self.finish.or(delta.finish);
        self.calls.extend(delta.tool_calls.iter().cloned());
        if !delta.text.is_empty() {
            generation.lease().grow(delta.text.len())?;
            self.open(bytes);
            self.text.push_str(&delta.text);
            let event = json!({ "type": "response.output_text.delta", "item_id": self.message_id,
                "output_index": 0, "content_index": 0, "delta": delta.text, "logprobs": [] });
            self.write(bytes, event);
        }
        Ok(())
    }

    fn end(&mut self, generation: &Generation, bytes: &mut Vec<u8>) {
        let calls = std::mem::take(&mut self.calls);
        if calls.is_empty() {
            self.open(bytes);
        }
        if self.is_open {
            self.close(bytes);
        }
        for (at, call) in calls.iter().enumerate() {
            self.write_call(call, at + usize::from(self.is_open), bytes);
        }
        let (status, output) = (status(self.finish), self.output(&self.text, &calls));
        let response = self.object(status, output, Some(generation.usage()));
        self.write(bytes, json!({ "type": format!("response.{status}"), "response": response }));
    }

    fn full(&self, choices: &[FullChoice], generation: &Generation) -> ApiResult<Vec<Bytes>> {
        let empty = Delta::default();
        let delta = choices.first().map_or(&empty, FullChoice::delta);
        // The copy of the text.
        generation.lease().grow(delta.text.len())?;
        let output = self.output(&delta.text, &delta.tool_calls);
        let response = self.object(status(delta.finish), output, Some(generation.usage()));
        LeasedWriter::json(generation.lease(), &response)
    }
}
