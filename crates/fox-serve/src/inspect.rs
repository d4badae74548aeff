//! `/inspect`: what the model forgets while it reads a text, and what its cache has dropped.

use std::sync::Arc;

use fox_eval::Subject;
use fox_eval::inspect::{HeadPicture, InspectOptions, Inspection};
use fox_infer::{CacheUse, Event, FinishReason, Request};
use fox_plot::MatrixImage;
use hyper::body::Bytes;
use hyper::{Response, StatusCode};
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::app::App;
use crate::body::{Body, json_response};
use crate::completions::Prompt;
use crate::error::{ApiError, ApiResult};
use crate::fields::{Fields, Unknown};

/// Rows and columns of a picture, at most.
const PIXELS: usize = 128;

/// `{"prompt": TEXT or [ID, ...], "head": [LAYER, HEAD]}`; heads are chosen by half-life when none is named.
pub(crate) async fn inspect(app: Arc<App>, body: Bytes) -> ApiResult<Response<Body>> {
    let (ids, head, unknown) = app.parse(body, parse).await?;
    // The engine checks the ids, and its cache is the one that is asked about.
    let cache = cache_after(&app, ids.clone()).await?;
    let _turn = app.inspecting.acquire().await.map_err(|e| ApiError::internal(e.to_string()))?;
    let shared = app.clone();
    let seen = tokio::task::spawn_blocking(move || look(&shared, &ids, head)).await;
    let seen = seen.map_err(|error| ApiError::internal(error.to_string()))??;
    Ok(unknown.tell(json_response(StatusCode::OK, &describe(&app, &seen, &cache))))
}

/// A layer and a head of it.
type Place = (usize, usize);

/// The ids to look at, and the head.
fn parse(app: &App, body: &[u8]) -> ApiResult<(Vec<i32>, Option<Place>, Unknown)> {
    let mut fields = Fields::parse(body)?;
    let prompt = fields.take::<Value>("prompt")?;
    let head = fields.take("head")?;
    let unknown = fields.finish(app.options.strict)?;
    let prompt = prompt.ok_or_else(|| ApiError::invalid("prompt", "prompt is missing"))?;
    let mut prompts = Prompt::parse(app, &prompt, true)?;
    let (Some(prompt), true) = (prompts.pop(), prompts.is_empty()) else {
        return Err(ApiError::invalid("prompt", "look at one text at a time"));
    };
    let (ids, most) = (prompt.ids, app.options.max_inspect);
    if ids.len() > most {
        let message = format!("{} tokens are more than the {most} to look at", ids.len());
        return Err(ApiError::invalid("prompt", message));
    }
    Ok((ids, head, unknown))
}

/// The cache of the engine after it has read a text.
async fn cache_after(app: &App, ids: Vec<i32>) -> ApiResult<CacheUse> {
    let (sender, receiver) = oneshot::channel();
    let mut sender = Some(sender);
    let _ticket = app.engine.submit_to(Request::greedy(ids, 0), move |event| {
        if let (Event::Finished(finished), Some(sender)) = (event, sender.take()) {
            drop(sender.send(finished));
        }
    })?;
    match receiver.await {
        Ok(finished) => match finished.reason {
            FinishReason::Failed(words) => Err(ApiError::internal(words)),
            _ => Ok(finished.cache),
        },
        Err(_) => Err(ApiError::internal("the engine has ended")),
    }
}

fn look(app: &App, ids: &[i32], head: Option<(usize, usize)>) -> ApiResult<Inspection> {
    let subject = Subject { name: &app.name, model: app.engine.model(), training_length: None };
    let ids: Vec<u32> = ids.iter().map(|&id| id as u32).collect();
    let options = InspectOptions {
        heads: head.into_iter().collect(),
        pixels: PIXELS,
        ..InspectOptions::default()
    };
    let seen = fox_eval::inspect::inspect(&subject, &ids, &options);
    seen.map_err(|error| ApiError::invalid(None, error.to_string()))
}

fn describe(app: &App, seen: &Inspection, cache: &CacheUse) -> Value {
    let names: Vec<String> = seen.tokens.iter().map(|&id| app.token_name(id as i32)).collect();
    let columns = seen.gate_strips.first().map_or(0, |strip| strip.cols);
    let strips = seen.gate_strips.iter().map(|strip| {
        let rows = strip.values.chunks(strip.cols.max(1));
        rows.map(|row| row.iter().copied().map(rounded).collect()).collect()
    });
    let strips: Vec<Vec<Vec<Value>>> = strips.collect();
    json!({
        "tokens": names,
        "heads": seen.heads,
        "tokens_per_column": seen.tokens.len().div_ceil(columns.max(1)),
        "gates": strips,
        "pictures": seen.pictures.iter().map(picture).collect::<Vec<_>>(),
        "cache": {
            "tokens": cache.tokens,
            "bytes": cache.bytes,
            "full_bytes": cache.full_bytes,
            "page_tokens": cache.page_tokens,
            "pages": cache.tokens.div_ceil(cache.page_tokens.max(1)),
            "evicted_pages": cache.evicted_pages,
        },
    })
}

fn picture(picture: &HeadPicture) -> Value {
    json!({
        "layer": picture.place.0,
        "head": picture.place.1,
        "forget": picture.forget.as_ref().map(lower_triangle),
        "attention": lower_triangle(&picture.attention.map),
    })
}

/// Row `i` has its `i + 1` values; what lies in the future is left out.
fn lower_triangle(image: &MatrixImage) -> Vec<Vec<Value>> {
    let rows = image.values.chunks(image.cols.max(1)).enumerate();
    rows.map(|(i, row)| row.iter().take(i + 1).copied().map(rounded).collect()).collect()
}

/// Four digits are enough for a picture.
fn rounded(value: f64) -> Value {
    json!((value * 1e4).round() / 1e4)
}
