//! Request ids and the access log.

use std::convert::Infallible;
use std::io::Write;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Instant, SystemTime};

use fox_base::utc::rfc3339;
use hyper::body::{Bytes, Frame, SizeHint};
use hyper::header::{HeaderName, HeaderValue};
use hyper::{Request, Response};
use serde_json::json;

use crate::app::random;
use crate::body::Body;
use crate::stall_guard::RequestPhase;

/// The header with the request id.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Longest request id that is taken from a client.
const MAX_ID: usize = 64;

/// Format of the access log on standard error, one line per response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessLog {
    /// Words between spaces.
    Text,
    /// A JSON object.
    Json,
}

/// The access log entry of one request.
pub(crate) struct AccessRecord {
    log: Option<AccessLog>,
    peer: SocketAddr,
    id: String,
    method: String,
    path: String,
    start: Instant,
    status: u16,
    bytes: usize,
    phase: RequestPhase,
}

impl AccessRecord {
    pub fn new<B>(
        request: &Request<B>,
        peer: SocketAddr,
        log: Option<AccessLog>,
        phase: RequestPhase,
    ) -> AccessRecord {
        let own = request.headers().get(REQUEST_ID).and_then(|id| id.to_str().ok());
        let fits = |id: &&str| {
            let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.:".contains(&b);
            !id.is_empty() && id.len() <= MAX_ID && id.bytes().all(plain)
        };
        let id = own.filter(fits).map_or_else(|| format!("req-{:016x}", random()), str::to_string);
        AccessRecord {
            log,
            peer,
            id,
            method: request.method().to_string(),
            path: request.uri().path().to_string(),
            start: Instant::now(),
            status: 0,
            bytes: 0,
            phase,
        }
    }

    /// Attaches the entry to the response, to be logged when that ends.
    pub fn attach(mut self, mut response: Response<Body>) -> Response<LoggedBody> {
        self.status = response.status().as_u16();
        if let Ok(id) = HeaderValue::from_str(&self.id) {
            response.headers_mut().insert(REQUEST_ID, id);
        }
        response.map(|body| LoggedBody { body, record: self })
    }

    fn line(&self, log: AccessLog, now: SystemTime) -> String {
        let time = rfc3339(now);
        let ms = self.start.elapsed().as_secs_f64() * 1e3;
        let AccessRecord { peer, id, method, path, status, bytes, .. } = self;
        match log {
            AccessLog::Text => {
                format!("{time} {peer} {method} {path} {status} {bytes} bytes {ms:.1} ms {id}\n")
            }
            AccessLog::Json => {
                let ms = (ms * 10.0).round() / 10.0;
                let line = json!({ "time": time, "client": peer.to_string(), "method": method,
                    "path": path, "status": status, "bytes": bytes, "ms": ms, "request_id": id });
                format!("{line}\n")
            }
        }
    }
}

/// Logs the response, sent or aborted.
impl Drop for AccessRecord {
    fn drop(&mut self) {
        self.phase.end();
        if let Some(log) = self.log {
            // One call, so that lines do not interleave. A failure to log must not end the server.
            drop(std::io::stderr().write_all(self.line(log, SystemTime::now()).as_bytes()));
        }
    }
}

/// A response body with its access log entry.
pub(crate) struct LoggedBody {
    body: Body,
    record: AccessRecord,
}

impl hyper::body::Body for LoggedBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        if let Poll::Ready(Some(Ok(frame))) = &frame {
            self.record.bytes += frame.data_ref().map_or(0, Bytes::len);
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::UNIX_EPOCH;

    #[test]
    fn log_lines_and_request_ids() {
        let request = |id: &str| {
            Request::builder().uri("/v1/models?x=1").header(REQUEST_ID, id).body(()).unwrap()
        };
        let peer = ([127, 0, 0, 1], 9).into();
        let record = AccessRecord::new(&request("mine-7"), peer, None, RequestPhase::default());
        let line = record.line(AccessLog::Json, UNIX_EPOCH);
        let line: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!((&line["request_id"], &line["path"]), (&json!("mine-7"), &json!("/v1/models")));
        assert_eq!(line["time"], "1970-01-01T00:00:00.000Z");
        let line = record.line(AccessLog::Text, UNIX_EPOCH);
        assert!(line.contains(" 127.0.0.1:9 GET /v1/models 0 0 bytes "), "{line}");
        for bad in ["", "a b", "x\u{7f}y", &"x".repeat(65)] {
            if let Ok(value) = HeaderValue::from_str(bad) {
                let mut request = request("x");
                request.headers_mut().insert(REQUEST_ID, value);
                let record = AccessRecord::new(&request, peer, None, RequestPhase::default());
                assert!(record.id.starts_with("req-"), "{bad}");
            }
        }
    }
}
