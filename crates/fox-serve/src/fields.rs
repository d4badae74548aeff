//! The fields of a JSON request, taken one by one, so that every complaint names its field.

use hyper::Response;
use hyper::header::{HeaderName, HeaderValue};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::body::Body;
use crate::error::{ApiError, ApiResult};

/// UnknownFields fields that are named, at most, and the length of a name.
const MAX_NAMES: usize = 8;
const MAX_NAME: usize = 64;

/// The header that names them.
const WARNING: HeaderName = HeaderName::from_static("x-fox-warning");

/// An object whose fields have not all been looked at.
pub(crate) struct Fields(Map<String, Value>);

impl Fields {
    /// Parses a body.
    pub fn parse(bytes: &[u8]) -> ApiResult<Fields> {
        match serde_json::from_slice(bytes) {
            Ok(Value::Object(map)) => Ok(Fields(map)),
            Ok(_) => Err(ApiError::invalid(None, "the body must be a JSON object")),
            Err(error) => Err(ApiError::invalid(None, format!("the body is not JSON: {error}"))),
        }
    }

    /// The fields of an inner object; none when it is absent.
    pub fn inner(&mut self, name: &'static str) -> ApiResult<Fields> {
        Ok(Fields(self.take(name)?.unwrap_or_default()))
    }

    /// A field's value; `None` when it is absent or null.
    pub fn take<T: DeserializeOwned>(&mut self, name: &'static str) -> ApiResult<Option<T>> {
        let value = match self.0.remove(name) {
            None | Some(Value::Null) => return Ok(None),
            Some(value) => whole(value),
        };
        match serde_json::from_value(value) {
            Ok(value) => Ok(Some(value)),
            Err(error) => Err(ApiError::invalid(name, format!("{name}: {error}"))),
        }
    }

    /// A field that clients may send as long as it asks for nothing: one of `neutral`, or null.
    pub fn ignore(&mut self, name: &'static str, neutral: &[Value], why: &str) -> ApiResult<()> {
        match self.take::<Value>(name)? {
            Some(value) if !neutral.contains(&value) => {
                Err(ApiError::invalid(name, format!("{name} is not supported: {why}"))
                    .with_code("unsupported_parameter"))
            }
            _ => Ok(()),
        }
    }

    /// Fields that change nothing about an answer.
    pub fn drop(&mut self, names: &[&str]) {
        self.0.retain(|name, _| !names.contains(&name.as_str()));
    }

    /// The fields that nobody took; an error when the server is `strict`.
    pub fn finish(self, strict: bool) -> ApiResult<UnknownFields> {
        let names: Vec<String> = self.0.into_iter().map(|(name, _)| name).collect();
        match names.first() {
            Some(name) if strict => Err(ApiError::invalid(None, format!("unknown field: {name}"))
                .with_param(Some(name.clone()))),
            _ => Ok(UnknownFields(names)),
        }
    }
}

/// Fields that were not understood.
#[derive(Clone, Debug, Default)]
pub(crate) struct UnknownFields(Vec<String>);

impl UnknownFields {
    /// Those of two objects.
    pub fn and(mut self, other: UnknownFields) -> UnknownFields {
        self.0.extend(other.0);
        self
    }

    /// Names them in a header of the answer.
    pub fn tell(&self, mut response: Response<Body>) -> Response<Body> {
        if self.0.is_empty() {
            return response;
        }
        let plain = |name: &String| -> String {
            name.chars().filter(char::is_ascii_graphic).take(MAX_NAME).collect()
        };
        let names: Vec<String> = self.0.iter().take(MAX_NAMES).map(plain).collect();
        let text = format!("ignored unknown fields: {}", names.join(", "));
        if let Ok(value) = HeaderValue::from_str(&text) {
            response.headers_mut().insert(WARNING, value);
        }
        response
    }
}

/// Whole numbers as integers, however they were written: some clients know floats only.
fn whole(value: Value) -> Value {
    match value {
        Value::Number(number) => match number.as_f64() {
            // Every whole number up to 2^53 has a float of its own.
            Some(x) if number.is_f64() && x.fract() == 0.0 && x.abs() < 9e15 => (x as i64).into(),
            _ => Value::Number(number),
        },
        Value::Array(items) => items.into_iter().map(whole).collect(),
        Value::Object(map) => map.into_iter().map(|(name, value)| (name, whole(value))).collect(),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn whole_floats_are_integers_and_others_stay() {
        let value = whole(json!([5.0, -1.0, 0.5, 1e300, 7, "5.0", { "a": 2.0 }]));
        assert_eq!(value, json!([5, -1, 0.5, 1e300, 7, "5.0", { "a": 2 }]));
    }

    #[test]
    fn names_in_a_header_are_plain_and_few() {
        let unknown =
            UnknownFields((0..20).map(|i| format!("é\r\nx{i}: {}", "y".repeat(100))).collect());
        let response = unknown.tell(crate::body::response(hyper::StatusCode::OK, "text/plain", ""));
        let text = response.headers()[WARNING].to_str().unwrap();
        assert!(text.starts_with("ignored unknown fields: x0:yyy"), "{text}");
        assert!(text.len() < MAX_NAMES * (MAX_NAME + 2) + 30 && !text.contains("x8"), "{text}");
    }
}
