//! All answers to one request, as they come.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use fox_infer::{Event, Refusal, Request, Sampling, Ticket};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Sleep, sleep};

use super::choice::{Choice, Delta};
use super::request::CompletionRequest;
use super::wire::Usage;
use crate::app::App;
use crate::error::{ApiError, ApiResult};

/// How soon a place in the engine's queue is asked for again.
const ASK_AGAIN: Duration = Duration::from_millis(20);

/// Generation that are being made. Dropping them frees what the engine holds for them.
///
/// A request for many answers asks the engine for as many as can run at a time, and for the others as these
/// end: a long list waits here, and leaves room in the engine's queue.
pub(crate) struct Generation {
    app: Arc<App>,
    request: CompletionRequest,
    choices: Vec<Choice>,
    /// The right to each answer; absent before it was asked for and after it has ended.
    tickets: Vec<Option<Ticket>>,
    /// Generation that the engine was asked for; those after them wait.
    asked: usize,
    /// Generation that have ended.
    ended: usize,
    /// When to ask for a place that there was not.
    again: Option<Pin<Box<Sleep>>>,
    /// For the answers that are still to be asked for.
    sender: Option<UnboundedSender<(usize, Event)>>,
    /// Which answer, and what happened to it. The channel has no limit, because the engine must not wait;
    /// what it holds is limited by `max_tokens` and by how long a client may be slow.
    events: UnboundedReceiver<(usize, Event)>,
    ready: VecDeque<Delta>,
    deadline: Pin<Box<Sleep>>,
    since: Instant,
    /// When the last token of each answer came.
    last_token: Vec<Option<Instant>>,
    usage: Usage,
}

impl Generation {
    /// Asks the engine for what the request wants, or for nothing.
    pub fn ask(app: Arc<App>, request: CompletionRequest) -> ApiResult<Generation> {
        let (sender, events) = unbounded_channel();
        let count = request.prompts.len() * request.best_of;
        let mut answers = Generation {
            deadline: Box::pin(sleep(app.options.request_time)),
            since: Instant::now(),
            usage: Usage::of_prompts(&request.prompts),
            choices: Vec::with_capacity(count),
            tickets: (0..count).map(|_| None).collect(),
            last_token: vec![None; count],
            asked: 0,
            ended: 0,
            again: None,
            ready: VecDeque::new(),
            sender: Some(sender),
            events,
            app,
            request,
        };
        for index in 0..count {
            if index % answers.request.best_of == 0 {
                answers.app.engine.check(&answers.engine_request(index))?;
            }
            let choice = Choice::new(&answers.app, &answers.request, answers.end_ids(), index)?;
            if answers.request.echo && answers.request.logprobs.is_none() {
                answers.ready.push_back(choice.echo(&answers.app, &answers.request, &[])?);
            }
            answers.choices.push(choice);
        }
        answers.submit()?;
        Ok(answers)
    }

    /// Ids that end an answer.
    fn end_ids(&self) -> Vec<i32> {
        let marks = self.app.end_ids.iter().filter(|_| !self.request.ignore_end);
        marks.chain(&self.request.stop_ids).copied().collect()
    }

    fn engine_request(&self, index: usize) -> Request {
        let request = &self.request;
        let seed = request.sampling.seed.wrapping_add((index % request.best_of) as u64);
        Request {
            prompt: request.prompts[index / request.best_of].ids.clone(),
            max_tokens: request.max_tokens,
            sampling: Sampling { seed, ..request.sampling },
            stop_ids: self.end_ids(),
            // Whoever wants log-probabilities counts on an entry for every token, the end marker included.
            report_stop: request.logprobs.is_some(),
            min_tokens: request.min_tokens,
            logit_bias: request.logit_bias.clone(),
            top_logprobs: request.logprobs.max(request.prompt_logprobs).unwrap_or(0),
            echo: request.prompt_logprobs.is_some() || (request.echo && request.logprobs.is_some()),
        }
    }

    /// Asks for as many answers as may run; those of a list wait for a place, a single one does not.
    fn submit(&mut self) -> ApiResult<()> {
        let most = self.app.engine.options().max_batch;
        self.again = None;
        while self.asked < self.choices.len() && self.asked - self.ended < most {
            let Some(sender) = self.sender.clone() else { break };
            let index = self.asked;
            // A receiver that is gone has dropped its tickets, too.
            let sink = move |event| drop(sender.send((index, event)));
            match self.app.engine.submit_to(self.engine_request(index), sink) {
                Ok(ticket) => self.tickets[index] = Some(ticket),
                Err(Refusal::QueueFull(_)) if self.choices.len() > 1 => {
                    self.again = Some(Box::pin(sleep(ASK_AGAIN)));
                    return Ok(());
                }
                Err(refusal) => return Err(refusal.into()),
            }
            self.asked += 1;
        }
        if self.asked == self.choices.len() {
            // From now on the channel ends with the engine.
            self.sender = None;
        }
        Ok(())
    }

    /// What was asked for.
    pub fn request(&self) -> &CompletionRequest {
        &self.request
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
            if self.ended == self.choices.len() {
                self.app.metrics.request_time.observe(self.since.elapsed());
                return Poll::Ready(Ok(None));
            }
            if self.again.as_mut().is_some_and(|again| again.as_mut().poll(cx).is_ready()) {
                self.submit()?;
                continue;
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
            Event::Prompt(scores) => choice.echo(&self.app, &self.request, &scores)?,
            Event::Token(scored) => {
                let metrics = &self.app.metrics;
                let now = Instant::now();
                if self.usage.completion_tokens == 0 {
                    metrics.first_token_time.observe(now - self.since);
                }
                if let Some(before) = self.last_token[index].replace(now) {
                    metrics.inter_token_time.observe(now - before);
                }
                self.usage.completion_tokens += 1;
                choice.push(&self.app, &scored)?
            }
            Event::Finished(finished) => {
                let waited = Duration::try_from_secs_f64(finished.usage.queue_s);
                self.app.metrics.queue_time.observe(waited.unwrap_or_default());
                choice.finish(&finished.reason)?
            }
        };
        if choice.ended {
            self.tickets[index] = None;
            self.ended += 1;
            self.submit()?;
        }
        Ok(delta)
    }
}
