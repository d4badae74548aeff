//! The forms a prompt may have.

use fox_data::{Gpt2Tokenizer, Tokenizer};
use serde_json::Value;

use crate::app::App;
use crate::error::{ApiError, ApiResult};

/// Bytes of the longest token, for tokenizers that do not say.
const LONG_TOKEN: usize = 256;

/// What is to be continued.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Prompt {
    pub ids: Vec<i32>,
    /// How many of the ids in front are markers that were put there, and no part of the text.
    pub marks: usize,
}

impl Prompt {
    /// A text, with the start marker in front when `mark` is set.
    pub fn text(app: &App, text: &str, mark: bool) -> ApiResult<Prompt> {
        // Before the work: a text that cannot fit whatever its tokens are.
        let context = app.engine.options().max_context;
        if text.len() > context.saturating_mul(app.longest_token) {
            let message =
                format!("a text of {} bytes exceeds the context of {context} tokens", text.len());
            return Err(ApiError::invalid("prompt", message).with_code("context_length_exceeded"));
        }
        let tokenizer = &app.tokenizer;
        let ids = if mark { tokenizer.encode_prompt(text) } else { tokenizer.encode(text) }?;
        let ids = ids.into_iter().map(|id| id as i32).collect();
        Ok(Prompt { ids, marks: usize::from(mark) })
    }

    /// All prompts of a request: a text, a list of texts, a list of ids or a list of lists of ids.
    pub fn parse(app: &App, value: &Value, mark: bool) -> ApiResult<Vec<Prompt>> {
        let items = match value {
            Value::String(text) => return Ok(vec![Self::text(app, text, mark)?]),
            Value::Array(items) if !items.is_empty() => items,
            _ => return Err(bad_form()),
        };
        if items[0].is_number() {
            return Ok(vec![Prompt { ids: ids(items)?, marks: 0 }]);
        }
        let parse_one = |item: &Value| match item {
            Value::String(text) => Self::text(app, text, mark),
            Value::Array(list) => Ok(Prompt { ids: ids(list)?, marks: 0 }),
            _ => Err(bad_form()),
        };
        let same_kind = |item: &Value| item.is_string() == items[0].is_string();
        if !items.iter().all(same_kind) {
            return Err(bad_form());
        }
        items.iter().map(parse_one).collect()
    }
}

/// Bytes of text that a token stands for, at most.
pub(crate) fn longest_token(tokenizer: &Tokenizer) -> usize {
    match tokenizer {
        Tokenizer::Bytes(_) => 1,
        Tokenizer::Gpt2(_) | Tokenizer::JsonGpt2(_) => {
            Gpt2Tokenizer.tokens().iter().map(Vec::len).max().unwrap_or(LONG_TOKEN)
        }
        _ => LONG_TOKEN,
    }
}

fn bad_form() -> ApiError {
    let forms = "a text, a list of texts, a list of token ids or a list of lists of token ids";
    ApiError::invalid("prompt", format!("prompt must be {forms}, and not empty"))
}

fn ids(items: &[Value]) -> ApiResult<Vec<i32>> {
    let id = |(at, item): (usize, &Value)| {
        item.as_i64().and_then(|id| i32::try_from(id).ok()).ok_or_else(|| {
            ApiError::invalid("prompt", format!("prompt: {item} at position {at} is no token id"))
        })
    };
    items.iter().enumerate().map(id).collect()
}
