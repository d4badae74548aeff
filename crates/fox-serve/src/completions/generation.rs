//! All choices of one request, from the engine's events to deltas of text.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use fox_infer::{Event, Refusal, Request, Sampling, ScoredToken, Ticket};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Sleep, sleep};

use super::Prompt;
use super::choice::{Choice, Delta, Entry, Finish, PromptEcho};
use super::constraint::LimitedGrammar;
use super::request::CompletionRequest;
use super::wire::Usage;
use crate::app::App;
use crate::error::{ApiError, ApiResult};
use crate::memory::ByteLease;
use crate::metrics::Outcome;

/// Time until a request that found the engine's queue full is submitted again.
const RETRY: Duration = Duration::from_millis(20);

/// An event of the engine for a choice, or the error that ends the request.
type ChoiceEvent = (usize, ApiResult<Event>);

/// Choices that are being generated. Dropping it frees what the engine holds for them.
///
/// A request for many choices submits as many as can run at a time, and the others as these end: a long list waits
/// here, and leaves room in the engine's queue. Log-probabilities of a prompt are computed by its first choice; the
/// other choices of that prompt are submitted afterwards and find it in the prefix cache.
pub(crate) struct Generation {
    app: Arc<App>,
    request: CompletionRequest,
    grammar: Option<LimitedGrammar>,
    /// One per prompt.
    echoes: Vec<PromptEcho>,
    choices: Vec<Choice>,
    /// Absent before a choice is submitted and after it has ended.
    tickets: Vec<Option<Ticket>>,
    submitted: usize,
    ended: usize,
    /// Whether an error has ended the request.
    failed: bool,
    retry: Option<Pin<Box<Sleep>>>,
    /// For choices that are still to be submitted.
    sender: Option<UnboundedSender<ChoiceEvent>>,
    /// The channel has no limit, because the engine must not wait; its bytes are counted in the lease.
    events: UnboundedReceiver<ChoiceEvent>,
    /// Choices with chunks of their prompt to send.
    echoing: VecDeque<usize>,
    deadline: Pin<Box<Sleep>>,
    start: Instant,
    last_token: Vec<Option<Instant>>,
    usage: Usage,
    /// Bytes of events, entries and texts.
    lease: Arc<ByteLease>,
}

impl Generation {
    /// Submits the choices of a request.
    ///
    /// # Errors
    /// A request that the engine refuses; nothing is submitted then.
    pub fn start(
        app: Arc<App>,
        request: CompletionRequest,
        grammar: Option<LimitedGrammar>,
    ) -> ApiResult<Generation> {
        let (sender, events) = unbounded_channel();
        let count = request.prompts.len() * request.best_of;
        let mut generation = Generation {
            deadline: Box::pin(sleep(app.options.request_time)),
            start: Instant::now(),
            usage: Usage::of_prompts(&request.prompts),
            echoes: Vec::with_capacity(request.prompts.len()),
            choices: Vec::with_capacity(count),
            tickets: (0..count).map(|_| None).collect(),
            last_token: vec![None; count],
            submitted: 0,
            ended: 0,
            failed: false,
            retry: None,
            echoing: VecDeque::new(),
            sender: Some(sender),
            events,
            lease: Arc::new(app.answers.lease()),
            app,
            request,
            grammar,
        };
        let end_ids = generation.end_ids();
        for at in 0..generation.request.prompts.len() {
            let first = at * generation.request.best_of;
            generation.app.engine.check(&generation.engine_request(first))?;
            let (app, request) = (&generation.app, &generation.request);
            let prompt = &request.prompts[at];
            let prompt_chars = match request.logprobs {
                Some(_) => prompt_text(app, prompt)?.chars().count(),
                None => 0,
            };
            let scores = generation.has_prompt_scores();
            let echo = PromptEcho::new(&app.tokenizer, prompt, scores, request.echo)?;
            generation.lease.grow(echo.text.len())?;
            generation.echoes.push(echo);
            for index in first..first + request.best_of {
                let place = (index, prompt_chars);
                let choice = Choice::new(&app.tokenizer, request, end_ids.clone(), place)?;
                generation.choices.push(choice);
            }
        }
        generation.submit()?;
        Ok(generation)
    }

    fn end_ids(&self) -> Vec<i32> {
        let marks = self.app.end_ids.iter().filter(|_| !self.request.ignore_end);
        marks.chain(&self.request.stop_ids).copied().collect()
    }

    /// Whether log-probabilities of the prompts are wanted.
    fn has_prompt_scores(&self) -> bool {
        let request = &self.request;
        request.prompt_logprobs.is_some() || (request.echo && request.logprobs.is_some())
    }

    /// Whether a choice computes the log-probabilities of its prompt.
    fn scores_prompt(&self, index: usize) -> bool {
        self.has_prompt_scores() && index.is_multiple_of(self.request.best_of)
    }

    fn prompt(&self, index: usize) -> &Prompt {
        &self.request.prompts[index / self.request.best_of]
    }

    fn engine_request(&self, index: usize) -> Request {
        let request = &self.request;
        // Every choice of a request has a different seed, also when two prompts of a list are equal.
        let seed = request.sampling.seed.wrapping_add(index as u64);
        let echo = self.scores_prompt(index);
        let prompt_logprobs = request.prompt_logprobs.filter(|_| echo);
        Request {
            prompt: self.prompt(index).ids.clone(),
            max_tokens: request.max_tokens,
            sampling: Sampling { seed, ..request.sampling },
            stop_ids: self.end_ids(),
            // Clients that want log-probabilities expect an entry for every token, the end marker included.
            report_stop: request.logprobs.is_some(),
            min_tokens: request.min_tokens,
            logit_bias: request.logit_bias.clone(),
            top_logprobs: request.logprobs.max(prompt_logprobs).unwrap_or(0),
            echo,
            grammar: self.grammar.as_ref().map(|limited| limited.grammar.clone()),
        }
    }

    /// Submits as many choices as may run; those of a list wait for a free slot, a single one does not.
    fn submit(&mut self) -> ApiResult<()> {
        let most = self.app.engine.options().max_batch;
        self.retry = None;
        while self.submitted < self.choices.len() && self.submitted - self.ended < most {
            let Some(sender) = self.sender.clone() else { break };
            let index = self.submitted;
            let echo = &self.echoes[index / self.request.best_of];
            let is_scored = echo.entries.len() == self.prompt(index).ids.len();
            if self.has_prompt_scores() && !self.scores_prompt(index) && !is_scored {
                return Ok(());
            }
            let lease = self.lease.clone();
            // A receiver that is gone has dropped its tickets, too.
            let sink = move |event| {
                let event = lease.grow(event_bytes(&event)).map(|()| event);
                drop(sender.send((index, event)));
            };
            match self.app.engine.submit_to(self.engine_request(index), sink) {
                Ok(ticket) => self.tickets[index] = Some(ticket),
                Err(Refusal::QueueFull(_)) if self.choices.len() > 1 => {
                    self.retry = Some(Box::pin(sleep(RETRY)));
                    return Ok(());
                }
                Err(refusal) => return Err(refusal.into()),
            }
            self.submitted += 1;
            if self.request.echo && self.request.stream {
                self.echoing.push_back(index);
            }
        }
        if self.submitted == self.choices.len() {
            // From now on the channel ends with the engine.
            self.sender = None;
        }
        Ok(())
    }

    pub fn request(&self) -> &CompletionRequest {
        &self.request
    }

    /// Number of choices.
    pub fn len(&self) -> usize {
        self.choices.len()
    }

    /// Echoes of the prompts, in their order.
    pub fn echoes(&self) -> &[PromptEcho] {
        &self.echoes
    }

    /// Tokens so far.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// Bytes of events, entries and texts.
    pub fn lease(&self) -> &Arc<ByteLease> {
        &self.lease
    }

    /// The next delta; `None` when all choices have ended.
    pub async fn next(&mut self) -> ApiResult<Option<Delta>> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<ApiResult<Option<Delta>>> {
        let next = self.poll_delta(cx);
        self.failed |= matches!(next, Poll::Ready(Err(_)));
        next
    }

    fn poll_delta(&mut self, cx: &mut Context<'_>) -> Poll<ApiResult<Option<Delta>>> {
        loop {
            if let Some(delta) = self.next_echo()? {
                return Poll::Ready(Ok(Some(delta)));
            }
            if self.ended == self.choices.len() {
                self.app.metrics.request_time.observe(self.start.elapsed());
                return Poll::Ready(Ok(None));
            }
            if self.retry.as_mut().is_some_and(|retry| retry.as_mut().poll(cx).is_ready()) {
                self.submit()?;
                continue;
            }
            match self.events.poll_recv(cx) {
                Poll::Ready(Some((index, event))) => match self.take(index, event?) {
                    Ok(delta) if delta.is_silent() && delta.score.0 == 0 => {}
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

    /// The next chunk of an echoed prompt.
    fn next_echo(&mut self) -> ApiResult<Option<Delta>> {
        while let Some(&index) = self.echoing.front() {
            let choice = &mut self.choices[index];
            let echo = &self.echoes[index / self.request.best_of];
            if let Some(mut delta) = echo.chunk(choice.echoed, index) {
                choice.echoed += 1;
                if self.request.logprobs.is_none() {
                    delta.entries.clear();
                }
                // The copies of the entries are released like others.
                self.lease.grow(delta.entries.iter().map(|e| Entry::bytes(e.top.len())).sum())?;
                return Ok(Some(delta));
            }
            self.echoing.pop_front();
        }
        Ok(None)
    }

    fn take(&mut self, index: usize, event: Event) -> ApiResult<Delta> {
        let bytes = event_bytes(&event);
        // An end marker is only reported beside log-probabilities; answers have the same count without them.
        let has_end = self.request.logprobs.is_some();
        let is_end = matches!(&event, Event::Token(t) if has_end && self.end_ids().contains(&t.id));
        let choice = &mut self.choices[index];
        // Tokens may still arrive after a stop string has ended the choice.
        if choice.ended {
            self.lease.shrink(bytes);
            return Ok(Delta::default());
        }
        let delta = match event {
            Event::Prompt(scores) => {
                self.take_prompt_scores(index, scores)?;
                return Ok(Delta::default());
            }
            Event::Token(scored) => {
                let metrics = &self.app.metrics;
                let now = Instant::now();
                if self.usage.completion_tokens == 0 {
                    metrics.first_token_time.observe(now - self.start);
                }
                if let Some(before) = self.last_token[index].replace(now) {
                    metrics.inter_token_time.observe(now - before);
                }
                self.usage.completion_tokens += usize::from(!is_end);
                // Text that may be a tool call is withheld; the bytes of its events count for it.
                if self.request.logprobs.is_none() && self.request.tools.is_none() {
                    self.lease.shrink(bytes);
                }
                choice.push(scored)?
            }
            Event::Finished(finished) => {
                let waited = Duration::try_from_secs_f64(finished.usage.queue_s);
                self.app.metrics.queue_time.observe(waited.unwrap_or_default());
                choice.finish(&finished.reason)?
            }
            _ => Delta::default(),
        };
        if choice.ended {
            // Cancels the rest in the engine when a stop string has ended the choice.
            self.tickets[index] = None;
            self.ended += 1;
            let outcome = match delta.finish {
                Some(Finish::Length) => Outcome::Length,
                _ => Outcome::Stop,
            };
            self.app.metrics.count_outcome(outcome, 1);
            self.submit()?;
        }
        Ok(delta)
    }

    fn take_prompt_scores(&mut self, index: usize, scores: Vec<ScoredToken>) -> ApiResult<()> {
        let at = index / self.request.best_of;
        let (prompt, echo) = (&self.request.prompts[at], &mut self.echoes[at]);
        let before = echo.text.len();
        echo.extend(prompt, scores, self.request.echo)?;
        self.lease.grow(echo.text.len() - before)?;
        let is_complete = echo.entries.len() == prompt.ids.len();
        if self.request.echo && self.request.stream {
            self.echoing.push_back(index);
        }
        if is_complete { self.submit() } else { Ok(()) }
    }
}

/// Counts the choices that did not end.
impl Drop for Generation {
    fn drop(&mut self) {
        let outcome = if self.failed { Outcome::Error } else { Outcome::Abort };
        self.app.metrics.count_outcome(outcome, self.submitted - self.ended);
    }
}

/// The text of a prompt as the model sees it.
fn prompt_text(app: &App, prompt: &Prompt) -> ApiResult<String> {
    let ids: Vec<u32> = prompt.ids[prompt.marks..].iter().map(|&id| id as u32).collect();
    Ok(app.tokenizer.decode(&ids)?)
}

/// Bytes of memory that an event takes, and the entries that are made of it.
fn event_bytes(event: &Event) -> usize {
    match event {
        Event::Prompt(scores) => scores.iter().map(|scored| Entry::bytes(scored.top.len())).sum(),
        Event::Token(scored) => Entry::bytes(scored.top.len()),
        _ => 0,
    }
}
