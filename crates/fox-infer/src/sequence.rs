//! An admitted request: its KV cache, sampler and progress.

use std::sync::atomic::Ordering;
use std::time::Instant;

use fox_cache::{Cache, SequenceState};
use fox_tensor::{PAGE, RowToken, SampledToken, TokenDraw};

use crate::engine::QueuedRequest;
use crate::resident::StepRow;
use crate::sampler::{Sampler, broken_logits};
use crate::scores::score;
use crate::{CacheUsage, Event, FinishReason, Finished, ScoredToken, Usage};

/// The result of a decode step for one sequence.
#[derive(Debug)]
pub(crate) enum Next {
    /// Logits of all tokens `[V]`.
    Logits(Vec<f32>),
    /// The token sampled on the device, for requests that need no logits.
    Token(SampledToken),
}

/// An admitted request.
pub(crate) struct Sequence {
    queued: QueuedRequest,
    /// Admission order: the youngest is preempted first.
    pub arrival: u64,
    /// Bytes that it is known to need, once it was preempted for lack of them.
    pub need: usize,
    /// Prompt tokens whose scores were reported, from the second token on.
    scored: usize,
    sampler: Sampler,
    /// Absent while a step uses it, and while preempted.
    pub cache: Option<SequenceState>,
    /// Prompt tokens in the cache.
    pub read: usize,
    /// Tokens sampled so far.
    answer: Vec<i32>,
    /// Tokens of `answer` that finished steps have fed to the cache.
    fed: usize,
    /// Its row in the unfinished step in slots that was begun last.
    pub row: Option<StepRow>,
    usage: Usage,
    started: Instant,
    prefilled: Option<Instant>,
    /// Set when the request has ended.
    pub ended: Option<FinishReason>,
}

impl Sequence {
    pub fn new(queued: QueuedRequest, cache: Cache, arrival: u64) -> Self {
        let started = Instant::now();
        let usage = Usage {
            prompt_tokens: queued.request.prompt.len(),
            queue_s: (started - queued.submitted).as_secs_f64(),
            ..Usage::default()
        };
        Sequence {
            sampler: Sampler::new(&queued.request),
            queued,
            arrival,
            need: 0,
            scored: 0,
            cache: Some(cache.into()),
            read: 0,
            answer: Vec::new(),
            fed: 0,
            row: None,
            usage,
            started,
            prefilled: None,
            ended: None,
        }
    }

    pub fn is_cancelled(&self) -> bool {
        self.queued.cancelled.load(Ordering::Relaxed)
    }

    pub fn prompt(&self) -> &[i32] {
        &self.queued.request.prompt
    }

    /// Whether scores of the prompt remain to be reported.
    pub fn echoes(&self) -> bool {
        self.queued.request.echo && self.scored + 1 < self.prompt().len()
    }

    /// Frees the cache. After the request is resumed, the prompt is prefilled again and the answer's tokens are fed one by
    /// one, as in the first pass, so that the bits are the same.
    pub fn preempt(&mut self) {
        self.cache = None;
        (self.read, self.fed) = (0, 0);
    }

    /// Prompt tokens left to prefill.
    pub fn unread(&self) -> usize {
        match self.ended {
            None => self.prompt().len() - self.read,
            Some(_) => 0,
        }
    }

    /// The input token of the decode step to be finished next, once the prompt is complete.
    pub fn next(&self) -> Option<i32> {
        let ready = self.ended.is_none() && self.read == self.prompt().len();
        self.answer.get(self.fed).copied().filter(|_| ready)
    }

    /// The input of the decode step to begin next; `None` also when the unfinished step is the last one.
    pub fn input(&self) -> Option<RowToken> {
        let Some(StepRow { row, .. }) = self.row else { return self.next().map(RowToken::Id) };
        match self.answer.get(self.fed + 1) {
            _ if self.ended.is_some() => None,
            Some(id) => Some(RowToken::Id(*id)),
            None => (self.answer.len() + 1 < self.queued.request.max_tokens)
                .then_some(RowToken::Sampled(row)),
        }
    }

    /// Whether sampling needs the logits on the host.
    pub fn needs_logits(&self) -> bool {
        !self.sampler.is_plain() || self.queued.request.top_logprobs > 0
    }

    /// Sampling parameters for the device, if it samples the token of the step to begin next.
    pub fn draw(&mut self) -> Option<TokenDraw> {
        // A step that repeats an earlier one samples nothing.
        let repeats = self.fed + usize::from(self.row.is_some()) + 1 < self.answer.len();
        if repeats || self.needs_logits() { None } else { self.sampler.draw_on_device() }
    }

    /// Takes the logits of a decode step; returns whether a token was sampled.
    pub fn stepped(&mut self, logits: &[f32]) -> bool {
        self.fed += 1;
        self.take(logits)
    }

    /// As [`Sequence::stepped`] for a step in slots.
    pub fn stepped_to(&mut self, next: &Next) -> bool {
        match next {
            Next::Logits(logits) => self.stepped(logits),
            Next::Token(choice) => {
                self.fed += 1;
                let scored = |id| ScoredToken { id, logprob: choice.logprob, top: Vec::new() };
                self.take_chosen(|_| choice.id.ok_or_else(broken_logits), scored)
            }
        }
    }

    /// Ends the request with an error.
    pub fn fail(&mut self, message: String) {
        self.ended = Some(FinishReason::Failed(message));
    }

    /// Upper bound on the tokens of prompt and answer.
    pub fn tokens(&self) -> usize {
        self.queued.request.prompt.len() + self.queued.request.max_tokens
    }

    /// Its cache, and the length of that after the next decode step or prefill chunk.
    pub fn demand(&self, chunk: usize) -> Option<(&SequenceState, usize)> {
        let cache = self.cache.as_ref()?;
        let next = if self.next().is_some() { 1 } else { self.unread().min(chunk) };
        Some((cache, cache.len() + next))
    }

    /// Starts from a cached state after the first `len` tokens of the prompt.
    pub fn share(&mut self, cache: Cache, len: usize) {
        self.cache = Some(cache.into());
        self.read = len;
        self.usage.shared_tokens = len;
    }

    /// Reports the scores of the prompt tokens that follow position `first`, from `logits: [rows, vocab]`. Scores that
    /// were reported before a preemption are not repeated.
    pub fn score_prompt(&mut self, first: usize, logits: &[f32], vocab: usize) {
        let request = &self.queued.request;
        let end = request.prompt.len().min(self.read + 1);
        let targets = &request.prompt[first + 1..end];
        let reported = self.scored.saturating_sub(first);
        let rows = logits.chunks(vocab).zip(targets).skip(reported);
        let scores: Vec<ScoredToken> =
            rows.map(|(row, &id)| score(row, id, request.top_logprobs)).collect();
        if !scores.is_empty() {
            self.scored = end - 1;
            (self.queued.sink)(Event::Prompt(scores));
        }
    }

    /// Samples a token from a row of logits and reports it; returns whether there was one.
    pub fn take(&mut self, logits: &[f32]) -> bool {
        let top_logprobs = self.queued.request.top_logprobs;
        let choose = |sampler: &mut Sampler| sampler.sample(logits);
        self.take_chosen(choose, |id| score(logits, id, top_logprobs))
    }

    /// As [`Sequence::take`], with a function that samples and one that scores.
    fn take_chosen(
        &mut self,
        choose: impl FnOnce(&mut Sampler) -> Result<i32, FinishReason>,
        scored: impl FnOnce(i32) -> ScoredToken,
    ) -> bool {
        self.prefilled.get_or_insert_with(Instant::now);
        // Tokens sampled before a preemption are not sampled again.
        if self.fed < self.answer.len() {
            return false;
        }
        let request = &self.queued.request;
        if self.answer.len() == request.max_tokens {
            self.ended = Some(FinishReason::Length);
            return false;
        }
        let id = match choose(&mut self.sampler) {
            Ok(id) => id,
            Err(reason) => {
                self.ended = Some(reason);
                return false;
            }
        };
        if request.stop_ids.contains(&id) {
            self.ended = Some(FinishReason::Stop);
            if !request.report_stop {
                return false;
            }
        }
        self.answer.push(id);
        (self.queued.sink)(Event::Token(scored(id)));
        if self.sampler.is_complete() {
            self.ended = Some(FinishReason::Stop);
        }
        if self.answer.len() == request.max_tokens && self.ended.is_none() {
            self.ended = Some(FinishReason::Length);
        }
        true
    }

    /// Reports the end of the request.
    pub fn finish(mut self) {
        let Some(reason) = self.ended.take() else { return };
        let seconds = |from: Instant, to: Instant| (to - from).as_secs_f64();
        let now = Instant::now();
        let prefilled = self.prefilled.unwrap_or(now);
        let usage = Usage {
            generated_tokens: self.answer.len(),
            prefill_s: seconds(self.started, prefilled),
            decode_s: seconds(prefilled, now),
            ..self.usage
        };
        let cache = self.cache.as_ref().map_or_else(CacheUsage::default, cache_use);
        (self.queued.sink)(Event::Finished(Box::new(Finished { reason, usage, cache })));
    }
}

fn cache_use(cache: &SequenceState) -> CacheUsage {
    let usage = cache.usage();
    let dropped = |layer: &Vec<(usize, usize)>| layer.iter().map(|(_, dropped)| *dropped).collect();
    CacheUsage {
        tokens: usage.tokens,
        bytes: usage.bytes,
        full_bytes: usage.full_bytes,
        page_tokens: PAGE,
        evicted_pages: cache.page_counts().iter().map(dropped).collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    use super::*;
    use crate::Request;

    #[test]
    fn preempted_prompt_is_scored_once() {
        let (sender, events) = channel();
        let queued = QueuedRequest {
            request: Request { echo: true, ..Request::greedy(vec![0, 1, 0, 1], 1) },
            sink: Box::new(move |event| drop(sender.send(event))),
            cancelled: Arc::default(),
            submitted: Instant::now(),
            passed: 0,
        };
        let cache = Cache::new([], 1, 1, &fox_cpu::device()).unwrap();
        let mut running = Sequence::new(queued, cache, 0);
        let row = [0.0, 1.0];
        running.read = 2;
        running.score_prompt(0, &row.repeat(2), 2);
        // After half of its prompt.
        running.preempt();
        for (first, read) in [(0, 2), (2, 4)] {
            running.read = read;
            running.score_prompt(first, &row.repeat(2), 2);
        }
        let scores = events.try_iter().filter_map(|event| match event {
            Event::Prompt(scores) => Some(scores),
            _ => None,
        });
        let ids: Vec<i32> = scores.flatten().map(|scored| scored.id).collect();
        assert_eq!(ids, [1, 0, 1]);
    }
}
