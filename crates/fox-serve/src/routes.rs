//! Who answers what.

use std::convert::Infallible;
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::header::{ALLOW, AUTHORIZATION, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use serde_json::json;
use subtle::ConstantTimeEq;

use crate::app::App;
use crate::body::{Body, json_response, read_json, response};
use crate::error::{ApiError, ApiResult};
use crate::{completions, inspect, models, page, tokens};

/// The places there are; anything else is told to be missing.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Route<'a> {
    Page(&'static page::File),
    Health,
    Metrics,
    Models,
    Model(&'a str),
    TokenizerInfo,
    Completions,
    Tokenize,
    Detokenize,
    Inspect,
}

impl<'a> Route<'a> {
    fn find(path: &'a str) -> Option<Route<'a>> {
        if let Some(file) = page::file(path) {
            return Some(Route::Page(file));
        }
        Some(match path {
            "/health" => Route::Health,
            "/metrics" => Route::Metrics,
            "/v1/models" => Route::Models,
            "/v1/completions" => Route::Completions,
            "/tokenize" => Route::Tokenize,
            "/detokenize" => Route::Detokenize,
            "/tokenizer_info" => Route::TokenizerInfo,
            "/inspect" => Route::Inspect,
            other => Route::Model(other.strip_prefix("/v1/models/")?),
        })
    }

    fn method(self) -> Method {
        match self {
            Route::Completions | Route::Tokenize | Route::Detokenize | Route::Inspect => {
                Method::POST
            }
            _ => Method::GET,
        }
    }

    /// Whether a key is asked for, where there is one.
    fn is_guarded(self) -> bool {
        !matches!(self, Route::Page(_) | Route::Health)
    }

    /// For the count of requests: paths are limited in number.
    fn name(self) -> &'static str {
        match self {
            Route::Page(_) => "/",
            Route::Health => "/health",
            Route::Metrics => "/metrics",
            Route::Models | Route::Model(_) => "/v1/models",
            Route::TokenizerInfo => "/tokenizer_info",
            Route::Completions => "/v1/completions",
            Route::Tokenize => "/tokenize",
            Route::Detokenize => "/detokenize",
            Route::Inspect => "/inspect",
        }
    }
}

/// Answers a request, whatever it is.
pub(crate) async fn answer(
    app: Arc<App>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    let path = request.uri().path().to_string();
    let route = Route::find(&path);
    let result = match route {
        Some(route) => dispatch(&app, route, request).await,
        None => Err(ApiError::missing(format!("there is nothing at {path}"), None)),
    };
    let response = result.unwrap_or_else(|error| error.response());
    app.metrics.count(route.map_or("other", Route::name), response.status().as_u16());
    Ok(response)
}

async fn dispatch(
    app: &Arc<App>,
    route: Route<'_>,
    request: Request<Incoming>,
) -> ApiResult<Response<Body>> {
    let method = match request.method() {
        &Method::HEAD => Method::GET,
        other => other.clone(),
    };
    if method != route.method() {
        return Ok(wrong_method(route));
    }
    if route.is_guarded() {
        check_key(app, &request)?;
    }
    let ok = |value| Ok(json_response(StatusCode::OK, &value));
    match route {
        Route::Page(file) => Ok(file.response()),
        Route::Health => Ok(health(app)),
        Route::Metrics => {
            let text = app.metrics.text(&app.engine.stats());
            Ok(response(StatusCode::OK, "text/plain; version=0.0.4", text))
        }
        Route::Models => ok(models::list(app)),
        Route::Model(name) => {
            models::check_name(app, name)?;
            ok(models::card(app))
        }
        Route::TokenizerInfo => ok(tokens::info(app)),
        Route::Completions => {
            let body = read_json(request, &app.options).await?;
            completions::complete(app.clone(), body).await
        }
        Route::Tokenize => ok(tokens::tokenize(app, &read_json(request, &app.options).await?)?),
        Route::Detokenize => ok(tokens::detokenize(app, &read_json(request, &app.options).await?)?),
        Route::Inspect => {
            let body = read_json(request, &app.options).await?;
            let seen = inspect::inspect(app.clone(), &body);
            let timely = tokio::time::timeout(app.options.request_time, seen).await;
            ok(timely.map_err(|_| ApiError::late(app.options.request_time))??)
        }
    }
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
    let given = header.strip_prefix(b"Bearer ").unwrap_or(b"");
    // Takes as long for a wrong key as for a right one.
    if bool::from(given.ct_eq(key.as_bytes())) {
        return Ok(());
    }
    let message = "send the server's key in the header Authorization: Bearer KEY";
    Err(ApiError::new(StatusCode::UNAUTHORIZED, "invalid_request_error", message)
        .with_code("invalid_api_key"))
}
