//! Request bodies, read with limits, and the two kinds of response bodies.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use http_body_util::BodyExt;
use hyper::body::{Body as _, Bytes, Frame, Incoming, SizeHint};
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use hyper::{Request, Response, StatusCode};
use serde::Serialize;

use crate::completions::Events;
use crate::error::{ApiError, ApiResult};
use crate::memory::{ByteBudget, ByteLease};
use crate::options::ServeOptions;

/// Bytes of a body that do not count against the budget of all bodies, so that large bodies do not keep small ones out.
const FREE_BYTES: usize = 64 << 10;

/// The body of a response.
pub(crate) enum Body {
    /// All chunks are ready.
    Full(VecDeque<Bytes>),
    /// Server-sent events, as they are generated.
    Events(Events),
}

impl hyper::body::Body for Body {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let bytes = match self.get_mut() {
            Body::Full(chunks) => Poll::Ready(chunks.pop_front()),
            Body::Events(events) => events.poll_bytes(cx),
        };
        bytes.map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Body::Full(chunks) if chunks.is_empty())
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Body::Full(chunks) => {
                SizeHint::with_exact(chunks.iter().map(|chunk| chunk.len() as u64).sum())
            }
            Body::Events(_) => SizeHint::default(),
        }
    }
}

/// A response whose body is complete.
pub(crate) fn response(
    status: StatusCode,
    kind: &'static str,
    bytes: impl Into<Bytes>,
) -> Response<Body> {
    let bytes = bytes.into();
    let chunks = if bytes.is_empty() { VecDeque::new() } else { VecDeque::from([bytes]) };
    let mut response = Response::new(Body::Full(chunks));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

pub(crate) fn json_response(status: StatusCode, value: &impl Serialize) -> Response<Body> {
    match serde_json::to_vec(value) {
        Ok(bytes) => response(status, "application/json", bytes),
        // Only maps with keys that are not strings fail, and there are none.
        Err(error) => response(StatusCode::INTERNAL_SERVER_ERROR, "text/plain", error.to_string()),
    }
}

/// A successful response in chunks of JSON.
pub(crate) fn chunked_json_response(chunks: Vec<Bytes>) -> Response<Body> {
    let mut response = response(StatusCode::OK, "application/json", "");
    *response.body_mut() = Body::Full(chunks.into());
    response
}

/// A response of server-sent events.
pub(crate) fn event_response(events: Events) -> Response<Body> {
    let mut response = Response::new(Body::Events(events));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

/// The body of a request, counted in the budget of all bodies until it is dropped.
pub(crate) struct ReceivedBody {
    pub bytes: Vec<u8>,
    _lease: ByteLease,
}

impl ReceivedBody {
    /// A body that did not arrive over a connection.
    pub fn local(bytes: &[u8], budget: &ByteBudget) -> ReceivedBody {
        ReceivedBody { bytes: bytes.to_vec(), _lease: budget.lease() }
    }
}

/// Reads the JSON body of a request.
///
/// The content type is required because browsers do not send it to another site's server without a preflight.
pub(crate) async fn read_json(
    request: Request<Incoming>,
    options: &ServeOptions,
    budget: &ByteBudget,
) -> ApiResult<ReceivedBody> {
    let kind = request.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let essence = kind.and_then(|kind| kind.split(';').next()).unwrap_or("").trim();
    if !essence.eq_ignore_ascii_case("application/json") {
        return Err(ApiError::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "invalid_request_error",
            "send the header Content-Type: application/json",
        ));
    }
    let lease = budget.lease();
    let bytes = collect(request.into_body(), options.max_body, &lease);
    match tokio::time::timeout(options.stall_time, bytes).await {
        Err(_) => Err(ApiError::new(
            StatusCode::REQUEST_TIMEOUT,
            "invalid_request_error",
            format!("the body did not arrive within {} s", options.stall_time.as_secs_f64()),
        )),
        Ok(bytes) => Ok(ReceivedBody { bytes: bytes?, _lease: lease }),
    }
}

async fn collect(mut body: Incoming, max_body: usize, lease: &ByteLease) -> ApiResult<Vec<u8>> {
    let too_large = || {
        let message = format!("the body has more than {max_body} bytes");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
    };
    if body.size_hint().lower() > max_body as u64 {
        return Err(too_large());
    }
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame
            .map_err(|error| ApiError::invalid(None, format!("the body broke off: {error}")))?;
        let Some(data) = frame.data_ref() else { continue };
        if bytes.len() + data.len() > max_body {
            return Err(too_large());
        }
        let counted = |len: usize| len.saturating_sub(FREE_BYTES);
        lease.grow(counted(bytes.len() + data.len()) - counted(bytes.len()))?;
        bytes.extend_from_slice(data);
    }
    Ok(bytes)
}
