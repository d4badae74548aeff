//! The forms of a prompt: a text, a list of texts, a list of token ids or a list of lists of token ids.

use std::fmt;

use fox_data::Tokenizer;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use crate::app::App;
use crate::error::{ApiError, ApiResult};

/// Bytes of a chunk of a long text whose tokens are counted before the text is tokenized.
const COUNT_CHUNK: usize = 16 << 10;

/// Token ids to continue.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Prompt {
    pub ids: Vec<i32>,
    /// Number of markers in front that the server has added: they are not part of the text.
    pub marks: usize,
}

impl Prompt {
    /// A text, with the start marker in front when `mark` is set.
    pub fn text(app: &App, text: &str, mark: bool) -> ApiResult<Prompt> {
        check_length(app, text)?;
        Ok(Self::marked(app, app.tokenizer.encode(text)?, mark))
    }

    /// A rendered chat template, in which the text of the marker stands for it.
    pub fn rendered(app: &App, text: &str, mark: bool) -> ApiResult<Prompt> {
        check_length(app, text)?;
        Ok(Self::marked(app, app.tokenizer.encode_marked(text)?, mark))
    }

    fn marked(app: &App, ids: Vec<u32>, mark: bool) -> Prompt {
        let marker = mark.then(|| app.tokenizer.bos());
        let ids = marker.into_iter().chain(ids).map(|id| id as i32).collect();
        Prompt { ids, marks: usize::from(mark) }
    }

    /// All prompts of a request, at most `max_choices`. Takes memory in proportion to the text, whatever it contains.
    pub fn parse(app: &App, raw: &RawValue, mark: bool) -> ApiResult<Vec<Prompt>> {
        let most = app.options.max_choices;
        let mut deserializer = serde_json::Deserializer::from_str(raw.get());
        let element = ElementSeed { most, depth: 2 }.deserialize(&mut deserializer);
        let from_ids = |ids| Prompt { ids, marks: 0 };
        match element.map_err(|_| bad_form())? {
            Element::Text(text) => Ok(vec![Self::text(app, &text, mark)?]),
            Element::Ids(ids) if !ids.is_empty() => Ok(vec![from_ids(ids)]),
            Element::Texts(texts) => texts.iter().map(|text| Self::text(app, text, mark)).collect(),
            Element::IdLists(lists) => Ok(lists.into_iter().map(from_ids).collect()),
            Element::BadId { item, position } => {
                let message = format!("prompt: {item} at position {position} is not a token id");
                Err(ApiError::invalid("prompt", message))
            }
            Element::TooMany => {
                Err(ApiError::invalid("prompt", format!("prompt has more than {most} elements")))
            }
            Element::Id(_) | Element::Ids(_) | Element::Scalar(_) | Element::Nested => {
                Err(bad_form())
            }
        }
    }
}

/// Refuses a text of more than twice the context before it is tokenized.
fn check_length(app: &App, text: &str) -> ApiResult<()> {
    let context = app.engine.options().max_context;
    if !has_more_tokens(&app.tokenizer, text, context.saturating_mul(2))? {
        return Ok(());
    }
    let message = format!("a text of {} bytes exceeds the context of {context} tokens", text.len());
    Err(ApiError::invalid("prompt", message).with_code("context_length_exceeded"))
}

/// Whether a text has more than about `most` tokens, at the cost of tokenizing so many.
///
/// A tokenizer of the Hugging Face library takes hundreds of bytes and a microsecond per token, so a text that is far too
/// long must not be tokenized. Chunks are counted separately; their boundaries change the sum by a few tokens each.
fn has_more_tokens(tokenizer: &Tokenizer, text: &str, most: usize) -> ApiResult<bool> {
    if text.len() <= most {
        return Ok(false);
    }
    let (mut rest, mut tokens) = (text, 0);
    while !rest.is_empty() && tokens <= most {
        let ends = (0..=COUNT_CHUNK.min(rest.len())).rev();
        let end = ends.into_iter().find(|&at| rest.is_char_boundary(at)).unwrap_or(rest.len());
        // Before a space, where most tokenizers split anyway.
        let cut = match rest[..end].rfind(' ') {
            Some(at) if at > 0 && end < rest.len() => at,
            _ => end,
        };
        tokens += tokenizer.encode(&rest[..cut])?.len();
        rest = &rest[cut..];
    }
    Ok(tokens > most)
}

/// Token ids as a JSON list, for fields other than `prompt`.
pub(crate) fn id_list(raw: &RawValue, name: &'static str) -> ApiResult<Vec<i32>> {
    let mut deserializer = serde_json::Deserializer::from_str(raw.get());
    match (ElementSeed { most: 0, depth: 1 }).deserialize(&mut deserializer) {
        Ok(Element::Ids(ids)) => Ok(ids),
        Ok(Element::BadId { item, position }) => {
            let message = format!("{name}: {item} at position {position} is not a token id");
            Err(ApiError::invalid(name, message))
        }
        _ => Err(ApiError::invalid(name, format!("{name} must be a list of token ids"))),
    }
}

fn bad_form() -> ApiError {
    let forms = "a text, a list of texts, a list of token ids or a list of lists of token ids";
    ApiError::invalid("prompt", format!("prompt must be {forms}, and not empty"))
}

/// A JSON value as far as prompts distinguish them.
enum Element {
    Id(i32),
    Text(String),
    Ids(Vec<i32>),
    Texts(Vec<String>),
    IdLists(Vec<Vec<i32>>),
    BadId {
        item: String,
        position: usize,
    },
    TooMany,
    /// Another number, true, false or null, as JSON writes it.
    Scalar(String),
    /// An object, or a list that is nested too deep.
    Nested,
}

impl Element {
    fn describe(&self) -> String {
        match self {
            Element::Text(text) => serde_json::Value::from(text.as_str()).to_string(),
            Element::Scalar(text) => text.clone(),
            _ => "a list or an object".into(),
        }
    }
}

/// Parses an [`Element`] with lists nested at most `depth` deep and at most `most` texts or lists. A value of another
/// form is an element too, not an error: errors of the parser name positions in the body instead of in the list.
#[derive(Clone, Copy)]
struct ElementSeed {
    most: usize,
    depth: usize,
}

impl<'de> DeserializeSeed<'de> for ElementSeed {
    type Value = Element;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Element, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ElementSeed {
    type Value = Element;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a text, a token id or a list of them")
    }

    fn visit_i64<E>(self, id: i64) -> Result<Element, E> {
        Ok(i32::try_from(id).map_or_else(|_| Element::Scalar(id.to_string()), Element::Id))
    }

    fn visit_u64<E>(self, id: u64) -> Result<Element, E> {
        Ok(i32::try_from(id).map_or_else(|_| Element::Scalar(id.to_string()), Element::Id))
    }

    fn visit_f64<E>(self, id: f64) -> Result<Element, E> {
        let is_id = id.fract() == 0.0 && (f64::from(i32::MIN)..=f64::from(i32::MAX)).contains(&id);
        Ok(if is_id { Element::Id(id as i32) } else { Element::Scalar(id.to_string()) })
    }

    fn visit_str<E>(self, text: &str) -> Result<Element, E> {
        Ok(Element::Text(text.to_string()))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Element, E> {
        Ok(Element::Scalar(value.to_string()))
    }

    fn visit_unit<E>(self) -> Result<Element, E> {
        Ok(Element::Scalar("null".into()))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Element, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Element::Nested)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Element, A::Error> {
        if self.depth == 0 {
            while list.next_element::<IgnoredAny>()?.is_some() {}
            return Ok(Element::Nested);
        }
        let inner = ElementSeed { depth: self.depth - 1, ..self };
        let mut result = Element::Ids(Vec::new());
        let mut position = 0;
        while let Some(element) = list.next_element_seed(inner)? {
            match (&mut result, element) {
                (Element::Ids(ids), Element::Id(id)) => ids.push(id),
                (Element::Ids(ids), Element::Text(text)) if ids.is_empty() && self.depth == 2 => {
                    result = Element::Texts(vec![text]);
                }
                (Element::Ids(ids), Element::Ids(list)) if ids.is_empty() => {
                    result = Element::IdLists(vec![list]);
                }
                (Element::Texts(texts), Element::Text(text)) if texts.len() < self.most => {
                    texts.push(text);
                }
                (Element::IdLists(lists), Element::Ids(list)) if lists.len() < self.most => {
                    lists.push(list);
                }
                (Element::Texts(_), Element::Text(_)) | (Element::IdLists(_), Element::Ids(_)) => {
                    result = Element::TooMany;
                }
                (Element::BadId { .. } | Element::TooMany | Element::Nested, _) => {}
                (_, bad @ Element::BadId { .. }) => result = bad,
                (Element::Ids(_), other) => {
                    result = Element::BadId { item: other.describe(), position };
                }
                _ => result = Element::Nested,
            }
            position += 1;
        }
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_tokens_up_to_a_limit() {
        for (name, word, bytes_per_token) in [("bytes", "é", 1), ("gpt2", " fox", 4)] {
            let tokenizer = Tokenizer::from_name(name).unwrap();
            let text = word.repeat(100_000);
            let tokens = text.len() / bytes_per_token;
            for (most, expected) in [(1000, true), (tokens - 100, true), (tokens + 100, false)] {
                assert_eq!(has_more_tokens(&tokenizer, &text, most).unwrap(), expected, "{name}");
            }
        }
    }
}
