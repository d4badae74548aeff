//! The web page at `/`, without external resources.

use hyper::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, HeaderValue, X_CONTENT_TYPE_OPTIONS};
use hyper::{Response, StatusCode};
use serde_json::{Value, json};

use crate::ServeOptions;
use crate::body::{Body, response};

/// A file of the page.
#[derive(PartialEq, Eq)]
pub(crate) struct File {
    path: &'static str,
    kind: &'static str,
    text: &'static str,
}

const SCRIPT: &str = "text/javascript; charset=utf-8";

static FILES: [File; 8] = [
    File { path: "/", kind: "text/html; charset=utf-8", text: include_str!("index.html") },
    File { path: "/style.css", kind: "text/css; charset=utf-8", text: include_str!("style.css") },
    File { path: "/app.js", kind: SCRIPT, text: include_str!("app.js") },
    File { path: "/state.js", kind: SCRIPT, text: include_str!("state.js") },
    File { path: "/server.js", kind: SCRIPT, text: include_str!("server.js") },
    File { path: "/pane.js", kind: SCRIPT, text: include_str!("pane.js") },
    File { path: "/memory.js", kind: SCRIPT, text: include_str!("memory.js") },
    File { path: "/draw.js", kind: SCRIPT, text: include_str!("draw.js") },
];

/// The file at a path.
pub(crate) fn file(path: &str) -> Option<&'static File> {
    FILES.iter().find(|file| file.path == path)
}

/// Settings of the page: the server to compare with.
pub(crate) fn settings(options: &ServeOptions) -> Value {
    json!({ "compare": options.compare })
}

impl File {
    pub fn response(&self, options: &ServeOptions) -> Response<Body> {
        let mut response = response(StatusCode::OK, self.kind, self.text);
        let headers = response.headers_mut();
        headers.insert(CONTENT_SECURITY_POLICY, policy(options.compare.as_deref()));
        headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        response
    }
}

/// The content security policy: no external resources, and no connections except to the server named for comparison, so
/// that a link cannot make the page send a text elsewhere.
fn policy(compare: Option<&str>) -> HeaderValue {
    let policy = |more: &str| {
        format!(
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'{more}; \
             img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
    };
    // Origins were validated, so this does not fail.
    let own = HeaderValue::from_str(&policy(&compare.map_or(String::new(), |c| format!(" {c}"))));
    own.unwrap_or(HeaderValue::from_static("default-src 'none'"))
}
