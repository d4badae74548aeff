//! Tables of a recipe as typed sections, with errors that carry the key.
//!
//! The deserializers of `toml` report an unknown field as text. This one has a typed error, so the message can name
//! the full key and the nearest known one.

use std::fmt;

use super::nearest;
use serde::de::value::{MapAccessDeserializer, StringDeserializer};
use serde::de::{
    self, DeserializeOwned, DeserializeSeed, Deserializer, IntoDeserializer, MapAccess, SeqAccess,
    Visitor,
};
use toml::Value;

use crate::{Error, Result};

/// Deserializes the section `name` of a recipe from `origin`.
pub(crate) fn typed<T: DeserializeOwned>(origin: &str, name: &str, value: Value) -> Result<T> {
    T::deserialize(Node(value)).map_err(|KeyError { mut path, problem }| {
        path.push(name.to_string());
        path.reverse();
        let section = path.join(".");
        match problem {
            Problem::UnknownField { field, known } => Error::UnknownKey {
                origin: origin.to_string(),
                nearest: nearest(&field, known.iter().copied())
                    .map(|near| format!("{section}.{near}")),
                key: format!("{section}.{field}"),
            },
            Problem::Other(detail) => {
                Error::value(origin, &section, format!("does not fit: {detail}"))
            }
        }
    })
}

/// What is wrong with a value, and where.
#[derive(Debug)]
struct KeyError {
    /// Keys from the innermost table outwards.
    path: Vec<String>,
    problem: Problem,
}

#[derive(Debug)]
enum Problem {
    UnknownField { field: String, known: &'static [&'static str] },
    Other(String),
}

impl KeyError {
    fn within(mut self, key: String) -> Self {
        self.path.push(key);
        self
    }
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.problem {
            Problem::UnknownField { field, .. } => write!(f, "unknown field `{field}`"),
            Problem::Other(detail) => f.write_str(detail),
        }
    }
}

impl std::error::Error for KeyError {}

impl de::Error for KeyError {
    fn custom<T: fmt::Display>(detail: T) -> Self {
        let words: Vec<String> = detail.to_string().split_whitespace().map(String::from).collect();
        KeyError { path: Vec::new(), problem: Problem::Other(words.join(" ")) }
    }

    fn unknown_field(field: &str, known: &'static [&'static str]) -> Self {
        KeyError {
            path: Vec::new(),
            problem: Problem::UnknownField { field: field.to_string(), known },
        }
    }
}

struct Node(Value);

impl<'de> Deserializer<'de> for Node {
    type Error = KeyError;

    fn deserialize_any<V: Visitor<'de>>(
        self,
        visitor: V,
    ) -> std::result::Result<V::Value, KeyError> {
        match self.0 {
            Value::String(text) => visitor.visit_string(text),
            Value::Integer(number) => visitor.visit_i64(number),
            Value::Float(number) => visitor.visit_f64(number),
            Value::Boolean(yes) => visitor.visit_bool(yes),
            Value::Datetime(time) => visitor.visit_string(time.to_string()),
            Value::Array(list) => visitor.visit_seq(Elements(list.into_iter())),
            Value::Table(table) => {
                visitor.visit_map(Entries { rest: table.into_iter(), current: None })
            }
        }
    }

    fn deserialize_option<V: Visitor<'de>>(
        self,
        visitor: V,
    ) -> std::result::Result<V::Value, KeyError> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> std::result::Result<V::Value, KeyError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _variants: &'static [&'static str],
        visitor: V,
    ) -> std::result::Result<V::Value, KeyError> {
        match self.0 {
            Value::String(variant) => visitor.visit_enum(StringDeserializer::new(variant)),
            Value::Table(table) => {
                let entries = Entries { rest: table.into_iter(), current: None };
                visitor.visit_enum(MapAccessDeserializer::new(entries))
            }
            other => Node(other).deserialize_any(visitor),
        }
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map struct identifier ignored_any
    }
}

impl<'de> IntoDeserializer<'de, KeyError> for Node {
    type Deserializer = Node;

    fn into_deserializer(self) -> Node {
        self
    }
}

struct Elements(std::vec::IntoIter<Value>);

impl<'de> SeqAccess<'de> for Elements {
    type Error = KeyError;

    fn next_element_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> std::result::Result<Option<S::Value>, KeyError> {
        self.0.next().map(|value| seed.deserialize(Node(value))).transpose()
    }
}

struct Entries {
    rest: toml::map::IntoIter<String, Value>,
    current: Option<(String, Value)>,
}

impl<'de> MapAccess<'de> for Entries {
    type Error = KeyError;

    fn next_key_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> std::result::Result<Option<S::Value>, KeyError> {
        self.current = self.rest.next();
        let Some((key, _)) = &self.current else { return Ok(None) };
        seed.deserialize(StringDeserializer::new(key.clone())).map(Some)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> std::result::Result<S::Value, KeyError> {
        let Some((key, value)) = self.current.take() else {
            return Err(de::Error::custom("a value without a key"));
        };
        seed.deserialize(Node(value)).map_err(|e| e.within(key))
    }
}
