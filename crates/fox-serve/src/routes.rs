//! Request routing.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::header::{ALLOW, AUTHORIZATION, CONNECTION, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use serde_json::json;
use subtle::ConstantTimeEq;

use crate::access::{AccessRecord, LoggedBody};
use crate::app::App;
use crate::body::{Body, ReceivedBody, json_response, read_json, response};
use crate::completions::Kind;
use crate::error::{ApiError, ApiResult};
use crate::stall_guard::RequestPhase;
use crate::text_runtime::Worker;
use crate::{completions, inspect, models, origin, page, tokens};

/// The routes of the server; any other path is 404.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route<'a> {
    Page(&'static page::File),
    PageSettings,
    Health,
    Metrics,
    Models,
    Model(&'a str),
    TokenizerInfo,
    Completions,
    ChatCompletions,
    Responses,
    Messages,
    /// A route of OpenAI's API that is not supported, with the reason.
    Unsupported(&'static str),
    Tokenize,
    Detokenize,
    Inspect,
}

/// Path, route and description, for the guide's `reference-http.md`; besides these there are the files of the page.
#[rustfmt::skip] // a row per line
pub(crate) static ROUTES: &[(&str, Route<'static>, &str)] = &[
    ("/v1/completions", Route::Completions, "continues texts; OpenAI's API"),
    ("/v1/chat/completions", Route::ChatCompletions, "answers a conversation; OpenAI's API"),
    ("/v1/responses", Route::Responses, "OpenAI's newer API, translated to a chat"),
    ("/v1/messages", Route::Messages, "Anthropic's API, translated to a chat"),
    ("/v1/models", Route::Models, "the served model and its aliases"),
    ("/v1/models/NAME", Route::Model("NAME"), "one of them: context length, vocabulary, layers, heads"),
    ("/v1/embeddings", Route::Unsupported(NO_EMBEDDINGS), "501; vectors of texts are printed by `fox embed`"),
    ("/tokenize", Route::Tokenize, "text or messages to ids"),
    ("/detokenize", Route::Detokenize, "ids to text"),
    ("/tokenizer_info", Route::TokenizerInfo, "vocabulary, markers, chat template"),
    ("/inspect", Route::Inspect, "half-lives, forget gates, attention and evicted pages of a text"),
    ("/health", Route::Health, "200, or 503 while the server drains"),
    ("/metrics", Route::Metrics, "Prometheus; names of vLLM's dashboards (`vllm:`) beside its own"),
    ("/page.json", Route::PageSettings, "settings of the page at `/`"),
];

const NO_EMBEDDINGS: &str =
    "/v1/embeddings is not supported: the model continues text and has no embeddings";

impl<'a> Route<'a> {
    pub fn find(path: &'a str) -> Option<Route<'a>> {
        if let Some(file) = page::file(path) {
            return Some(Route::Page(file));
        }
        if let Some((_, route, _)) = ROUTES.iter().find(|(known, ..)| *known == path) {
            return Some(*route);
        }
        path.strip_prefix("/v1/models/").map(Route::Model)
    }

    pub fn method(self) -> Method {
        match self {
            Route::Completions
            | Route::ChatCompletions
            | Route::Responses
            | Route::Messages
            | Route::Unsupported(_)
            | Route::Tokenize
            | Route::Detokenize
            | Route::Inspect => Method::POST,
            _ => Method::GET,
        }
    }

    /// Whether the API key is required, where there is one.
    pub fn needs_key(self) -> bool {
        !matches!(self, Route::Page(_) | Route::PageSettings | Route::Health)
    }

    /// Whether it is answered on the connections beyond the limit.
    fn is_reserved(self) -> bool {
        matches!(self, Route::Health | Route::Metrics)
    }

    /// Label of the metrics: a bounded set of paths.
    fn name(self) -> &'static str {
        match self {
            Route::Page(_) | Route::PageSettings => "/",
            Route::Health => "/health",
            Route::Metrics => "/metrics",
            Route::Models | Route::Model(_) => "/v1/models",
            Route::TokenizerInfo => "/tokenizer_info",
            Route::Completions => "/v1/completions",
            Route::ChatCompletions => "/v1/chat/completions",
            Route::Responses => "/v1/responses",
            Route::Messages => "/v1/messages",
            Route::Unsupported(_) => "unsupported",
            Route::Tokenize => "/tokenize",
            Route::Detokenize => "/detokenize",
            Route::Inspect => "/inspect",
        }
    }
}

/// The connection of a request.
#[derive(Clone)]
pub(crate) struct ConnectionInfo {
    pub peer: SocketAddr,
    /// Whether the connection is beyond the limit, for `/health` and `/metrics` only.
    pub reserve: bool,
    pub phase: RequestPhase,
}

/// Answers a request.
pub(crate) async fn answer(
    app: Arc<App>,
    request: Request<Incoming>,
    info: ConnectionInfo,
) -> Result<Response<LoggedBody>, Infallible> {
    let log = app.options.access_log;
    let record = AccessRecord::new(&request, info.peer, log, info.phase.clone());
    let work = Worker::spawn(respond(app.clone(), request, info.clone()));
    let mut response = work.await.unwrap_or_else(|error| {
        app.metrics.count("failed", error.status.as_u16());
        error.response()
    });
    if info.reserve {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(record.attach(response))
}

/// Finds the handler and counts its response.
async fn respond(
    app: Arc<App>,
    request: Request<Incoming>,
    info: ConnectionInfo,
) -> Response<Body> {
    let path = request.uri().path().to_string();
    let route = Route::find(&path);
    let origin = origin::allowed_origin(request.headers(), &app.options.allow_origins);
    let result = match route {
        Some(route) => dispatch(&app, route, request, &info, origin.is_some()).await,
        None => Err(ApiError::missing(format!("there is nothing at {path}"), None)),
    };
    let mut response = result.unwrap_or_else(|error| error.response());
    if let Some(origin) = origin {
        origin::allow(&mut response, origin);
    }
    app.metrics.count(route.map_or("other", Route::name), response.status().as_u16());
    response
}

/// 503 for a connection beyond the limit.
fn crowded() -> ApiError {
    let message = "the server has too many connections; try again later";
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message).with_code("crowded")
}

async fn dispatch(
    app: &Arc<App>,
    route: Route<'_>,
    request: Request<Incoming>,
    info: &ConnectionInfo,
    is_allowed_origin: bool,
) -> ApiResult<Response<Body>> {
    if info.reserve && !route.is_reserved() {
        return Err(crowded());
    }
    let is_loopback = app.options.address.ip().is_loopback();
    origin::check_host(request.headers(), is_loopback, &app.options.allow_origins)?;
    if request.method() == Method::OPTIONS && is_allowed_origin {
        return Ok(origin::preflight());
    }
    let method = match request.method() {
        &Method::HEAD => Method::GET,
        other => other.clone(),
    };
    if method != route.method() {
        return Ok(wrong_method(route));
    }
    if route.needs_key() {
        check_key(app, &request)?;
    }
    let ok = |value| Ok(json_response(StatusCode::OK, &value));
    match route {
        Route::Page(file) => Ok(file.response(&app.options)),
        Route::PageSettings => ok(page::settings(&app.options)),
        Route::Health => Ok(health(app)),
        Route::Metrics => {
            let stats = app.engine.stats();
            let text = app.metrics.text(&app.name, &stats, &app.answers, &app.bodies);
            Ok(response(StatusCode::OK, "text/plain; version=0.0.4", text))
        }
        Route::Models => ok(models::list(app)),
        Route::Model(name) => {
            models::check_name(app, name)?;
            ok(models::card(app, name))
        }
        Route::TokenizerInfo => ok(tokens::info(app)),
        Route::Unsupported(why) => {
            let status = StatusCode::NOT_IMPLEMENTED;
            Err(ApiError::new(status, "invalid_request_error", why)
                .with_code("unsupported_endpoint"))
        }
        Route::Completions | Route::ChatCompletions | Route::Responses | Route::Messages => {
            let kind = match route {
                Route::ChatCompletions => Kind::Chat,
                Route::Responses => Kind::Responses,
                Route::Messages => Kind::Messages,
                _ => Kind::Text,
            };
            let body = read(app, request, info).await?;
            completions::complete(app.clone(), kind, body).await
        }
        Route::Tokenize => app.parse(read(app, request, info).await?, tokens::tokenize).await,
        Route::Detokenize => app.parse(read(app, request, info).await?, tokens::detokenize).await,
        Route::Inspect => {
            let body = read(app, request, info).await?;
            let seen = inspect::inspect(app.clone(), body);
            let timely = tokio::time::timeout(app.options.request_time, seen).await;
            timely.map_err(|_| ApiError::late(app.options.request_time))?
        }
    }
}

/// Reads the JSON body of a request.
async fn read(
    app: &App,
    request: Request<Incoming>,
    info: &ConnectionInfo,
) -> ApiResult<ReceivedBody> {
    let version = request.version();
    let body = read_json(request, &app.options, &app.bodies).await?;
    info.phase.begin(version);
    Ok(body)
}

fn wrong_method(route: Route<'_>) -> Response<Body> {
    let allowed = if route.method() == Method::POST { "POST" } else { "GET, HEAD" };
    let message = format!("{} answers {allowed} only", route.name());
    let status = StatusCode::METHOD_NOT_ALLOWED;
    let mut response = ApiError::new(status, "invalid_request_error", message).response();
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
    response
}

fn health(app: &App) -> Response<Body> {
    match app.engine.is_open() {
        true => json_response(StatusCode::OK, &json!({ "status": "ok" })),
        false => {
            json_response(StatusCode::SERVICE_UNAVAILABLE, &json!({ "status": "shutting down" }))
        }
    }
}

fn check_key(app: &App, request: &Request<Incoming>) -> ApiResult<()> {
    let Some(key) = &app.options.api_key else { return Ok(()) };
    let header = request.headers().get(AUTHORIZATION).map(HeaderValue::as_bytes).unwrap_or(b"");
    // Scheme names are case-insensitive.
    let given = match header.split_at_checked(b"bearer ".len()) {
        Some((scheme, given)) if scheme.eq_ignore_ascii_case(b"bearer ") => given,
        // Anthropic's clients send the key in another header.
        _ => request.headers().get("x-api-key").map(HeaderValue::as_bytes).unwrap_or(b""),
    };
    // Constant time.
    if bool::from(given.ct_eq(key.as_bytes())) {
        return Ok(());
    }
    let message = "send the server's key in the header Authorization: Bearer KEY";
    Err(ApiError::new(StatusCode::UNAUTHORIZED, "invalid_request_error", message)
        .with_code("invalid_api_key"))
}
