//! `/inspect`: forget gates, attention and evicted pages of a text.

use std::sync::Arc;

use fox_eval::Subject;
use fox_eval::inspect::{HeadPicture, InspectOptions, Inspection};
use fox_infer::{CacheUsage, Event, FinishReason, Request, TextDecoder};
use fox_plot::MatrixImage;
use hyper::{Response, StatusCode};
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::app::App;
use crate::body::{Body, ReceivedBody, json_response};
use crate::completions::Prompt;
use crate::error::{ApiError, ApiResult};
use crate::fields::{Fields, UnknownFields};
use crate::reference::INSPECT;

/// Largest number of rows and columns of a picture: for several heads, and for one head.
const PIXELS: (usize, usize) = (128, 256);

/// `{"prompt": TEXT or [ID, ...], "head": [LAYER, HEAD]}`; heads are selected by half-life when none is given. With
/// `"position"`, only the attention of that head at that token.
pub(crate) async fn inspect(app: Arc<App>, body: ReceivedBody) -> ApiResult<Response<Body>> {
    let InspectRequest { ids, marks, head, position, unknown } = app.parse(body, parse).await?;
    if let (Some(place), Some(position)) = (head, position) {
        let answer = app
            .run_blocking(&app.inspecting, move |app| attention_at(app, &ids, place, position))
            .await?;
        return Ok(unknown.report(json_response(StatusCode::OK, &answer)));
    }
    // The engine validates the ids and reports its evicted pages.
    let cache = cache_after(&app, ids.clone()).await?;
    let seen = app.run_blocking(&app.inspecting, move |app| look(app, &ids, head)).await?;
    let answer = describe(&app, &seen, marks, &cache)?;
    Ok(unknown.report(json_response(StatusCode::OK, &answer)))
}

/// A request for `/inspect`.
struct InspectRequest {
    ids: Vec<i32>,
    /// Number of markers in front of the text.
    marks: usize,
    head: Option<LayerHead>,
    position: Option<usize>,
    unknown: UnknownFields,
}

/// A layer and a head of it.
type LayerHead = (usize, usize);

fn parse(app: &App, body: &[u8]) -> ApiResult<InspectRequest> {
    let mut fields = Fields::parse(body, &[INSPECT])?;
    let prompt = fields.take_raw("prompt");
    let head = fields.take("head")?;
    let position: Option<usize> = fields.take("position")?;
    let unknown = fields.finish(app.options.strict)?;
    let prompt = prompt.ok_or_else(|| ApiError::invalid("prompt", "prompt is missing"))?;
    let mut prompts = Prompt::parse(app, prompt, true)?;
    let (Some(prompt), true) = (prompts.pop(), prompts.is_empty()) else {
        return Err(ApiError::invalid("prompt", "inspect one text at a time"));
    };
    let (Prompt { ids, marks }, most) = (prompt, app.options.max_inspect);
    if ids.len() > most {
        let message = format!("{} tokens exceed the limit of {most}", ids.len());
        return Err(ApiError::invalid("prompt", message));
    }
    match (head, position) {
        (None, Some(_)) => Err(ApiError::invalid("head", "position needs head: [LAYER, HEAD]")),
        (_, Some(at)) if at >= ids.len() => {
            let message = format!("there is no position {at}: the text has {} tokens", ids.len());
            Err(ApiError::invalid("position", message))
        }
        _ => Ok(InspectRequest { ids, marks, head, position, unknown }),
    }
}

/// Cache usage of the engine after it has prefilled a text.
async fn cache_after(app: &App, ids: Vec<i32>) -> ApiResult<CacheUsage> {
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

fn look(app: &App, ids: &[i32], head: Option<LayerHead>) -> ApiResult<Inspection> {
    let options = InspectOptions {
        heads: head.into_iter().collect(),
        pixels: if head.is_some() { PIXELS.1 } else { PIXELS.0 },
        ..InspectOptions::default()
    };
    let seen = fox_eval::inspect::inspect(&subject(app), &unsigned(ids), &options);
    seen.map_err(|error| ApiError::invalid(None, error.to_string()))
}

/// The attention of a head at a position, over the tokens up to it.
fn attention_at(app: &App, ids: &[i32], place: LayerHead, position: usize) -> ApiResult<Value> {
    let ids = unsigned(&ids[..=position]);
    let row = fox_eval::inspect::last_attention(&subject(app), &ids, place);
    let row = row.map_err(|error| ApiError::invalid(None, error.to_string()))?;
    let row: Vec<Value> = row.into_iter().map(|x| significant(f64::from(x))).collect();
    Ok(json!({ "layer": place.0, "head": place.1, "position": position, "attention": row }))
}

fn subject(app: &App) -> Subject<'_> {
    Subject { name: &app.name, model: app.engine.model(), training_length: None }
}

fn unsigned(ids: &[i32]) -> Vec<u32> {
    ids.iter().map(|&id| id as u32).collect()
}

fn describe(app: &App, seen: &Inspection, marks: usize, cache: &CacheUsage) -> ApiResult<Value> {
    let names: Vec<&str> =
        seen.tokens.iter().map(|&id| app.names.get(id as i32).as_str()).collect();
    let (text, offsets) = offsets(app, &seen.tokens, marks)?;
    let columns = seen.gate_strips.first().map_or(0, |strip| strip.cols);
    let strips = seen.gate_strips.iter().map(|strip| {
        let rows = strip.values.chunks(strip.cols.max(1));
        rows.map(|row| row.iter().copied().map(rounded).collect()).collect()
    });
    let strips: Vec<Vec<Vec<Value>>> = strips.collect();
    Ok(json!({
        "tokens": names,
        "ids": seen.tokens,
        "text": text,
        "text_offset": offsets,
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
    }))
}

/// The text of the ids after `marks` markers, and for every id the characters before it.
fn offsets(app: &App, ids: &[u32], marks: usize) -> ApiResult<(String, Vec<usize>)> {
    let internal = |error: fox_infer::Error| ApiError::internal(error.to_string());
    let mut decoder = TextDecoder::new(&app.tokenizer, &[], &[]).map_err(internal)?;
    let (mut text, mut offset, mut offsets) = (String::new(), 0, Vec::with_capacity(ids.len()));
    for (i, &id) in ids.iter().enumerate() {
        offsets.push(offset);
        if i >= marks {
            let new = decoder.push(id as i32).map_err(internal)?.text;
            offset += new.chars().count();
            text.push_str(&new);
        }
    }
    text.push_str(&decoder.finish().map_err(internal)?.text);
    Ok((text, offsets))
}

fn picture(picture: &HeadPicture) -> Value {
    json!({
        "layer": picture.place.0,
        "head": picture.place.1,
        // In full precision: clients multiply them over a long text.
        "gates": picture.gates,
        "forget": picture.forget.as_ref().map(lower_triangle),
        "attention": lower_triangle(&picture.attention.map),
    })
}

/// Row `i` has `i + 1` values: the causal part.
fn lower_triangle(image: &MatrixImage) -> Vec<Vec<Value>> {
    let rows = image.values.chunks(image.cols.max(1)).enumerate();
    rows.map(|(i, row)| row.iter().take(i + 1).copied().map(rounded).collect()).collect()
}

/// Rounds a fraction to five significant digits.
fn significant(value: f64) -> Value {
    json!(format!("{value:.4e}").parse::<f64>().unwrap_or(0.0))
}

/// Rounds to four decimals, enough for a picture.
fn rounded(value: f64) -> Value {
    json!((value * 1e4).round() / 1e4)
}
