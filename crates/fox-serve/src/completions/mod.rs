//! `/v1/completions`: from JSON to the engine and back, whole or as events.

mod answers;
mod choice;
mod events;
mod prompt;
mod request;
mod wire;

pub(crate) use events::Events;
pub(crate) use prompt::Prompt;

use std::sync::Arc;

use hyper::body::Bytes;
use hyper::{Response, StatusCode};

use crate::app::App;
use crate::body::{Body, event_response, json_response};
use crate::error::ApiResult;
use answers::Answers;
use request::CompletionRequest;
use wire::{Head, WholeChoice};

/// Answers a request.
pub(crate) async fn complete(app: Arc<App>, body: Bytes) -> ApiResult<Response<Body>> {
    let request = CompletionRequest::parse(&app, &body)?;
    let head = Head::new(&app.name);
    let include_usage = request.include_usage;
    let stream = request.stream;
    let mut answers = Answers::ask(app, request)?;
    if stream {
        return Ok(event_response(Events::new(answers, head, include_usage)));
    }
    let mut choices: Vec<WholeChoice> = (0..answers.len()).map(WholeChoice::new).collect();
    while let Some(delta) = answers.next().await? {
        choices[delta.index].add(delta);
    }
    Ok(json_response(StatusCode::OK, &head.whole(&choices, answers.usage())))
}
