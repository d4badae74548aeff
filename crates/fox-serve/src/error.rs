//! Errors of the server and of requests.

use fox_infer::Refusal;
use hyper::header::{HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use hyper::{Response, StatusCode};
use serde_json::json;

use crate::body::{Body, json_response};
use crate::reference::ERRORS;

/// An error of starting or running a server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The address is in use or does not belong to this machine.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// The address.
        address: std::net::SocketAddr,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The operating system did not start threads.
    #[error("cannot start the server's threads: {0}")]
    Runtime(std::io::Error),
    /// Model and tokenizer do not belong together, or an option is out of range.
    #[error("{0}")]
    Option(String),
}

/// Results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// An error response in OpenAI's shape.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ApiError {
    pub status: StatusCode,
    pub message: String,
    pub kind: &'static str,
    /// The invalid field.
    pub param: Option<String>,
    pub code: Option<&'static str>,
}

pub(crate) type ApiResult<T> = std::result::Result<T, ApiError>;

impl ApiError {
    /// 400: an invalid request.
    pub fn invalid(param: impl Into<Option<&'static str>>, message: impl Into<String>) -> Self {
        let param: Option<&str> = param.into();
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
            .with_param(param.map(str::to_string))
    }

    /// 404.
    pub fn missing(message: impl Into<String>, code: Option<&'static str>) -> Self {
        let error = Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message);
        ApiError { code, ..error }
    }

    /// 500.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// 504: the time limit of a request.
    pub fn late(limit: std::time::Duration) -> Self {
        let message = format!("the answer took longer than {} s", limit.as_secs_f64());
        Self::new(StatusCode::GATEWAY_TIMEOUT, "timeout", message)
    }

    pub fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        let is_known = ERRORS.iter().any(|error| error.0 == status.as_u16());
        debug_assert!(is_known, "{status} is missing in reference.rs");
        ApiError { status, message: message.into(), kind, param: None, code: None }
    }

    pub fn with_param(self, param: Option<String>) -> Self {
        ApiError { param, ..self }
    }

    pub fn with_code(self, code: &'static str) -> Self {
        let is_known = ERRORS.iter().any(|error| error.1 == code);
        debug_assert!(is_known, "{code} is missing in reference.rs");
        ApiError { code: Some(code), ..self }
    }

    pub fn json(&self) -> serde_json::Value {
        json!({ "error": {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }})
    }

    pub fn response(&self) -> Response<Body> {
        let mut response = json_response(self.status, &self.json());
        let headers = response.headers_mut();
        match self.status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
            }
            StatusCode::UNAUTHORIZED => {
                headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            _ => {}
        }
        response
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        let message = refusal.to_string();
        match refusal {
            Refusal::QueueFull(_) => {
                ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
                    .with_code("queue_full")
            }
            Refusal::Closed => {
                ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message)
                    .with_code("shutting_down")
            }
            Refusal::TooLong { .. } => {
                ApiError::invalid("prompt", message).with_code("context_length_exceeded")
            }
            Refusal::NeverFits { .. } => {
                ApiError::invalid("prompt", message).with_code("cache_size_exceeded")
            }
            Refusal::Parameter { parameter, .. } => ApiError::invalid(parameter, message),
            _ => ApiError::invalid("prompt", message),
        }
    }
}

/// Ids outside the tokenizer's vocabulary.
impl From<fox_data::Error> for ApiError {
    fn from(error: fox_data::Error) -> Self {
        ApiError::invalid(None, error.to_string())
    }
}
