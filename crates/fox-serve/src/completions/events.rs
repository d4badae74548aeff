//! Generation as server-sent events.

use std::task::{Context, Poll};

use hyper::body::Bytes;
use serde::Serialize;

use super::generation::Generation;
use super::wire::Head;

/// A stream of chunks that ends with `[DONE]`.
pub(crate) struct Events {
    answers: Generation,
    head: Head,
    begun: bool,
    over: bool,
}

impl Events {
    pub fn new(answers: Generation, head: Head) -> Events {
        Events { answers, head, begun: false, over: false }
    }

    /// The next event, or several that are there already.
    pub fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let mut bytes = Vec::new();
        let include_usage = self.answers.request().include_usage;
        if !self.begun {
            self.begun = true;
            for index in 0..self.answers.len() {
                if let Some(chunk) = self.head.first_chunk(index, include_usage) {
                    write(&mut bytes, &chunk);
                }
            }
        }
        while !self.over {
            match self.answers.poll_next(cx) {
                Poll::Ready(Ok(Some(delta))) if delta.is_silent() => {}
                Poll::Ready(Ok(Some(delta))) => {
                    write(&mut bytes, &self.head.chunk(&delta, include_usage));
                }
                Poll::Ready(Ok(None)) => {
                    if include_usage {
                        write(&mut bytes, &self.head.usage_chunk(self.answers.usage()));
                    }
                    bytes.extend_from_slice(b"data: [DONE]\n\n");
                    self.over = true;
                }
                // The status has been sent long ago.
                Poll::Ready(Err(error)) => {
                    write(&mut bytes, &error.json());
                    self.over = true;
                }
                Poll::Pending if bytes.is_empty() => return Poll::Pending,
                Poll::Pending => break,
            }
            if bytes.len() > 64 << 10 {
                break;
            }
        }
        Poll::Ready((!bytes.is_empty()).then(|| bytes.into()))
    }
}

fn write(bytes: &mut Vec<u8>, message: &impl Serialize) {
    bytes.extend_from_slice(b"data: ");
    // Writing to memory cannot fail, and no map has keys that are no strings.
    drop(serde_json::to_writer(&mut *bytes, message));
    bytes.extend_from_slice(b"\n\n");
}
