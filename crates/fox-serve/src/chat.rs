//! From messages to a prompt: the tokenizer's chat template, or a plain form without one.

use minijinja::{Environment, ErrorKind, Value as Jinja, context};
use serde::Serialize;
use serde_json::Value;

use crate::error::{ApiError, ApiResult};
use crate::{Error, Result};

/// How a conversation is written for the model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatTemplate {
    /// A Jinja template, as `chat_template` of `tokenizer_config.json` has it. Without one, every message is a
    /// paragraph that begins with `User:` or `Assistant:`.
    pub source: Option<String>,
    /// The start marker, for the template.
    pub bos_token: String,
    /// The marker that ends a document, for the template.
    pub eos_token: String,
}

/// A template that was read without errors.
pub(crate) struct Chat {
    environment: Option<Environment<'static>>,
    template: ChatTemplate,
}

/// A message, as templates see it.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct Message {
    pub role: String,
    pub content: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

const NAME: &str = "chat";

impl Chat {
    /// # Errors
    /// A template that is not one.
    pub fn new(template: ChatTemplate) -> Result<Chat> {
        let environment = template.source.clone().map(|source| {
            let mut environment = Environment::new();
            // Templates are written for Python's Jinja, with these settings and its methods of strings.
            environment.set_trim_blocks(true);
            environment.set_lstrip_blocks(true);
            environment
                .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
            environment.add_function("raise_exception", refuse);
            // A template that never ends must not hold a thread.
            environment.set_fuel(Some(1_000_000));
            environment.add_template_owned(NAME, source).map(|()| environment)
        });
        let environment = environment.transpose().map_err(|error| {
            Error::Option(format!("the chat template has a mistake: {error:#}"))
        })?;
        Ok(Chat { environment, template })
    }

    /// Whether the start marker is put in front: a template writes its own.
    pub fn needs_mark(&self) -> bool {
        self.environment.is_none()
    }

    /// Strings that end an answer besides those that are asked for.
    pub fn stops(&self) -> &[&str] {
        if self.environment.is_none() { &["\nUser:"] } else { &[] }
    }

    /// The text that the model continues with its answer.
    pub fn prompt(&self, messages: &[Message], add_generation_prompt: bool) -> ApiResult<String> {
        let Some(environment) = &self.environment else {
            return Ok(plain(messages, add_generation_prompt));
        };
        let values = context! {
            messages => Jinja::from_serialize(messages),
            add_generation_prompt => add_generation_prompt,
            bos_token => self.template.bos_token,
            eos_token => self.template.eos_token,
        };
        let failed = |error: minijinja::Error| {
            let words = error.detail().map_or_else(|| error.to_string(), str::to_string);
            ApiError::invalid(
                "messages",
                format!("the chat template refuses these messages: {words}"),
            )
        };
        environment.get_template(NAME).and_then(|template| template.render(values)).map_err(failed)
    }
}

/// `raise_exception(words)` of templates.
fn refuse(words: String) -> std::result::Result<String, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, words))
}

fn plain(messages: &[Message], add_generation_prompt: bool) -> String {
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

/// The field `messages`: roles and texts.
pub(crate) fn messages(value: Option<Value>) -> ApiResult<Vec<Message>> {
    let bad = |words: String| ApiError::invalid("messages", words);
    let list = match value {
        None => return Err(bad("messages is missing".into())),
        Some(Value::Array(list)) if !list.is_empty() => list,
        Some(_) => return Err(bad("messages must be a list of messages, and not empty".into())),
    };
    let message = |(at, value): (usize, &Value)| {
        let role =
            value["role"].as_str().ok_or_else(|| bad(format!("message {at} has no role")))?;
        if !["system", "developer", "user", "assistant"].contains(&role) {
            let roles = "system, developer, user or assistant";
            return Err(bad(format!("message {at} has the role {role}; it must be {roles}")));
        }
        let content = content(&value["content"]).ok_or_else(|| {
            bad(format!("message {at} must have a text, or parts of type text, as content"))
        })?;
        let name = value["name"].as_str().map(str::to_string);
        Ok(Message { role: role.to_string(), content, name })
    };
    list.iter().enumerate().map(message).collect()
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

    fn talk() -> Vec<Message> {
        let list = json!([
            { "role": "system", "content": "Be brief." },
            { "role": "user", "content": [{ "type": "text", "text": " Hi" }, { "type": "text", "text": "! " }] },
        ]);
        messages(Some(list)).unwrap()
    }

    fn with(source: &str) -> Chat {
        let template = ChatTemplate {
            source: Some(source.into()),
            bos_token: "<s>".into(),
            eos_token: "</s>".into(),
        };
        Chat::new(template).unwrap()
    }

    #[test]
    fn without_a_template_messages_are_paragraphs() {
        let chat = Chat::new(ChatTemplate::default()).unwrap();
        let text = chat.prompt(&talk(), true).unwrap();
        assert_eq!(text, "Be brief.\nUser:  Hi! \nAssistant:");
        assert!(chat.needs_mark());
    }

    /// The form that most published templates have, with the methods of Python that they use.
    #[test]
    fn templates_are_those_of_python() {
        let chat = with(
            "{{ bos_token }}{% if messages[0]['role'] == 'system' %}\n{% set rest = messages[1:] %}\n\
             [{{ messages[0].content.strip() }}]\n{% endif %}\n{% for m in rest %}\n\
             <|{{ m['role'] | upper }}|>{{ m['content'].strip() }}{{ eos_token }}\n{% endfor %}\n\
             {% if add_generation_prompt %}<|ASSISTANT|>{% endif %}",
        );
        let text = chat.prompt(&talk(), true).unwrap();
        assert_eq!(text, "<s>[Be brief.]\n<|USER|>Hi!</s>\n<|ASSISTANT|>");
        assert!(!chat.needs_mark());
    }

    #[test]
    fn a_template_may_refuse_and_may_not_run_forever() {
        let chat = with("{{ raise_exception('roles must alternate') }}");
        let error = chat.prompt(&talk(), true).unwrap_err();
        assert!(error.message.contains("roles must alternate"), "{}", error.message);
        let endless =
            with("{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}");
        assert!(endless.prompt(&talk(), true).is_err());
        let broken = ChatTemplate { source: Some("{% if".into()), ..ChatTemplate::default() };
        let Err(error) = Chat::new(broken) else { panic!("it has no end") };
        assert!(error.to_string().contains("chat template"), "{error}");
    }

    #[test]
    fn messages_that_are_none_are_told_by_number() {
        for (value, words) in [
            (json!([]), "not empty"),
            (json!("hi"), "list of messages"),
            (json!([{ "content": "x" }]), "message 0 has no role"),
            (
                json!([{ "role": "user", "content": "x" }, { "role": "tool", "content": "x" }]),
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
