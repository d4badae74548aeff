//! One request that has a cache.

use std::sync::atomic::Ordering;
use std::time::Instant;

use fox_model::{Cache, paged_cache_bytes};
use fox_tensor::PAGE;

use crate::engine::Job;
use crate::plan::Plan;
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

    /// Bytes of pages that it may still take.
    pub fn future(&self, plan: &Plan) -> usize {
        let Some(cache) = &self.cache else { return 0 };
        let held = cache.pages(0).iter().flatten().map(|(held, _)| *held).max();
        plan.future(&self.job.request, cache.lens()[0], held.unwrap_or(0))
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
    pub fn finish(mut self, config: &fox_model::ModelConfig) {
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
        let cache = self.cache.as_ref().map_or_else(CacheUse::default, |c| cache_use(c, config));
        (self.job.sink)(Event::Finished(Box::new(Finished { reason, usage, cache })));
    }
}

fn cache_use(cache: &Cache, config: &fox_model::ModelConfig) -> CacheUse {
    let (tokens, pages) = (cache.lens()[0], cache.pages(0));
    let full = |tokens| paged_cache_bytes(config, cache.device(), tokens, 0);
    // One page of one head.
    let heads: usize = pages.iter().map(Vec::len).sum();
    let page = (full(1) - full(0)).checked_div(heads).unwrap_or(0);
    let held: usize = pages.iter().flatten().map(|(held, _)| held).sum();
    let all: usize = pages.iter().flatten().map(|(held, dropped)| held + dropped).sum();
    CacheUse {
        tokens,
        bytes: full(0) + held * page,
        full_bytes: full(0) + all * page,
        page_tokens: PAGE,
        evicted_pages: pages
            .iter()
            .map(|layer| layer.iter().map(|(_, dropped)| *dropped).collect())
            .collect(),
    }
}
