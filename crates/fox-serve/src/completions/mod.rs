//! `/v1/completions` and `/v1/chat/completions`: from JSON to the engine and back, complete or as events.

mod choice;
mod events;
mod generation;
mod prompt;
mod request;
mod wire;

pub(crate) use events::Events;
pub(crate) use prompt::{Prompt, id_list};
pub(crate) use request::Kind;

use std::sync::Arc;

use hyper::Response;
use hyper::body::Bytes;

use crate::app::App;
use crate::body::{Body, ReceivedBody, chunked_json_response, event_response};
use crate::error::ApiResult;
use crate::memory::LeasedWriter;
use generation::Generation;
use request::CompletionRequest;
use wire::{Envelope, FullChoice};

/// Answers a request.
pub(crate) async fn complete(
    app: Arc<App>,
    kind: Kind,
    body: ReceivedBody,
) -> ApiResult<Response<Body>> {
    let request =
        app.parse(body, move |app, body| CompletionRequest::parse(app, kind, body)).await?;
    let envelope = Envelope::new(&app, kind, request.logprobs);
    let (unknown, is_stream) = (request.unknown.clone(), request.stream);
    let shared = app.clone();
    let generation = app.text.spawn(async move { Generation::start(shared, request) })?.await??;
    let response = match is_stream {
        true => event_response(Events::start(&app.text, generation, envelope)?),
        false => {
            let answer = app.text.spawn(full_answer(generation, envelope))?;
            chunked_json_response(answer.await??)
        }
    };
    Ok(unknown.report(response))
}

/// The JSON of all choices, once all have ended.
async fn full_answer(mut generation: Generation, envelope: Envelope) -> ApiResult<Vec<Bytes>> {
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
    let answer = LeasedWriter::json(&lease, &envelope.full(&choices, &generation));
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
