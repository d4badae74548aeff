//! One request that has a cache.

use std::sync::atomic::Ordering;
use std::time::Instant;

use fox_cache::Cache;
use fox_tensor::{Choice, PAGE, StreamDraw};

use crate::engine::QueuedRequest;
use crate::resident::Slot;
use crate::sampler::Sampler;
use crate::scores::score;
use crate::{CacheUsage, Event, FinishReason, Finished, ScoredToken, Usage};

/// What a step says about the next token.
#[derive(Debug)]
pub(crate) enum Next {
    /// Logits of all tokens `[V]`.
    Logits(Vec<f32>),
    /// The token itself, for requests that want no more.
    Choice(Choice),
}

pub(crate) struct Sequence {
    queued: QueuedRequest,
    /// Its place in the order of requests: the last one is the first to be put back.
    pub arrival: u64,
    /// Bytes that it is known to need, once it was put back for lack of them.
    pub need: usize,
    /// Prompt tokens whose scores were reported, from the second token on.
    scored: usize,
    sampler: Sampler,
    /// Absent only while a step has it.
    pub cache: Option<Cache>,
    /// Where its state is on the device, once it decodes there.
    pub slot: Option<Slot>,
    /// Prompt tokens that the cache has.
    pub read: usize,
    /// Tokens chosen so far.
    answer: Vec<i32>,
    /// Those of them that the cache has.
    fed: usize,
    /// Tokens that were chosen on the device and are not reported yet; see [`Sequence::report`].
    pending: Vec<ScoredToken>,
    usage: Usage,
    started: Instant,
    prefilled: Option<Instant>,
    /// Why it is over, once it is.
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
            cache: Some(cache),
            slot: None,
            read: 0,
            answer: Vec::new(),
            fed: 0,
            pending: Vec::new(),
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

    /// Whether the scores of the prompt are still to be reported.
    pub fn echoes(&self) -> bool {
        self.queued.request.echo && self.scored + 1 < self.prompt().len()
    }

    /// Gives up its cache. What was reported stays so: the prompt is read again, and the answer's tokens are fed
    /// again one by one, in steps like those before, so that the bits are the same.
    pub fn preempt(&mut self) {
        self.report();
        (self.cache, self.slot) = (None, None);
        (self.read, self.fed) = (0, 0);
    }

    /// Tokens of the prompt that are still to be read.
    pub fn unread(&self) -> usize {
        match self.ended {
            None => self.prompt().len() - self.read,
            Some(_) => 0,
        }
    }

    /// The token that the next step feeds, once the prompt is read.
    pub fn next(&self) -> Option<i32> {
        let ready = self.ended.is_none() && self.read == self.prompt().len();
        self.answer.get(self.fed).copied().filter(|_| ready)
    }

    /// Whether a choice needs the logits of all tokens.
    pub fn needs_logits(&self) -> bool {
        !self.sampler.is_plain() || self.queued.request.top_logprobs > 0
    }

    /// How a device draws the token after the next step, if it is to draw one.
    pub fn draw(&mut self) -> Option<StreamDraw> {
        // A step that repeats an earlier one chooses nothing.
        let repeats = self.fed + 1 < self.answer.len();
        if repeats || self.needs_logits() { None } else { self.sampler.draw_on_device() }
    }

    /// The step that fed the token is over, with these logits; whether a token was chosen.
    pub fn stepped(&mut self, logits: &[f32]) -> bool {
        self.fed += 1;
        self.take(logits)
    }

    /// The same for a step on the device. The token is reported later, while the next step runs.
    pub fn stepped_to(&mut self, next: &Next) -> bool {
        match next {
            Next::Logits(logits) => self.stepped(logits),
            Next::Choice(choice) => {
                self.fed += 1;
                let scored = |id| ScoredToken { id, logprob: choice.logprob, top: Vec::new() };
                self.take_chosen(|_| choice.id, scored)
            }
        }
    }

    /// Tells the client of the tokens that it does not know yet.
    pub fn report(&mut self) {
        for scored in self.pending.drain(..) {
            (self.queued.sink)(Event::Token(scored));
        }
    }

    /// Tokens of prompt and answer, at most.
    pub fn tokens(&self) -> usize {
        self.queued.request.prompt.len() + self.queued.request.max_tokens
    }

    /// Its cache, and the tokens that this has after the next step of a decoding sequence or of a prompt that is
    /// read in pieces.
    pub fn demand(&self, piece: usize) -> Option<(&Cache, usize)> {
        let cache = self.cache.as_ref()?;
        let next = if self.next().is_some() { 1 } else { self.unread().min(piece) };
        Some((cache, cache.lens()[0] + next))
    }

    /// Goes on from a state after the first `len` tokens of the prompt.
    pub fn share(&mut self, cache: Cache, len: usize) {
        self.cache = Some(cache);
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

    /// Chooses and reports the token after a row of logits; whether there was one.
    pub fn take(&mut self, logits: &[f32]) -> bool {
        let top_logprobs = self.queued.request.top_logprobs;
        let choose = |sampler: &mut Sampler| sampler.choose(logits);
        let taken = self.take_chosen(choose, |id| score(logits, id, top_logprobs));
        self.report();
        taken
    }

    /// [`Sequence::take`] with a choice, and the score of the token chosen, which is not reported yet.
    fn take_chosen(
        &mut self,
        choose: impl FnOnce(&mut Sampler) -> Option<i32>,
        scored: impl FnOnce(i32) -> ScoredToken,
    ) -> bool {
        self.prefilled.get_or_insert_with(Instant::now);
        // What was chosen before it was put back is not chosen again.
        if self.fed < self.answer.len() {
            return false;
        }
        let request = &self.queued.request;
        if self.answer.len() == request.max_tokens {
            self.ended = Some(FinishReason::Length);
            return false;
        }
        let Some(id) = choose(&mut self.sampler) else {
            let words = "the model's logits are not numbers";
            self.ended = Some(FinishReason::Failed(words.into()));
            return false;
        };
        if request.stop_ids.contains(&id) {
            self.ended = Some(FinishReason::Stop);
            if !request.report_stop {
                return false;
            }
        }
        self.pending.push(scored(id));
        self.answer.push(id);
        if self.answer.len() == request.max_tokens && self.ended.is_none() {
            self.ended = Some(FinishReason::Length);
        }
        true
    }

    /// Reports the end, if there is one.
    pub fn finish(mut self) {
        self.report();
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

fn cache_use(cache: &Cache) -> CacheUsage {
    let usage = cache.usage(0);
    let dropped = |layer: &Vec<(usize, usize)>| layer.iter().map(|(_, dropped)| *dropped).collect();
    CacheUsage {
        tokens: usage.tokens,
        bytes: usage.bytes,
        full_bytes: usage.full_bytes,
        page_tokens: PAGE,
        evicted_pages: cache.pages(0).iter().map(dropped).collect(),
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
        // In the middle of its prompt.
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
