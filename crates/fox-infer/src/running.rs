//! One request that has a cache.

use std::sync::atomic::Ordering;
use std::time::Instant;

use fox_cache::Cache;
use fox_tensor::PAGE;

use crate::engine::Job;
use crate::sampler::Sampler;
use crate::scores::score;
use crate::{CacheUse, Event, FinishReason, Finished, Scored, Usage};

pub(crate) struct Running {
    job: Job,
    sampler: Sampler,
    /// Absent only while a step has it.
    pub cache: Option<Cache>,
    /// Prompt tokens that the cache has.
    pub read: usize,
    /// The token that the next step feeds, once the prompt is read.
    pub next: Option<i32>,
    generated: usize,
    prompt_scores: Vec<Scored>,
    usage: Usage,
    started: Instant,
    prefilled: Option<Instant>,
    /// Why it is over, once it is.
    pub ended: Option<FinishReason>,
}

impl Running {
    pub fn new(job: Job, cache: Cache) -> Self {
        let started = Instant::now();
        let usage = Usage {
            prompt_tokens: job.request.prompt.len(),
            queue_s: (started - job.submitted).as_secs_f64(),
            ..Usage::default()
        };
        Running {
            sampler: Sampler::new(job.request.sampling, &job.request.prompt),
            job,
            cache: Some(cache),
            read: 0,
            next: None,
            generated: 0,
            prompt_scores: Vec::new(),
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

    pub fn echoes(&self) -> bool {
        self.job.request.echo
    }

    /// Its cache, and the tokens that this may get to.
    pub fn demand(&self) -> Option<(&Cache, usize)> {
        let request = &self.job.request;
        Some((self.cache.as_ref()?, request.prompt.len() + request.max_tokens))
    }

    /// Goes on from a state after the first `len` tokens of the prompt.
    pub fn share(&mut self, cache: Cache, len: usize) {
        self.cache = Some(cache);
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
            (self.job.sink)(Event::Prompt(std::mem::take(&mut self.prompt_scores)));
        }
    }

    /// Chooses and reports the token after a row of logits; whether there was one.
    pub fn take(&mut self, logits: &[f32]) -> bool {
        self.prefilled.get_or_insert_with(Instant::now);
        let request = &self.job.request;
        if self.generated == request.max_tokens {
            self.ended = Some(FinishReason::Length);
            return false;
        }
        let Some(id) = self.sampler.choose(logits) else {
            let words = "the model's logits are not numbers";
            self.ended = Some(FinishReason::Failed(words.into()));
            return false;
        };
        if request.stop_ids.contains(&id) {
            self.ended = Some(FinishReason::Stop);
            return false;
        }
        (self.job.sink)(Event::Token(score(logits, id, request.top_logprobs)));
        self.generated += 1;
        self.next = Some(id);
        if self.generated == request.max_tokens {
            self.ended = Some(FinishReason::Length);
        }
        true
    }

    /// Reports the end, if there is one.
    pub fn finish(mut self) {
        let Some(reason) = self.ended.take() else { return };
        let seconds = |from: Instant, to: Instant| (to - from).as_secs_f64();
        let now = Instant::now();
        let prefilled = self.prefilled.unwrap_or(now);
        let usage = Usage {
            generated_tokens: self.generated,
            prefill_s: seconds(self.started, prefilled),
            decode_s: seconds(prefilled, now),
            ..self.usage
        };
        let cache = self.cache.as_ref().map_or_else(CacheUse::default, cache_use);
        (self.job.sink)(Event::Finished(Box::new(Finished { reason, usage, cache })));
    }
}

fn cache_use(cache: &Cache) -> CacheUse {
    let usage = cache.usage(0);
    let dropped = |layer: &Vec<(usize, usize)>| layer.iter().map(|(_, dropped)| *dropped).collect();
    CacheUse {
        tokens: usage.tokens,
        bytes: usage.bytes,
        full_bytes: usage.full_bytes,
        page_tokens: PAGE,
        evicted_pages: cache.pages(0).iter().map(dropped).collect(),
    }
}
