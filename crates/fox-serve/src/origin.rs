//! CORS and the `Host` check.
//!
//! A page of any site can send requests to a server on loopback, also under a host name that resolves to 127.0.0.1 (DNS
//! rebinding). Such requests carry that name in `Host`, so a server on loopback answers only to names of loopback and to
//! hosts of allowed origins.

use std::net::IpAddr;

use hyper::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, HOST, HeaderMap, HeaderValue, ORIGIN,
    VARY,
};
use hyper::{Response, StatusCode};

use crate::body::{Body, response};
use crate::error::{ApiError, ApiResult};

/// Refuses a `Host` that is not a name of this machine or of an allowed origin.
pub(crate) fn check_host(
    headers: &HeaderMap,
    is_loopback: bool,
    allowed: &[String],
) -> ApiResult<()> {
    // Browsers always send the header.
    let Some(host) = headers.get(HOST).filter(|_| is_loopback) else { return Ok(()) };
    let name = host_name(host.to_str().unwrap_or(""));
    let local = name.eq_ignore_ascii_case("localhost")
        || name.to_ascii_lowercase().ends_with(".localhost")
        || name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    let is_named = |origin: &String| {
        let host = origin.split_once("://").map_or("", |(_, host)| host);
        host_name(host).eq_ignore_ascii_case(name)
    };
    if local || allowed.iter().any(is_named) {
        return Ok(());
    }
    let remedy = "use localhost, or add the site to the allowed origins";
    let message = format!("the server listens on loopback and does not answer to {name}; {remedy}");
    Err(ApiError::new(StatusCode::FORBIDDEN, "invalid_request_error", message)
        .with_code("host_not_allowed"))
}

/// `Host` without port and brackets.
fn host_name(host: &str) -> &str {
    match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or(""),
        None => host.split(':').next().unwrap_or(""),
    }
}

/// The answer to a CORS preflight request.
pub(crate) fn preflight() -> Response<Body> {
    let mut response = response(StatusCode::NO_CONTENT, "text/plain", "");
    let headers = response.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST"));
    let names = HeaderValue::from_static("authorization, content-type, x-request-id");
    headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, names);
    headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    response
}

/// The origin of a request, if it is allowed.
pub(crate) fn allowed_origin(headers: &HeaderMap, allowed: &[String]) -> Option<HeaderValue> {
    let origin = headers.get(ORIGIN)?;
    let fits = |allowed: &String| allowed == "*" || allowed.as_bytes() == origin.as_bytes();
    allowed.iter().any(fits).then(|| origin.clone())
}

/// Adds the CORS headers of an allowed origin.
pub(crate) fn allow(response: &mut Response<Body>, origin: HeaderValue) {
    let headers = response.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(
        ACCESS_CONTROL_EXPOSE_HEADERS,
        HeaderValue::from_static("x-request-id, x-fox-warning"),
    );
    headers.insert(VARY, HeaderValue::from_static("origin"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_server_checks_the_host() {
        let allowed = ["https://app.example:8443".to_string()];
        let check = |host: &'static str, loopback: bool| {
            let mut headers = HeaderMap::new();
            headers.insert(HOST, HeaderValue::from_static(host));
            check_host(&headers, loopback, &allowed).is_ok()
        };
        for good in [
            "localhost",
            "LOCALHOST:80",
            "127.0.0.1:8080",
            "127.9.9.9",
            "[::1]:1",
            "a.localhost",
            "app.example",
        ] {
            assert!(check(good, true), "{good}");
        }
        for bad in
            ["evil.example", "localhost.evil.example", "192.168.0.1", "127.0.0.1.evil.example", ""]
        {
            assert!(!check(bad, true), "{bad}");
            assert!(check(bad, false), "not checked elsewhere");
        }
        assert!(check_host(&HeaderMap::new(), true, &[]).is_ok());
    }
}
