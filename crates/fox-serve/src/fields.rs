//! The fields of a JSON request, taken one by one, so that every complaint names its field.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::{ApiError, ApiResult};

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
            Some(value) => value,
        };
        match serde_json::from_value(value) {
            Ok(value) => Ok(Some(value)),
            Err(error) => Err(ApiError::invalid(name, format!("{name}: {error}"))),
        }
    }

    /// A field that clients may send as long as it asks for nothing: one of `neutral`, or null.
    pub fn ignore(&mut self, name: &'static str, neutral: &[Value], why: &str) -> ApiResult<()> {
        match self.take::<Value>(name)? {
            Some(value) if !neutral.iter().any(|n| same(n, &value)) => {
                Err(ApiError::invalid(name, format!("{name} is not supported: {why}"))
                    .with_code("unsupported_parameter"))
            }
            _ => Ok(()),
        }
    }

    /// Complains about fields that nobody took.
    pub fn finish(self) -> ApiResult<()> {
        match self.0.into_iter().next() {
            None => Ok(()),
            Some((name, _)) => {
                Err(ApiError::invalid(None, format!("unknown field: {name}"))
                    .with_param(Some(name)))
            }
        }
    }
}

/// Equality that does not tell 0 from 0.0.
fn same(a: &Value, b: &Value) -> bool {
    a == b || a.as_f64().is_some_and(|a| b.as_f64() == Some(a))
}
