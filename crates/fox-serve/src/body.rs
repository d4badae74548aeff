//! Bodies: reading them with limits, and the two kinds that are sent.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use http_body_util::{BodyExt, Limited};
use hyper::body::{Body as _, Bytes, Frame, Incoming, SizeHint};
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use hyper::{Request, Response, StatusCode};
use serde::Serialize;

use crate::completions::Events;
use crate::error::{ApiError, ApiResult};
use crate::options::ServeOptions;

/// What a response carries.
pub(crate) enum Body {
    /// Everything at once.
    Full(Bytes),
    /// Server-sent events, made when the connection asks for them.
    Events(Box<Events>),
}

impl hyper::body::Body for Body {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let bytes = match self.get_mut() {
            Body::Full(bytes) if bytes.is_empty() => Poll::Ready(None),
            Body::Full(bytes) => Poll::Ready(Some(std::mem::take(bytes))),
            Body::Events(events) => events.poll_bytes(cx),
        };
        bytes.map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Body::Full(bytes) if bytes.is_empty())
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Body::Full(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Body::Events(_) => SizeHint::default(),
        }
    }
}

/// A response of one piece.
pub(crate) fn response(
    status: StatusCode,
    kind: &'static str,
    bytes: impl Into<Bytes>,
) -> Response<Body> {
    let mut response = Response::new(Body::Full(bytes.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

pub(crate) fn json_response(status: StatusCode, value: &impl Serialize) -> Response<Body> {
    match serde_json::to_vec(value) {
        Ok(bytes) => response(status, "application/json", bytes),
        // Maps with keys that are no strings are the only way here, and there are none.
        Err(error) => response(StatusCode::INTERNAL_SERVER_ERROR, "text/plain", error.to_string()),
    }
}

/// A response that goes on.
pub(crate) fn event_response(events: Events) -> Response<Body> {
    let mut response = Response::new(Body::Events(Box::new(events)));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

/// The JSON body of a request, as bytes.
///
/// The type is insisted on because no browser sends it to another site's server without asking first.
pub(crate) async fn read_json(
    request: Request<Incoming>,
    options: &ServeOptions,
) -> ApiResult<Bytes> {
    let kind = request.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let essence = kind.and_then(|kind| kind.split(';').next()).unwrap_or("").trim();
    if !essence.eq_ignore_ascii_case("application/json") {
        return Err(ApiError::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "invalid_request_error",
            "send the header Content-Type: application/json",
        ));
    }
    let too_large = || {
        let message = format!("the body has more than {} bytes", options.max_body);
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
    };
    if request.body().size_hint().lower() > options.max_body as u64 {
        return Err(too_large());
    }
    let body = Limited::new(request.into_body(), options.max_body).collect();
    match tokio::time::timeout(options.stall_time, body).await {
        Err(_) => Err(ApiError::new(
            StatusCode::REQUEST_TIMEOUT,
            "invalid_request_error",
            format!("the body did not arrive within {} s", options.stall_time.as_secs_f64()),
        )),
        Ok(Err(error)) if error.is::<http_body_util::LengthLimitError>() => Err(too_large()),
        Ok(Err(error)) => Err(ApiError::invalid(None, format!("the body broke off: {error}"))),
        Ok(Ok(body)) => Ok(body.to_bytes()),
    }
}
