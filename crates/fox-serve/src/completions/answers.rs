//! All answers to one request, as they come.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use fox_infer::{Event, Request, Sampling, Ticket};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::{Sleep, sleep};

use super::Prompt;
use super::choice::{Choice, Delta};
use super::request::CompletionRequest;
use super::wire::Usage;
use crate::app::App;
use crate::error::{ApiError, ApiResult};

/// Answers that are being made. Dropping them frees what the engine holds for them.
pub(crate) struct Answers {
    app: Arc<App>,
    prompts: Vec<Prompt>,
    /// Answers per prompt.
    n: usize,
    choices: Vec<Choice>,
    /// The right to each answer; gone when it has ended.
    tickets: Vec<Option<Ticket>>,
    /// Which answer, and what happened to it. The channel has no limit, because the engine must not wait;
    /// what it holds is limited by `max_tokens` and by how long a client may be slow.
    events: UnboundedReceiver<(usize, Event)>,
    ready: VecDeque<Delta>,
    deadline: Pin<Box<Sleep>>,
    asked: Instant,
    usage: Usage,
}

impl Answers {
    /// Asks the engine for everything that the request wants, or for nothing.
    pub fn ask(app: Arc<App>, request: CompletionRequest) -> ApiResult<Answers> {
        let (sender, events) = unbounded_channel();
        let (mut choices, mut tickets, mut ready) = (Vec::new(), Vec::new(), VecDeque::new());
        // The engine keeps the marker that ends an answer to itself, but whoever wants log-probabilities
        // counts on an entry for every token.
        let (ends, none) = (&app.end_ids[..], &[][..]);
        let (engine_ends, told_ends) = match (request.ignore_end, request.logprobs) {
            (true, _) => (none, none),
            (false, None) => (ends, none),
            (false, Some(_)) => (none, ends),
        };
        let scored_echo = request.echo && request.logprobs.is_some();
        for prompt in &request.prompts {
            for i in 0..request.n {
                let index = choices.len();
                let seed = request.sampling.seed.wrapping_add(i as u64);
                let sender = sender.clone();
                let ticket = app.engine.submit_to(
                    Request {
                        prompt: prompt.ids.clone(),
                        max_tokens: request.max_tokens,
                        sampling: Sampling { seed, ..request.sampling },
                        stop_ids: engine_ends.to_vec(),
                        top_logprobs: request.logprobs.unwrap_or(0),
                        echo: scored_echo,
                    },
                    // A receiver that is gone has dropped its tickets, too.
                    move |event| drop(sender.send((index, event))),
                )?;
                let choice = Choice::new(&app, prompt, &request, told_ends, index)?;
                if request.echo && !scored_echo {
                    ready.push_back(choice.echo(&app, prompt, &[])?);
                }
                choices.push(choice);
                tickets.push(Some(ticket));
            }
        }
        let usage = Usage::of_prompts(&request.prompts);
        Ok(Answers {
            deadline: Box::pin(sleep(app.options.request_time)),
            asked: Instant::now(),
            n: request.n,
            prompts: request.prompts,
            app,
            choices,
            tickets,
            events,
            ready,
            usage,
        })
    }

    /// Number of answers.
    pub fn len(&self) -> usize {
        self.choices.len()
    }

    /// Tokens so far.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// What is new; `None` when all answers have ended.
    pub async fn next(&mut self) -> ApiResult<Option<Delta>> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<ApiResult<Option<Delta>>> {
        loop {
            if let Some(delta) = self.ready.pop_front() {
                return Poll::Ready(Ok(Some(delta)));
            }
            if self.tickets.iter().all(Option::is_none) {
                self.app.metrics.request_time.observe(self.asked.elapsed());
                return Poll::Ready(Ok(None));
            }
            match self.events.poll_recv(cx) {
                Poll::Ready(Some((index, event))) => match self.take(index, event) {
                    Ok(delta) if delta.is_empty() => {}
                    Ok(delta) => return Poll::Ready(Ok(Some(delta))),
                    Err(error) => return Poll::Ready(Err(error)),
                },
                Poll::Ready(None) => {
                    return Poll::Ready(Err(ApiError::internal("the engine has ended")));
                }
                Poll::Pending if self.deadline.as_mut().poll(cx).is_ready() => {
                    return Poll::Ready(Err(ApiError::late(self.app.options.request_time)));
                }
                Poll::Pending => return Poll::Pending,
            }
        }
    }

    fn take(&mut self, index: usize, event: Event) -> ApiResult<Delta> {
        let choice = &mut self.choices[index];
        // Tokens may still be on their way when a stop string has ended the answer.
        if choice.ended {
            return Ok(Delta::default());
        }
        let delta = match event {
            Event::Prompt(scores) => {
                choice.echo(&self.app, &self.prompts[index / self.n], &scores)?
            }
            Event::Token(scored) => {
                if self.usage.completion_tokens == 0 {
                    self.app.metrics.first_token_time.observe(self.asked.elapsed());
                }
                self.usage.completion_tokens += 1;
                choice.push(&self.app, &scored)?
            }
            Event::Finished(finished) => choice.finish(&finished.reason)?,
        };
        if choice.ended {
            self.tickets[index] = None;
        }
        Ok(delta)
    }
}
