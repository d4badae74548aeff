//! Answers as server-sent events.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll};

use hyper::body::Bytes;
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::choice::Entry;
use super::format::{AnswerFormat, write_data};
use super::generation::Generation;
use crate::error::ApiResult;
use crate::text_runtime::{TextRuntime, Worker};

/// Bytes of events that are sent at once, about, and the number of such chunks that wait for a slow client.
const CHUNK: usize = 64 << 10;
const WAITING_CHUNKS: usize = 2;

/// Chunks of events for a connection. Dropping it cancels the generation.
pub(crate) struct Events {
    chunks: Receiver<Bytes>,
    worker: Option<Worker<()>>,
}

impl Events {
    /// Writes a generation as events on the worker threads.
    pub fn start(
        runtime: &TextRuntime,
        generation: Generation,
        format: Box<dyn AnswerFormat>,
    ) -> ApiResult<Events> {
        let (sender, chunks) = channel(WAITING_CHUNKS);
        let writer = EventWriter { generation, format, begun: false, over: false };
        Ok(Events { chunks, worker: Some(runtime.spawn(writer.run(sender))?) })
    }

    /// The next chunk; `None` at the end.
    pub fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        match self.chunks.poll_recv(cx) {
            Poll::Ready(None) => {}
            other => return other,
        }
        // The status has been sent: a worker that failed can only be reported as an event.
        let Some(worker) = &mut self.worker else { return Poll::Ready(None) };
        Pin::new(worker).poll(cx).map(|result| {
            self.worker = None;
            let error = result.err()?;
            let mut bytes = Vec::new();
            write_data(&mut bytes, &error.json());
            Some(bytes.into())
        })
    }
}

/// Serializes deltas until the generation ends or fails.
struct EventWriter {
    generation: Generation,
    format: Box<dyn AnswerFormat>,
    begun: bool,
    over: bool,
}

impl EventWriter {
    async fn run(mut self, sender: Sender<Bytes>) {
        while let Some(bytes) = poll_fn(|cx| self.poll_chunk(cx)).await {
            if sender.send(bytes).await.is_err() {
                return;
            }
        }
    }

    /// The next event, together with others that are ready.
    fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let mut bytes = Vec::new();
        if !self.begun {
            self.begun = true;
            self.format.begin(&self.generation, &mut bytes);
        }
        while !self.over && bytes.len() < CHUNK {
            match self.generation.poll_next(cx) {
                Poll::Ready(Ok(Some(delta))) => {
                    if !delta.is_silent()
                        && let Err(error) = self.format.delta(&delta, &self.generation, &mut bytes)
                    {
                        write_data(&mut bytes, &error.json());
                        self.over = true;
                    }
                    let entries = delta.entries.iter().map(|entry| Entry::bytes(entry.top.len()));
                    self.generation.lease().shrink(entries.sum());
                }
                Poll::Ready(Ok(None)) => {
                    self.format.end(&self.generation, &mut bytes);
                    self.over = true;
                }
                // The status has been sent: errors are events, too.
                Poll::Ready(Err(error)) => {
                    write_data(&mut bytes, &error.json());
                    self.over = true;
                }
                Poll::Pending if bytes.is_empty() => return Poll::Pending,
                Poll::Pending => break,
            }
        }
        Poll::Ready((!bytes.is_empty()).then(|| bytes.into()))
    }
}
