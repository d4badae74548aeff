//! Chat requests: the field `messages`, and the prompt that the tokenizer's chat template makes of it.

pub use fox_data::ChatTemplate;
use fox_data::{ChatError, ChatMessage};
use serde_json::Value;

use crate::error::{ApiError, ApiResult};
use crate::{Error, Result};

/// A template that compiles.
pub(crate) struct Chat {
    template: ChatTemplate,
}

impl Chat {
    /// # Errors
    /// A template with a syntax error, or above a limit.
    pub fn new(template: ChatTemplate) -> Result<Chat> {
        template.check().map_err(|error| Error::Option(error.to_string()))?;
        Ok(Chat { template })
    }

    /// Whether the start marker is put in front of the prompt: a template writes it itself.
    pub fn needs_mark(&self) -> bool {
        !self.template.writes_bos()
    }

    /// Strings that end an answer besides those of the request.
    pub fn stops(&self) -> &[&str] {
        self.template.stop_strings()
    }

    /// The text that the model continues with its answer.
    pub fn prompt(
        &self,
        messages: &[ChatMessage],
        tools: &[Value],
        add_generation_prompt: bool,
    ) -> ApiResult<String> {
        let refused = |error: ChatError| ApiError::invalid("messages", error.to_string());
        self.template.render_with_tools(messages, tools, add_generation_prompt).map_err(refused)
    }
}

/// The field `messages`: roles and texts.
pub(crate) fn messages(value: Option<Value>) -> ApiResult<Vec<ChatMessage>> {
    let bad = |words: String| ApiError::invalid("messages", words);
    let list = match value {
        None => return Err(bad("messages is missing".into())),
        Some(Value::Array(list)) if !list.is_empty() => list,
        Some(_) => return Err(bad("messages must be a list of messages, and not empty".into())),
    };
    let message = |(at, value): (usize, &Value)| {
        let role =
            value["role"].as_str().ok_or_else(|| bad(format!("message {at} has no role")))?;
        if !["system", "developer", "user", "assistant", "tool"].contains(&role) {
            let roles = "system, developer, user, assistant or tool";
            return Err(bad(format!("message {at} has the role {role}; it must be {roles}")));
        }
        let tool_calls = tool_calls(&value["tool_calls"]);
        let content = match &value["content"] {
            // A message that only calls tools.
            Value::Null if !tool_calls.is_empty() => String::new(),
            value => content(value).ok_or_else(|| {
                bad(format!("message {at} must have a text, or parts of type text, as content"))
            })?,
        };
        let text = |name: &str| value[name].as_str().map(str::to_string);
        Ok(ChatMessage {
            role: role.to_string(),
            content,
            name: text("name"),
            tool_calls,
            tool_call_id: text("tool_call_id"),
        })
    };
    list.iter().enumerate().map(message).collect()
}

/// Calls of tools, with arguments as objects, as templates expect them.
fn tool_calls(value: &Value) -> Vec<Value> {
    let mut calls = value.as_array().cloned().unwrap_or_default();
    for call in &mut calls {
        if let Some(text) = call["function"]["arguments"].as_str()
            && let Ok(arguments @ Value::Object(_)) = serde_json::from_str(text)
        {
            call["function"]["arguments"] = arguments;
        }
    }
    calls
}

/// A text, or the texts of parts.
fn content(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Array(parts) => parts
            .iter()
            .map(|part| part["text"].as_str().filter(|_| part["type"] == "text"))
            .collect::<Option<Vec<&str>>>()
            .map(|texts| texts.concat()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn content_may_be_a_list_of_texts() {
        let list = json!([
            { "role": "user", "content": [{ "type": "text", "text": " Hi" }, { "type": "text", "text": "! " }] },
        ]);
        assert_eq!(messages(Some(list)).unwrap()[0].content, " Hi! ");
    }

    #[test]
    fn rejects_invalid_messages_by_number() {
        for (value, words) in [
            (json!([]), "not empty"),
            (json!("hi"), "list of messages"),
            (json!([{ "content": "x" }]), "message 0 has no role"),
            (
                json!([{ "role": "user", "content": "x" }, { "role": "fox", "content": "x" }]),
                "message 1",
            ),
            (json!([{ "role": "user" }]), "message 0 must have a text"),
            (
                json!([{ "role": "user", "content": [{ "type": "image_url" }] }]),
                "parts of type text",
            ),
        ] {
            let error = messages(Some(value)).unwrap_err();
            assert!(error.message.contains(words), "{}", error.message);
        }
        assert!(messages(None).unwrap_err().message.contains("missing"));
    }
}
