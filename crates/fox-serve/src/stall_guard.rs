//! A TCP connection with a limit on stalled writes, which also distinguishes clients that half-closed the connection from
//! clients that disconnected.

use std::io::{self, ErrorKind, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep};

/// Interval at which a half-closed connection is checked.
const CHECK_EVERY: Duration = Duration::from_millis(100);

/// Sent to a client that half-closed the connection while its answer is generated: one that has disconnected resets the
/// connection, any other skips it.
const INTERIM: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// The phase of the current request of a connection, shared by the connection and the handler.
#[derive(Clone, Debug, Default)]
pub(crate) struct RequestPhase(Arc<AtomicU8>);

impl RequestPhase {
    const IDLE: u8 = 0;
    /// The head was received, and the body is read.
    const RECEIVING: u8 = 1;
    const RECEIVED: u8 = 2;
    /// As received, from a client that accepts interim responses.
    const RECEIVED_1_1: u8 = 3;

    /// The head of a request was received.
    pub fn receive(&self) {
        self.0.store(Self::RECEIVING, Ordering::Relaxed);
    }

    /// The request is complete: its client may half-close the connection and still read the answer.
    pub fn begin(&self, version: hyper::Version) {
        let state =
            if version == hyper::Version::HTTP_11 { Self::RECEIVED_1_1 } else { Self::RECEIVED };
        self.0.store(state, Ordering::Relaxed);
    }

    /// The response has ended.
    pub fn end(&self) {
        self.0.store(Self::IDLE, Ordering::Relaxed);
    }

    fn is_idle(&self) -> bool {
        self.0.load(Ordering::Relaxed) == Self::IDLE
    }

    fn is_receiving(&self) -> bool {
        self.0.load(Ordering::Relaxed) == Self::RECEIVING
    }

    /// Whether an interim response may be sent; true once per request.
    fn take_interim(&self) -> bool {
        let (from, to) = (Self::RECEIVED_1_1, Self::RECEIVED);
        self.0.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

/// A TCP connection whose writes fail when they stall for `limit`.
pub(crate) struct StallGuard {
    stream: TcpStream,
    limit: Duration,
    /// Timer of a stalled write.
    stalled: Option<Pin<Box<Sleep>>>,
    phase: RequestPhase,
    /// Timer of the checks after the client half-closed the connection.
    half_closed: Option<Pin<Box<Sleep>>>,
}

impl StallGuard {
    pub fn new(stream: TcpStream, limit: Duration, phase: RequestPhase) -> Self {
        StallGuard { stream, limit, stalled: None, phase, half_closed: None }
    }

    fn limit_stall<T>(
        &mut self,
        cx: &mut Context<'_>,
        result: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        // The response has begun: its writes notice a client that disconnected.
        self.phase.take_interim();
        if result.is_ready() {
            self.stalled = None;
            return result;
        }
        let limit = self.limit;
        let timer = self.stalled.get_or_insert_with(|| Box::pin(sleep(limit)));
        timer.as_mut().poll(cx).map(|()| Err(ErrorKind::TimedOut.into()))
    }

    /// After a half-close: ends when the response has ended, fails when the client has disconnected.
    fn watch(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            if self.phase.is_idle() {
                return Poll::Ready(Ok(()));
            }
            if let Some(error) = self.stream.take_error()? {
                return Poll::Ready(Err(error));
            }
            let timer = self.half_closed.get_or_insert_with(|| Box::pin(sleep(CHECK_EVERY)));
            ready!(timer.as_mut().poll(cx));
            // An incomplete request cannot be completed any more.
            if self.phase.is_receiving() {
                return Poll::Ready(Ok(()));
            }
            if self.phase.take_interim() {
                // A failed write shows at the next check.
                drop(self.stream.try_write(INTERIM));
            }
            self.half_closed = Some(Box::pin(sleep(CHECK_EVERY)));
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
        self.limit_stall(cx, result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(cx, bytes);
        self.limit_stall(cx, result)
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
