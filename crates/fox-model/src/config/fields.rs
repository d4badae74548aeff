//! Typed access to the fields of a config.json, with errors that name the field and the file.

use serde_json::{Map, Value};

use crate::{Error, Result};

/// The fields of one config.json, or of the table `[model]` of a recipe. A field that is absent has the
/// default given; one of another type is an error that names it.
#[derive(Clone, Copy, Debug)]
pub struct Fields<'a> {
    pub(super) origin: &'a str,
    pub(super) map: &'a Map<String, Value>,
}

impl Fields<'_> {
    /// An error about a field, e.g. `must be even`.
    pub fn error(&self, field: &str, detail: impl Into<String>) -> Error {
        Error::Config {
            origin: self.origin.to_string(),
            field: field.to_string(),
            detail: detail.into(),
        }
    }

    fn present(&self, field: &str) -> Option<&Value> {
        self.map.get(field)
    }

    fn wrong_type(&self, field: &str, wanted: &str, got: &Value) -> Error {
        let mut got = got.to_string();
        if got.len() > 60 {
            got = got.chars().take(57).chain("...".chars()).collect();
        }
        self.error(field, format!("must be {wanted}, not {got}"))
    }

    /// A whole number.
    pub fn size(&self, field: &str, default: usize) -> Result<usize> {
        self.present(field).map_or(Ok(default), |value| self.as_size(field, value))
    }

    /// A whole number, or null for none.
    pub fn optional_size(&self, field: &str, default: Option<usize>) -> Result<Option<usize>> {
        match self.present(field) {
            None => Ok(default),
            Some(Value::Null) => Ok(None),
            Some(value) => self.as_size(field, value).map(Some),
        }
    }

    fn as_size(&self, field: &str, value: &Value) -> Result<usize> {
        value
            .as_u64()
            .and_then(|n| usize::try_from(n).ok())
            .ok_or_else(|| self.wrong_type(field, "a whole number", value))
    }

    /// A real number.
    pub fn real(&self, field: &str, default: f64) -> Result<f64> {
        self.present(field).map_or(Ok(default), |value| self.as_real(field, value))
    }

    /// A real number, or null for none.
    pub fn optional_real(&self, field: &str) -> Result<Option<f64>> {
        match self.present(field) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => self.as_real(field, value).map(Some),
        }
    }

    fn as_real(&self, field: &str, value: &Value) -> Result<f64> {
        match value {
            Value::Number(number) => number.as_f64(),
            // Bare literals were quoted before parsing.
            Value::String(text) => match text.as_str() {
                "Infinity" => Some(f64::INFINITY),
                "-Infinity" => Some(f64::NEG_INFINITY),
                "NaN" => Some(f64::NAN),
                _ => None,
            },
            _ => None,
        }
        .ok_or_else(|| self.wrong_type(field, "a number", value))
    }

    /// The fields of a table within; null is none.
    pub fn table(&self, field: &str) -> Result<Option<Fields<'_>>> {
        match self.present(field) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Fields { origin: self.origin, map })),
            Some(value) => Err(self.wrong_type(field, "a table", value)),
        }
    }

    /// A list of strings; null is none.
    pub fn strings(&self, field: &str) -> Result<Option<Vec<&str>>> {
        let Some(value) = self.present(field).filter(|value| !value.is_null()) else {
            return Ok(None);
        };
        let words = value.as_array().map(|list| list.iter().map(Value::as_str).collect());
        match words {
            Some(Some(words)) => Ok(Some(words)),
            _ => Err(self.wrong_type(field, "a list of words", value)),
        }
    }

    /// A whole number, a list of them, or null for none.
    pub fn sizes(&self, field: &str, default: usize) -> Result<Vec<usize>> {
        match self.present(field) {
            Some(Value::Array(list)) => {
                list.iter().map(|value| self.as_size(field, value)).collect()
            }
            _ => Ok(self.optional_size(field, Some(default))?.into_iter().collect()),
        }
    }

    /// Two real numbers.
    pub fn real_pair(&self, field: &str, default: (f64, f64)) -> Result<(f64, f64)> {
        let Some(value) = self.present(field) else { return Ok(default) };
        match value.as_array().map(Vec::as_slice) {
            Some([first, second]) => {
                Ok((self.as_real(field, first)?, self.as_real(field, second)?))
            }
            _ => Err(self.wrong_type(field, "two numbers", value)),
        }
    }

    /// `true` or `false`.
    pub fn flag(&self, field: &str, default: bool) -> Result<bool> {
        match self.present(field) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(value) => Err(self.wrong_type(field, "true or false", value)),
        }
    }

    /// One of the given strings, mapped to its value.
    pub fn choice<T: Copy>(&self, field: &str, default: T, allowed: &[(&str, T)]) -> Result<T> {
        let Some(value) = self.present(field) else { return Ok(default) };
        let found = value.as_str().and_then(|text| allowed.iter().find(|(word, _)| *word == text));
        found.map(|(_, meaning)| *meaning).ok_or_else(|| {
            let words: Vec<String> =
                allowed.iter().map(|(word, _)| format!("\"{word}\"")).collect();
            self.wrong_type(field, &format!("one of {}", words.join(", ")), value)
        })
    }

    /// `width * factor / divisor`, which must be a whole number; `factor` is the value of `field`.
    pub fn scaled_width(
        &self,
        field: &str,
        width: usize,
        factor: f64,
        divisor: usize,
    ) -> Result<usize> {
        let exact = width as f64 * factor / divisor.max(1) as f64;
        if !(1.0..=1e9).contains(&exact) || exact.fract() != 0.0 {
            let detail = format!("is {factor}, which gives heads of width {exact}");
            return Err(self.error(field, detail));
        }
        Ok(exact as usize)
    }

    /// Refuses any value but null (or absence).
    pub fn require_null(&self, field: &str, why: &str) -> Result<()> {
        match self.present(field) {
            None | Some(Value::Null) => Ok(()),
            Some(_) => Err(self.error(field, format!("must be null: {why}"))),
        }
    }

    /// Refuses `false`.
    pub fn require_true(&self, field: &str, why: &str) -> Result<()> {
        if !self.flag(field, true)? {
            return Err(self.error(field, format!("must be true: {why}")));
        }
        Ok(())
    }

    /// Refuses `true`.
    pub fn require_false(&self, field: &str, why: &str) -> Result<()> {
        if self.flag(field, false)? {
            return Err(self.error(field, format!("must be false: {why}")));
        }
        Ok(())
    }
}
