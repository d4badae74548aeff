//! `/v1/completions`, `/v1/chat/completions`, `/v1/responses` and `/v1/messages`: from JSON to the engine and back,
//! complete or as events.

mod choice;
mod constraint;
mod events;
mod format;
mod generation;
mod messages;
mod prompt;
mod request;
mod responses;
mod tools;
mod wire;

pub(crate) use events::Events;
pub(crate) use prompt::{Prompt, id_list};
pub(crate) use request::Kind;
#[cfg(test)]
pub(crate) use {
    messages::{IGNORED_MESSAGES, SAME_MESSAGES},
    request::IGNORED,
    responses::{IGNORED_RESPONSES, SAME_RESPONSES},
};

use std::sync::Arc;

use hyper::Response;
use hyper::body::Bytes;

use crate::app::App;
use crate::body::{Body, ReceivedBody, chunked_json_response, event_response};
use crate::error::ApiResult;
use format::AnswerFormat;
use generation::Generation;
use messages::MessageFormat;
use request::CompletionRequest;
use responses::ResponseFormat;
use wire::{Envelope, FullChoice};

/// Answers a request.
pub(crate) async fn complete(
    app: Arc<App>,
    kind: Kind,
    body: ReceivedBody,
) -> ApiResult<Response<Body>> {
    let mut request =
        app.parse(body, move |app, body| CompletionRequest::parse(app, kind, body)).await?;
    let grammar = match request.constraint.take() {
        Some(constraint) => Some(constraint.compile(&app).await?),
        None => None,
    };
    let format: Box<dyn AnswerFormat> = match kind {
        Kind::Text | Kind::Chat => Box::new(Envelope::new(&app, kind, request.logprobs)),
        Kind::Responses => Box::new(ResponseFormat::new(&app)),
        Kind::Messages => Box::new(MessageFormat::new(&app)),
    };
    let (unknown, is_stream) = (request.unknown.clone(), request.stream);
    let shared = app.clone();
    let generation =
        app.text.spawn(async move { Generation::start(shared, request, grammar) })?.await??;
    let response = match is_stream {
        true => event_response(Events::start(&app.text, generation, format)?),
        false => {
            let answer = app.text.spawn(full_answer(generation, format))?;
            chunked_json_response(answer.await??)
        }
    };
    Ok(unknown.report(response))
}

/// The JSON of all choices, once all have ended.
async fn full_answer(
    mut generation: Generation,
    format: Box<dyn AnswerFormat>,
) -> ApiResult<Vec<Bytes>> {
    let request = generation.request();
    let (n, best_of) = (request.n, request.best_of);
    let choice = |index: usize| FullChoice::new(index, index / best_of);
    let mut choices: Vec<FullChoice> = (0..generation.len()).map(choice).collect();
    while let Some(delta) = generation.next().await? {
        generation.lease().grow(delta.text.len())?;
        choices[delta.index].add(delta);
    }
    let choices = best(choices, n, best_of);
    let lease = generation.lease().clone();
    let held = lease.bytes();
    let answer = format.full(&choices, &generation);
    // The answer returns its bytes as it is sent; what it was made of is returned here.
    drop((choices, generation));
    lease.shrink(held);
    answer
}

/// The `n` choices of every `best_of` with the largest mean log-probability, best first; all in order when
/// there is nothing to select.
fn best(mut choices: Vec<FullChoice>, n: usize, best_of: usize) -> Vec<FullChoice> {
    if n == best_of {
        return choices;
    }
    let mut selected = Vec::new();
    while !choices.is_empty() {
        let mut group: Vec<FullChoice> = choices.drain(..best_of).collect();
        group.sort_by(|a, b| b.mean_logprob().total_cmp(&a.mean_logprob()));
        selected.extend(group.into_iter().take(n));
    }
    selected.iter_mut().enumerate().for_each(|(index, choice)| choice.set_index(index));
    selected
}

#[cfg(test)]
mod tests {
    use super::choice::Delta;
    use super::*;

    /// Choices of different lengths: the sum of log-probabilities would prefer the short one.
    #[test]
    fn best_of_compares_means() {
        let choice = |index: usize, score: (usize, f64)| {
            let mut choice = FullChoice::new(index, 0);
            choice.add(Delta { index, score, text: format!("{index}"), ..Delta::default() });
            choice
        };
        let scores = [(2, -4.0), (6, -6.0), (1, -3.0), (0, 0.0)];
        let choices = scores.into_iter().enumerate().map(|(i, score)| choice(i, score)).collect();
        let texts: Vec<String> =
            best(choices, 3, 4).iter().map(|choice| choice.text().to_string()).collect();
        assert_eq!(texts, ["1", "0", "2"]);
    }
}
