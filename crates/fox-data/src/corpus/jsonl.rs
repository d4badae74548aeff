//! JSON lines: one object per line, its text in one field or all of it.

use std::fmt;
use std::io::{BufRead, Read};

use serde::Deserialize;
use serde::de::{
    DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor,
};

use super::decompress::{Contents, Reader, read_error};
use super::files::CorpusFile;
use super::{Document, DocumentsOfFile, Record, RecordsOfFile};
use crate::error::{Error, Result};

/// Longest line. A few kilobytes of compressed data can hold a line of gigabytes.
pub(super) const MAX_LINE_BYTES: u64 = 256 << 20;

/// The documents of a file, read line by line.
pub(super) fn documents(file: &CorpusFile, contents: Contents, field: &str) -> DocumentsOfFile {
    let field = field.to_owned();
    Box::new(JsonLines::new(file, contents, move |lines: &LinePosition<'_>, line: &str| {
        let mut deserializer = serde_json::Deserializer::from_str(line);
        let value = FieldOf(&field)
            .deserialize(&mut deserializer)
            .and_then(|value| deserializer.end().map(|()| value))
            .map_err(|error| lines.bad(&error))?;
        match value {
            Some(FieldValue::Text(text)) => Ok(Document { text }),
            Some(FieldValue::Other(found)) => Err(Error::NotText {
                path: lines.file.path.clone(),
                line: lines.number,
                field: field.clone(),
                found,
            }),
            None => Err(Error::MissingField {
                path: lines.file.path.clone(),
                location: format!("line {}", lines.number),
                field: field.clone(),
            }),
        }
    }))
}

/// The objects of a file, whole, read line by line.
pub(super) fn records(file: &CorpusFile, contents: Contents) -> RecordsOfFile {
    Box::new(JsonLines::new(file, contents, |lines: &LinePosition<'_>, line: &str| {
        serde_json::from_str::<Record>(line).map_err(|error| lines.bad(&error))
    }))
}

/// Which line is being read.
struct LinePosition<'a> {
    file: &'a CorpusFile,
    number: u64,
}

impl LinePosition<'_> {
    fn bad(&self, error: &serde_json::Error) -> Error {
        Error::BadJsonLine {
            path: self.file.path.clone(),
            line: self.number,
            detail: error.to_string(),
        }
    }
}

struct JsonLines<P> {
    file: CorpusFile,
    reader: Reader,
    parse: P,
    line: Vec<u8>,
    line_number: u64,
    /// Bytes before the current line.
    offset: u64,
}

impl<T, P: Fn(&LinePosition<'_>, &str) -> Result<T>> JsonLines<P> {
    fn new(file: &CorpusFile, contents: Contents, parse: P) -> Self {
        let Contents { reader, skipped: offset } = contents;
        JsonLines { file: file.clone(), reader, parse, line: Vec::new(), line_number: 0, offset }
    }

    /// Reads the next line that is not blank; false at the end.
    fn read_line(&mut self) -> Result<bool> {
        loop {
            self.offset += self.line.len() as u64;
            self.line.clear();
            let n = (&mut self.reader)
                .take(MAX_LINE_BYTES + 1)
                .read_until(b'\n', &mut self.line)
                .map_err(|error| read_error(&self.file, error))?;
            self.line_number += 1;
            if n as u64 > MAX_LINE_BYTES {
                return Err(Error::DocumentTooLarge {
                    path: self.file.path.clone(),
                    place: format!(" line {}", self.line_number),
                    limit: MAX_LINE_BYTES,
                });
            }
            if n == 0 {
                return Ok(false);
            }
            if !self.line.trim_ascii().is_empty() {
                return Ok(true);
            }
        }
    }

    fn parse_line(&self) -> Result<T> {
        let line = std::str::from_utf8(&self.line).map_err(|error| Error::NotUtf8 {
            path: self.file.path.clone(),
            offset: self.offset + error.valid_up_to() as u64,
        })?;
        (self.parse)(&LinePosition { file: &self.file, number: self.line_number }, line)
    }
}

impl<T, P: Fn(&LinePosition<'_>, &str) -> Result<T>> Iterator for JsonLines<P> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Result<T>> {
        match self.read_line() {
            Ok(true) => Some(self.parse_line()),
            Ok(false) => None,
            Err(error) => Some(Err(error)),
        }
    }
}

/// Takes one field out of an object and passes over the others without storing them.
struct FieldOf<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for FieldOf<'_> {
    type Value = Option<FieldValue>;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> std::result::Result<Self::Value, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for FieldOf<'_> {
    type Value = Option<FieldValue>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with the text field \"{}\"", self.0)
    }

    fn visit_map<A: MapAccess<'de>>(
        self,
        mut map: A,
    ) -> std::result::Result<Self::Value, A::Error> {
        let mut value = None;
        while let Some(key) = map.next_key::<String>()? {
            if key != self.0 {
                map.next_value::<IgnoredAny>()?;
            } else if value.replace(map.next_value::<FieldValue>()?).is_some() {
                return Err(A::Error::custom(format!("the field \"{key}\" is there twice")));
            }
        }
        Ok(value)
    }
}

/// The value of the text field.
enum FieldValue {
    Text(String),
    /// What it is instead, in words.
    Other(&'static str),
}

impl<'de> Deserialize<'de> for FieldValue {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        d.deserialize_any(FieldValueVisitor)
    }
}

struct FieldValueVisitor;

impl<'de> Visitor<'de> for FieldValueVisitor {
    type Value = FieldValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E>(self, text: &str) -> std::result::Result<FieldValue, E> {
        Ok(FieldValue::Text(text.to_owned()))
    }

    fn visit_string<E>(self, text: String) -> std::result::Result<FieldValue, E> {
        Ok(FieldValue::Text(text))
    }

    fn visit_unit<E>(self) -> std::result::Result<FieldValue, E> {
        Ok(FieldValue::Other("null"))
    }

    fn visit_bool<E>(self, _: bool) -> std::result::Result<FieldValue, E> {
        Ok(FieldValue::Other("true or false"))
    }

    fn visit_i64<E>(self, _: i64) -> std::result::Result<FieldValue, E> {
        Ok(FieldValue::Other("a number"))
    }

    fn visit_u64<E>(self, _: u64) -> std::result::Result<FieldValue, E> {
        Ok(FieldValue::Other("a number"))
    }

    fn visit_f64<E>(self, _: f64) -> std::result::Result<FieldValue, E> {
        Ok(FieldValue::Other("a number"))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<FieldValue, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(FieldValue::Other("a list"))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<FieldValue, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(FieldValue::Other("an object"))
    }
}
