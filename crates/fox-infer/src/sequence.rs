//! One request that has a cache.

use std::sync::atomic::Ordering;
use std::time::Instant;

use fox_cache::{Cache, SequenceState};
use fox_tensor::{PAGE, SampledToken, TokenDraw};

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
    Token(SampledToken),
}

pub(crate) struct Sequence {
    job: QueuedRequest,
    /// Its place in the order of requests: the last one is the first to be put back.
    pub arrival: u64,
    /// Bytes that it is known to need, once it was put back for lack of them.
    pub need: usize,
    /// Whether the scores of the prompt were reported.
    told_prompt: bool,
    sampler: Sampler,
    /// Absent only while a step has it.
    pub cache: Option<SequenceState>,
    /// Where its state is on the device, once it decodes there.
    pub slot: Option<Slot>,
    /// Prompt tokens that the cache has.
    pub read: usize,
    /// Tokens chosen so far.
    answer: Vec<i32>,
    /// Those of them that the cache has.
    fed: usize,
    prompt_scores: Vec<ScoredToken>,
    /// Tokens that were chosen on the device and are not reported yet; see [`Sequence::report`].
    pending: Vec<ScoredToken>,
    usage: Usage,
    started: Instant,
    prefilled: Option<Instant>,
    /// Why it is over, once it is.
    pub ended: Option<FinishReason>,
}

impl Sequence {
    pub fn new(job: QueuedRequest, cache: Cache, arrival: u64) -> Self {
        let started = Instant::now();
        let usage = Usage {
            prompt_tokens: job.request.prompt.len(),
            queue_s: (started - job.submitted).as_secs_f64(),
            ..Usage::default()
        };
        Sequence {
            sampler: Sampler::new(&job.request),
            job,
            arrival,
            need: 0,
            told_prompt: false,
            cache: Some(cache.into()),
            slot: None,
            read: 0,
            answer: Vec::new(),
            fed: 0,
            prompt_scores: Vec::new(),
            pending: Vec::new(),
            usage,
            started,
            prefilled: None,
            ended: None,
        }
    }

    pub fn is_cancelled(&self) -> bool {
        self.job.cancelled.load(Ordering::Relaxed)
    }

    pub fn prompt(&self) -> &[i32] {
        &self.job.request.prompt
    }

    /// Whether the scores of the prompt are still to be reported.
    pub fn echoes(&self) -> bool {
        self.job.request.echo && !self.told_prompt
    }

    /// Gives up its cache. What was reported stays so: the prompt is read again, and the answer's tokens are fed
    /// again one by one, in steps like those before, so that the bits are the same.
    pub fn preempt(&mut self) {
        self.report();
        (self.cache, self.slot) = (None, None);
        (self.read, self.fed) = (0, 0);
        self.prompt_scores.clear();
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
        !self.sampler.is_plain() || self.job.request.top_logprobs > 0
    }

    /// How a device draws the token after the next step, if it is to draw one.
    pub fn draw(&mut self) -> Option<TokenDraw> {
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
            Next::Token(choice) => {
                self.fed += 1;
                let scored = |id| ScoredToken { id, logprob: choice.logprob, top: Vec::new() };
                self.take_chosen(|_| choice.id, scored)
            }
        }
    }

    /// Tells the client of the tokens that it does not know yet.
    pub fn report(&mut self) {
        for scored in self.pending.drain(..) {
            (self.job.sink)(Event::Token(scored));
        }
    }

    /// Tokens of prompt and answer, at most.
    pub fn tokens(&self) -> usize {
        self.job.request.prompt.len() + self.job.request.max_tokens
    }

    /// Its cache, and the tokens that this has after the next step of a decoding sequence or of a prompt that is
    /// read in pieces.
    pub fn demand(&self, piece: usize) -> Option<(&SequenceState, usize)> {
        let cache = self.cache.as_ref()?;
        let next = if self.next().is_some() { 1 } else { self.unread().min(piece) };
        Some((cache, cache.len() + next))
    }

    /// Goes on from a state after the first `len` tokens of the prompt.
    pub fn share(&mut self, cache: Cache, len: usize) {
        self.cache = Some(cache.into());
        self.read = len;
        self.usage.shared_tokens = len;
    }

    /// Notes the scores of the prompt's tokens after position `first`, from the rows of `logits`, and
    /// reports them when the prompt is read.
    pub fn score_prompt(&mut self, first: usize, logits: &[f32], vocab: usize) {
        let request = &self.job.request;
        let followers = &request.prompt[first + 1..request.prompt.len().min(self.read + 1)];
        for (row, &id) in logits.chunks(vocab).zip(followers) {
            self.prompt_scores.push(score(row, id, request.top_logprobs));
        }
        if self.read == request.prompt.len() {
            self.told_prompt = true;
            (self.job.sink)(Event::Prompt(std::mem::take(&mut self.prompt_scores)));
        }
    }

    /// Chooses and reports the token after a row of logits; whether there was one.
    pub fn take(&mut self, logits: &[f32]) -> bool {
        let top_logprobs = self.job.request.top_logprobs;
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
        let request = &self.job.request;
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
        (self.job.sink)(Event::Finished(Box::new(Finished { reason, usage, cache })));
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
    fn a_prompt_that_is_read_again_is_scored_once() {
        let (sender, events) = channel();
        let job = QueuedRequest {
            request: Request { echo: true, ..Request::greedy(vec![0, 1, 0, 1], 1) },
            sink: Box::new(move |event| drop(sender.send(event))),
            cancelled: Arc::default(),
            submitted: Instant::now(),
            passed: 0,
        };
        let cache = Cache::new([], 1, 1, &fox_cpu::device()).unwrap();
        let mut running = Sequence::new(job, cache, 0);
        let row = [0.0, 1.0];
        running.read = 2;
        running.score_prompt(0, &row.repeat(2), 2);
        // In the middle of its prompt.
        running.preempt();
        for (first, read) in [(0, 2), (2, 4)] {
            running.read = read;
            running.score_prompt(first, &row.repeat(2), 2);
        }
        let Ok(Event::Prompt(scores)) = events.try_recv() else { panic!("no scores") };
        let ids: Vec<i32> = scores.iter().map(|scored| scored.id).collect();
        assert_eq!(ids, [1, 0, 1]);
    }
}
