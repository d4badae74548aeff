//! `/v1/completions` and `/v1/chat/completions`: from JSON to the engine and back, whole or as events.

mod choice;
mod events;
mod generation;
mod prompt;
mod request;
mod wire;

pub(crate) use events::Events;
pub(crate) use prompt::{Prompt, longest_token};
pub(crate) use request::Kind;

use std::sync::Arc;

use hyper::body::Bytes;
use hyper::{Response, StatusCode};

use crate::app::App;
use crate::body::{Body, event_response, json_response};
use crate::error::ApiResult;
use generation::Generation;
use request::CompletionRequest;
use wire::{FullChoice, Head};

/// Generation a request.
pub(crate) async fn complete(app: Arc<App>, kind: Kind, body: Bytes) -> ApiResult<Response<Body>> {
    let request =
        app.parse(body, move |app, body| CompletionRequest::parse(app, kind, body)).await?;
    let head = Head::new(&app.name, kind);
    let unknown = request.unknown.clone();
    let stream = request.stream;
    let mut answers = Generation::ask(app, request)?;
    if stream {
        return Ok(unknown.tell(event_response(Events::new(answers, head))));
    }
    let mut choices: Vec<FullChoice> = (0..answers.len()).map(FullChoice::new).collect();
    while let Some(delta) = answers.next().await? {
        choices[delta.index].add(delta);
    }
    let usage = answers.usage();
    let (n, best_of) = (answers.request().n, answers.request().best_of);
    let choices = best(choices, n, best_of);
    Ok(unknown.tell(json_response(StatusCode::OK, &head.whole(&choices, usage))))
}

/// The `n` answers of every `best_of` with the largest mean log-probability, best first; all in order when
/// there is nothing to choose.
fn best(mut choices: Vec<FullChoice>, n: usize, best_of: usize) -> Vec<FullChoice> {
    if n == best_of {
        return choices;
    }
    let mut kept = Vec::new();
    while !choices.is_empty() {
        let mut group: Vec<FullChoice> = choices.drain(..best_of).collect();
        group.sort_by(|a, b| b.mean_logprob().total_cmp(&a.mean_logprob()));
        kept.extend(group.into_iter().take(n));
    }
    kept.iter_mut().enumerate().for_each(|(index, choice)| choice.set_index(index));
    kept
}
