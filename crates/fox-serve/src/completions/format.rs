//! How answers are written: one trait for the shapes of three APIs.

use hyper::body::Bytes;
use serde::Serialize;

use super::choice::Delta;
use super::generation::Generation;
use super::wire::FullChoice;
use crate::error::ApiResult;

/// The shape of an answer, complete or as server-sent events.
pub(crate) trait AnswerFormat: Send {
    /// Writes the events before the first delta.
    fn begin(&mut self, generation: &Generation, bytes: &mut Vec<u8>);

    /// Writes the events of a delta.
    ///
    /// # Errors
    /// The text that is kept exceeds the budget for answers.
    fn delta(
        &mut self,
        delta: &Delta,
        generation: &Generation,
        bytes: &mut Vec<u8>,
    ) -> ApiResult<()>;

    /// Writes the events after the last delta.
    fn end(&mut self, generation: &Generation, bytes: &mut Vec<u8>);

    /// A complete answer.
    fn full(&self, choices: &[FullChoice], generation: &Generation) -> ApiResult<Vec<Bytes>>;
}

/// Writes an event without a type.
pub(super) fn write_data(bytes: &mut Vec<u8>, message: &impl Serialize) {
    bytes.extend_from_slice(b"data: ");
    // Writing to memory cannot fail, and no map has keys that are not strings.
    drop(serde_json::to_writer(&mut *bytes, message));
    bytes.extend_from_slice(b"\n\n");
}

/// Writes an event whose type is the field `type` of its data.
pub(super) fn write_event(bytes: &mut Vec<u8>, data: &serde_json::Value) {
    bytes.extend_from_slice(b"event: ");
    bytes.extend_from_slice(data["type"].as_str().unwrap_or_default().as_bytes());
    bytes.push(b'\n');
    write_data(bytes, data);
}
