//! A connection that does not wait forever for a client that does not read, and tells one that has finished
//! writing from one that has left.

use std::io::{self, ErrorKind, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep};

/// How often a connection whose other side has stopped writing is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Sent to a client that has stopped writing while its answer is being made: one that has left resets the
/// connection, any other one skips it.
const INTERIM: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// How far a request has come: it arrives, it is whole, its answer was sent.
#[derive(Clone, Debug, Default)]
pub(crate) struct RequestPhase(Arc<AtomicU8>);

impl RequestPhase {
    const IDLE: u8 = 0;
    /// The head is there, and perhaps the body.
    const ARRIVES: u8 = 1;
    const ASKED: u8 = 2;
    /// As asked, by a client that knows interim answers.
    const ASKED_1_1: u8 = 3;

    /// A request has begun to arrive.
    pub fn arrive(&self) {
        self.0.store(Self::ARRIVES, Ordering::Relaxed);
    }

    /// It has arrived: its client may stop writing and still wants its answer.
    pub fn begin(&self, version: hyper::Version) {
        let state = if version == hyper::Version::HTTP_11 { Self::ASKED_1_1 } else { Self::ASKED };
        self.0.store(state, Ordering::Relaxed);
    }

    /// Its answer was sent, or will not be.
    pub fn end(&self) {
        self.0.store(Self::IDLE, Ordering::Relaxed);
    }

    fn is_idle(&self) -> bool {
        self.0.load(Ordering::Relaxed) == Self::IDLE
    }

    fn is_arriving(&self) -> bool {
        self.0.load(Ordering::Relaxed) == Self::ARRIVES
    }

    /// Whether an interim answer may be sent; once.
    fn take_interim(&self) -> bool {
        let (from, to) = (Self::ASKED_1_1, Self::ASKED);
        self.0.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

/// A TCP stream whose writes fail when nothing could be written for a time.
pub(crate) struct StallGuard {
    stream: TcpStream,
    limit: Duration,
    /// Runs while a write waits.
    stalled: Option<Pin<Box<Sleep>>>,
    phase: RequestPhase,
    /// Runs after the client has stopped writing.
    half_closed: Option<Pin<Box<Sleep>>>,
}

impl StallGuard {
    pub fn new(stream: TcpStream, limit: Duration, phase: RequestPhase) -> Self {
        StallGuard { stream, limit, stalled: None, phase, half_closed: None }
    }

    fn judge<T>(
        &mut self,
        cx: &mut Context<'_>,
        result: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        // Something of the answer is on its way: writing shows whether somebody reads.
        self.phase.take_interim();
        if result.is_ready() {
            self.stalled = None;
            return result;
        }
        let limit = self.limit;
        let timer = self.stalled.get_or_insert_with(|| Box::pin(sleep(limit)));
        timer.as_mut().poll(cx).map(|()| Err(ErrorKind::TimedOut.into()))
    }

    /// The client writes no more: an end once its answer is sent, an error once it has left.
    fn watch(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            if self.phase.is_idle() {
                return Poll::Ready(Ok(()));
            }
            if let Some(error) = self.stream.take_error()? {
                return Poll::Ready(Err(error));
            }
            let timer = self.half_closed.get_or_insert_with(|| Box::pin(sleep(LOOK_EVERY)));
            ready!(timer.as_mut().poll(cx));
            // A request that is not whole by now never will be.
            if self.phase.is_arriving() {
                return Poll::Ready(Ok(()));
            }
            if self.phase.take_interim() {
                // So few bytes fit; if they cannot be written, the next look finds out why.
                drop(self.stream.try_write(INTERIM));
            }
            self.half_closed = Some(Box::pin(sleep(LOOK_EVERY)));
        }
    }
}

impl AsyncRead for StallGuard {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.half_closed.is_some() {
            return self.watch(cx);
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        if buffer.filled().len() > before || buffer.remaining() == 0 || self.phase.is_idle() {
            return Poll::Ready(Ok(()));
        }
        self.watch(cx)
    }
}

impl AsyncWrite for StallGuard {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.judge(cx, result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(cx, bytes);
        self.judge(cx, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
