//! The page at `/`: three files that need nothing from outside.

use hyper::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, HeaderValue, X_CONTENT_TYPE_OPTIONS};
use hyper::{Response, StatusCode};

use crate::body::{Body, response};

/// Nothing from elsewhere, and nothing to elsewhere.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
     img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// One of them.
#[derive(PartialEq, Eq)]
pub(crate) struct File {
    path: &'static str,
    kind: &'static str,
    text: &'static str,
}

static FILES: [File; 5] = [
    File { path: "/", kind: "text/html; charset=utf-8", text: include_str!("index.html") },
    File { path: "/style.css", kind: "text/css; charset=utf-8", text: include_str!("style.css") },
    File { path: "/app.js", kind: SCRIPT, text: include_str!("app.js") },
    File { path: "/memory.js", kind: SCRIPT, text: include_str!("memory.js") },
    File { path: "/draw.js", kind: SCRIPT, text: include_str!("draw.js") },
];
const SCRIPT: &str = "text/javascript; charset=utf-8";

/// The file at a path.
pub(crate) fn file(path: &str) -> Option<&'static File> {
    FILES.iter().find(|file| file.path == path)
}

impl File {
    pub fn response(&self) -> Response<Body> {
        let mut response = response(StatusCode::OK, self.kind, self.text);
        let headers = response.headers_mut();
        headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
        headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        response
    }
}
