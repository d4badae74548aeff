//! Tool calls: the fields `tools` and `tool_choice`, and the calls in a generated text.
//!
//! Two syntaxes are known: `<tool_call>{"name": NAME, "arguments": {...}}</tool_call>` (Hermes, Qwen) and a text that is
//! JSON, `{"name": NAME, "parameters": {...}}` (Llama 3), one or several. A choice that must call a tool is constrained
//! to JSON instead, whatever the chat template.

use fox_infer::GrammarSpec;
use serde::Serialize;
use serde_json::{Value, json};

use super::constraint::Constraint;
use crate::app::random;
use crate::error::{ApiError, ApiResult};
use crate::fields::Fields;

const MAX_TOOLS: usize = 128;
const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const PYTHON_TAG: &str = "<|python_tag|>";

/// The tools of a request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tools {
    /// As the client sent them, for the chat template.
    pub list: Vec<Value>,
    mode: ToolMode,
    /// Whether a choice that must call a tool may call several.
    is_parallel: bool,
}

#[derive(Clone, Debug, PartialEq)]
enum ToolMode {
    /// The model decides.
    Auto,
    /// At least one call.
    Required,
    /// A call of this tool.
    Named(String),
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ToolCall {
    pub id: String,
    pub name: String,
    /// JSON, as a text.
    pub arguments: String,
}

impl ToolCall {
    fn new(name: &str, arguments: String) -> ToolCall {
        ToolCall { id: format!("call_{:016x}", random()), name: name.to_string(), arguments }
    }

    /// OpenAI's form; `index` is given in chunks.
    pub fn json(&self, index: Option<usize>) -> Value {
        let function = json!({ "name": self.name, "arguments": self.arguments });
        let mut call = json!({ "id": self.id, "type": "function", "function": function });
        if let Some(index) = index {
            call["index"] = json!(index);
        }
        call
    }
}

impl Serialize for ToolCall {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.json(None).serialize(serializer)
    }
}

impl Tools {
    /// `None` when there are no tools or none may be called.
    pub fn parse(fields: &mut Fields) -> ApiResult<Option<Tools>> {
        let list: Vec<Value> = fields.take("tools")?.unwrap_or_default();
        let choice: Value = fields.take("tool_choice")?.unwrap_or_else(|| json!("auto"));
        let is_parallel = fields.take("parallel_tool_calls")?.unwrap_or(true);
        let bad = |message: String| Err(ApiError::invalid("tools", message));
        if list.len() > MAX_TOOLS {
            return bad(format!("tools has more than {MAX_TOOLS} elements"));
        }
        for (at, tool) in list.iter().enumerate() {
            if tool["type"] != "function" || !tool["function"]["name"].is_string() {
                return bad(format!("tool {at} must have the type function and a function.name"));
            }
        }
        let named = choice["function"]["name"].as_str();
        let mode = match (choice.as_str(), named) {
            (Some("none"), _) => return Ok(None),
            (Some("auto"), _) if list.is_empty() => return Ok(None),
            (Some("auto"), _) => ToolMode::Auto,
            (Some("required"), _) if !list.is_empty() => ToolMode::Required,
            (None, Some(name)) if list.iter().any(|tool| tool["function"]["name"] == name) => {
                ToolMode::Named(name.to_string())
            }
            _ => {
                let message =
                    "tool_choice must be none, auto, required or the name of one of the tools";
                return Err(ApiError::invalid("tool_choice", message));
            }
        };
        Ok(Some(Tools { list, mode, is_parallel }))
    }

    /// The schema of an answer that must be a call.
    pub fn constraint(&self) -> Option<Constraint> {
        let parameters = |tool: &Value| match &tool["function"]["parameters"] {
            Value::Object(schema) => Value::Object(schema.clone()),
            _ => json!({ "type": "object" }),
        };
        let schema = match &self.mode {
            ToolMode::Auto => return None,
            ToolMode::Named(name) => {
                let tool = self.list.iter().find(|tool| tool["function"]["name"] == *name);
                tool.map_or_else(|| json!({ "type": "object" }), parameters)
            }
            ToolMode::Required => {
                let call = |tool: &Value| {
                    let name = json!({ "const": tool["function"]["name"] });
                    json!({ "type": "object", "required": ["name", "parameters"],
                        "properties": { "name": name, "parameters": parameters(tool) },
                        "additionalProperties": false })
                };
                let calls: Vec<Value> = self.list.iter().map(call).collect();
                let most = if self.is_parallel { MAX_TOOLS } else { 1 };
                json!({ "type": "array", "minItems": 1, "maxItems": most,
                    "items": { "anyOf": calls } })
            }
        };
        Some(Constraint { field: "tools", spec: GrammarSpec::JsonSchema(schema) })
    }

    /// A filter for the text of one choice.
    pub fn filter(&self) -> ToolFilter {
        let name = |tool: &Value| tool["function"]["name"].as_str().unwrap_or_default().to_string();
        ToolFilter {
            names: self.list.iter().map(name).collect(),
            mode: self.mode.clone(),
            withheld: String::new(),
            has_shown: false,
            is_call: self.mode != ToolMode::Auto,
        }
    }
}

/// Separates the text of a choice from its tool calls, as it is generated.
#[derive(Debug)]
pub(crate) struct ToolFilter {
    names: Vec<String>,
    mode: ToolMode,
    withheld: String,
    has_shown: bool,
    /// Whether the withheld text begins with a call.
    is_call: bool,
}

impl ToolFilter {
    /// Takes text; returns what is certainly no part of a call.
    pub fn push(&mut self, text: &str) -> String {
        self.withheld.push_str(text);
        if self.is_call {
            return String::new();
        }
        if !self.has_shown {
            let begun = self.withheld.trim_start();
            self.is_call = begun.starts_with(['{', '[']) || begun.starts_with(PYTHON_TAG);
            if self.is_call || PYTHON_TAG.starts_with(begun) {
                return String::new();
            }
        }
        let end = match self.withheld.find(OPEN) {
            Some(at) => {
                self.is_call = true;
                at
            }
            None => {
                let begins = |n: &usize| self.withheld.ends_with(&OPEN[..*n]);
                self.withheld.len() - (1..OPEN.len()).rev().find(begins).unwrap_or(0)
            }
        };
        self.has_shown |= end > 0;
        self.withheld.drain(..end).collect()
    }

    /// The rest of the text, and the calls. An invalid call stays text.
    pub fn finish(&mut self) -> (String, Vec<ToolCall>) {
        let text = std::mem::take(&mut self.withheld);
        let calls = match &self.mode {
            ToolMode::Named(name) => {
                let is_json = serde_json::from_str::<Value>(&text).is_ok();
                is_json.then(|| (String::new(), vec![ToolCall::new(name, text.clone())]))
            }
            _ if text.trim_start().starts_with(OPEN) => self.tagged(&text),
            _ if self.is_call => self.json_calls(&text).map(|calls| (String::new(), calls)),
            _ => None,
        };
        calls.unwrap_or((text, Vec::new()))
    }

    /// `<tool_call>...</tool_call>`, several times; text after the last one stays.
    fn tagged(&self, text: &str) -> Option<(String, Vec<ToolCall>)> {
        let (mut calls, mut rest) = (Vec::new(), text.trim_start());
        while let Some(inner) = rest.strip_prefix(OPEN) {
            let (json, after) = inner.split_once(CLOSE).unwrap_or((inner, ""));
            calls.extend(self.json_calls(json)?);
            rest = after.trim_start();
        }
        Some((rest.to_string(), calls))
    }

    /// Objects, or lists of objects, with spaces or semicolons between them.
    fn json_calls(&self, text: &str) -> Option<Vec<ToolCall>> {
        let mut rest = text.trim_start();
        rest = rest.strip_prefix(PYTHON_TAG).unwrap_or(rest);
        let mut calls = Vec::new();
        loop {
            rest = rest.trim_start_matches(|c: char| c.is_whitespace() || c == ';');
            if rest.is_empty() {
                return (!calls.is_empty()).then_some(calls);
            }
            let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
            match values.next()?.ok()? {
                Value::Array(list) => {
                    for value in &list {
                        calls.push(self.call(value)?);
                    }
                }
                value => calls.push(self.call(&value)?),
            }
            rest = &rest[values.byte_offset()..];
        }
    }

    fn call(&self, value: &Value) -> Option<ToolCall> {
        let name = value["name"].as_str().filter(|name| self.names.iter().any(|n| n == name))?;
        let arguments = value.get("arguments").or(value.get("parameters"))?;
        Some(ToolCall::new(
            name,
            match arguments {
                Value::String(text) => text.clone(),
                Value::Null => "{}".to_string(),
                other => other.to_string(),
            },
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::CHAT;

    fn tools(choice: &Value) -> ApiResult<Option<Tools>> {
        let tool = |name: &str| json!({ "type": "function", "function": { "name": name } });
        let body = json!({ "tools": [tool("find"), tool("add")], "tool_choice": choice });
        Tools::parse(&mut Fields::parse(body.to_string().as_bytes(), &[CHAT]).unwrap())
    }

    /// Text and calls, whether the text arrives at once or character by character.
    fn filtered(choice: &Value, text: &str) -> (String, Vec<(String, String)>) {
        let tools = tools(choice).unwrap().unwrap();
        let read = |parts: Vec<String>| {
            let mut filter = tools.filter();
            let mut shown: String = parts.iter().map(|part| filter.push(part)).collect();
            let (rest, calls) = filter.finish();
            shown.push_str(&rest);
            let calls = calls.into_iter().map(|call| (call.name, call.arguments));
            (shown, calls.collect::<Vec<_>>())
        };
        let whole = read(vec![text.to_string()]);
        assert_eq!(read(text.chars().map(String::from).collect()), whole);
        whole
    }

    #[test]
    fn known_syntaxes_become_calls() {
        let find = || ("find".to_string(), r#"{"x":1}"#.to_string());
        let add = || ("add".to_string(), "{}".to_string());
        for (text, shown, calls) in [
            ("Hello < there {", "Hello < there {", vec![]),
            (
                "Sure.\n<tool_call>\n{\"name\": \"find\", \"arguments\": {\"x\": 1}}\n</tool_call>",
                "Sure.\n",
                vec![find()],
            ),
            (
                "<tool_call>{\"name\":\"find\",\"arguments\":{\"x\":1}}</tool_call>\n\
                 <tool_call>{\"name\":\"add\",\"arguments\":null}</tool_call> done",
                "done",
                vec![find(), add()],
            ),
            (r#"{"name": "find", "parameters": {"x": 1}}"#, "", vec![find()]),
            (
                r#"<|python_tag|>{"name": "find", "parameters": {"x": 1}}; {"name": "add", "parameters": {}}"#,
                "",
                vec![find(), add()],
            ),
            // Neither an unknown tool, nor other JSON, nor a broken call is a call.
            (
                r#"{"name": "sing", "parameters": {}}"#,
                r#"{"name": "sing", "parameters": {}}"#,
                vec![],
            ),
            (r#"{"x": [1, 2]}"#, r#"{"x": [1, 2]}"#, vec![]),
            ("a <tool_call>{\"name\":", "a <tool_call>{\"name\":", vec![]),
        ] {
            assert_eq!(filtered(&json!("auto"), text), (shown.to_string(), calls), "{text}");
        }
        let required = r#"[{"name": "find", "parameters": {"x": 1}}]"#;
        assert_eq!(filtered(&json!("required"), required), (String::new(), vec![find()]));
        let named = json!({ "type": "function", "function": { "name": "find" } });
        assert_eq!(filtered(&named, r#"{"x":1}"#), (String::new(), vec![find()]));
    }

    #[test]
    fn tool_choice_is_checked() {
        assert_eq!(tools(&json!("none")).unwrap(), None);
        for choice in [json!("sing"), json!({ "function": { "name": "sing" } }), json!(5)] {
            let error = tools(&choice).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("tool_choice"));
        }
        assert_eq!(tools(&json!("auto")).unwrap().unwrap().constraint(), None);
        assert!(tools(&json!("required")).unwrap().unwrap().constraint().is_some());
    }
}
