//! The fields of a JSON request, taken one by one, so that every error names its field.

use std::fmt;

use hyper::Response;
use hyper::header::{HeaderName, HeaderValue};
use serde::Deserializer;
use serde::de::{DeserializeOwned, MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::body::Body;
use crate::error::{ApiError, ApiResult};
use crate::reference::KnownFields;

/// Unknown fields that are named, at most, and the length of a name.
const MAX_NAMES: usize = 8;
const MAX_NAME: usize = 64;

/// Fields of an object, and values inside a field that is parsed into a tree. A tree takes dozens of bytes for every
/// value, so without a limit a body of brackets would take fifty times its size.
const MAX_FIELDS: usize = 256;
const MAX_VALUES: usize = 1 << 16;

/// The header that names unknown fields.
const WARNING: HeaderName = HeaderName::from_static("x-fox-warning");

/// An object whose fields are parsed when they are taken.
pub(crate) struct Fields<'a> {
    given: Vec<(String, &'a RawValue)>,
    known: KnownFields,
}

impl<'a> Fields<'a> {
    /// Splits a body into fields, of which those in `known` are taken.
    pub fn parse(bytes: &'a [u8], known: KnownFields) -> ApiResult<Fields<'a>> {
        let mut deserializer = serde_json::Deserializer::from_slice(bytes);
        let fields = deserializer.deserialize_any(FieldsVisitor);
        match fields.and_then(|fields| deserializer.end().map(|()| fields)) {
            Ok(given) if given.len() > MAX_FIELDS => {
                Err(ApiError::invalid(None, format!("the body has more than {MAX_FIELDS} fields")))
            }
            Ok(given) => Ok(Fields { given, known }),
            Err(error) if error.is_data() => {
                Err(ApiError::invalid(None, "the body must be a JSON object"))
            }
            Err(error) => Err(ApiError::invalid(None, format!("the body is not JSON: {error}"))),
        }
    }

    /// The fields of an inner object; none when it is absent.
    pub fn inner(&mut self, name: &'static str, known: KnownFields) -> ApiResult<Fields<'a>> {
        let Some(raw) = self.take_raw(name) else { return Ok(Fields { given: Vec::new(), known }) };
        let fields = Fields::parse(raw.get().as_bytes(), known);
        fields.map_err(|_| ApiError::invalid(name, format!("{name} must be a JSON object")))
    }

    /// A field that is not parsed yet; `None` when it is absent or null. The last one of several counts.
    pub fn take_raw(&mut self, name: &str) -> Option<&'a RawValue> {
        let mut known = self.known.iter().copied().flatten();
        debug_assert!(known.any(|field| field.name == name), "{name} is missing in reference.rs");
        let taken = self.given.iter().rfind(|(other, _)| other == name).map(|(_, raw)| *raw);
        self.drop(&[name]);
        taken.filter(|raw| raw.get() != "null")
    }

    /// A field's value; `None` when it is absent or null.
    pub fn take<T: DeserializeOwned>(&mut self, name: &'static str) -> ApiResult<Option<T>> {
        let Some(raw) = self.take_raw(name) else { return Ok(None) };
        if value_count(raw.get()) > MAX_VALUES {
            let message = format!("{name} has more than {MAX_VALUES} values");
            return Err(ApiError::invalid(name, message));
        }
        let value = serde_json::from_str(raw.get()).map(whole);
        match value.and_then(serde_json::from_value) {
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

    /// Drops fields that change nothing about an answer.
    pub fn drop(&mut self, names: &[&str]) {
        self.given.retain(|(name, _)| !names.contains(&name.as_str()));
    }

    /// The fields that were not taken; an error when the server is `strict`.
    pub fn finish(self, strict: bool) -> ApiResult<UnknownFields> {
        let names: Vec<String> = self.given.into_iter().map(|(name, _)| name).collect();
        match names.first() {
            Some(name) if strict => Err(ApiError::invalid(None, format!("unknown field: {name}"))
                .with_param(Some(name.clone()))),
            _ => Ok(UnknownFields(names)),
        }
    }
}

struct FieldsVisitor;

impl<'a> Visitor<'a> for FieldsVisitor {
    type Value = Vec<(String, &'a RawValue)>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut fields = Vec::new();
        // One field beyond the limit reports the excess; the others are skipped.
        while let Some((name, raw)) = map.next_entry::<String, &RawValue>()? {
            if fields.len() <= MAX_FIELDS {
                fields.push((name, raw));
            }
        }
        Ok(fields)
    }
}

/// Upper bound on the values of a JSON text: its separators and opening brackets outside of strings.
fn value_count(json: &str) -> usize {
    let (mut count, mut in_string, mut escaped) = (1, false, false);
    for byte in json.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b',' | b'[' | b'{' | b':' if !in_string => count += 1,
            _ => {}
        }
    }
    count
}

/// Names of fields that are not known.
#[derive(Clone, Debug, Default)]
pub(crate) struct UnknownFields(Vec<String>);

impl UnknownFields {
    /// The names of two objects.
    pub fn and(mut self, other: UnknownFields) -> UnknownFields {
        self.0.extend(other.0);
        self
    }

    /// Names them in a header of the answer.
    pub fn report(&self, mut response: Response<Body>) -> Response<Body> {
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

/// Whole numbers as integers, however they are written: some clients send floats only.
fn whole(value: Value) -> Value {
    match value {
        Value::Number(number) => match number.as_f64() {
            // Every whole number up to 2^53 is exact in f64.
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
    use crate::reference::Field;
    use serde_json::json;

    const KNOWN: KnownFields = &[&[
        Field { name: "a", form: "", meaning: "" },
        Field { name: "b", form: "", meaning: "" },
    ]];

    #[test]
    fn whole_floats_become_integers() {
        let value = whole(json!([5.0, -1.0, 0.5, 1e300, 7, "5.0", { "a": 2.0 }]));
        assert_eq!(value, json!([5, -1, 0.5, 1e300, 7, "5.0", { "a": 2 }]));
    }

    #[test]
    fn values_are_counted_outside_of_strings() {
        assert_eq!(value_count("7"), 1);
        assert_eq!(value_count(r#""a,[\",{""#), 1);
        assert_eq!(value_count(r#"[[],{"a":1},"\\",2]"#), 8);
    }

    #[test]
    fn fields_are_bounded_and_last_duplicate_wins() {
        let mut fields = Fields::parse(br#"{"a": 1, "b": null, "a": 2}"#, KNOWN).unwrap();
        assert_eq!(fields.take::<u8>("a").unwrap(), Some(2));
        assert_eq!(fields.take::<u8>("b").unwrap(), None);
        let names: Vec<String> = (0..=MAX_FIELDS).map(|i| format!(r#""f{i}":0"#)).collect();
        assert!(Fields::parse(format!("{{{}}}", names.join(",")).as_bytes(), KNOWN).is_err());
        let body = format!(r#"{{"a": [{}[]]}}"#, "[],".repeat(MAX_VALUES / 2));
        let error = Fields::parse(body.as_bytes(), KNOWN).unwrap().take::<Value>("a").unwrap_err();
        assert_eq!(error.message, "a has more than 65536 values");
        for bad in ["{", "{} x", "{\"a\": [}"] {
            let Err(error) = Fields::parse(bad.as_bytes(), KNOWN) else { panic!("{bad}") };
            assert!(error.message.starts_with("the body is not JSON"), "{bad}: {}", error.message);
        }
    }

    #[test]
    fn header_names_are_ascii_and_bounded() {
        let names = (0..20).map(|i| format!("é\r\nx{i}: {}", "y".repeat(100)));
        let unknown = UnknownFields(names.collect());
        let response =
            unknown.report(crate::body::response(hyper::StatusCode::OK, "text/plain", ""));
        let text = response.headers()[WARNING].to_str().unwrap();
        assert!(text.starts_with("ignored unknown fields: x0:yyy"), "{text}");
        assert!(text.len() < MAX_NAMES * (MAX_NAME + 2) + 30 && !text.contains("x8"), "{text}");
    }
}
