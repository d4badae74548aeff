//! The scheduler: the engine's thread.
//!
//! Each iteration drops cancelled requests, admits requests that are expected to fit, decodes one token of every
//! sequence whose prompt is complete, and prefills chunks of prompts in the order of [`prefill`](crate::prefill).
//! [`admission`](crate::admission) decides which requests are admitted and preempted.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use fox_cache::{PagePolicy, SequenceState};
use fox_model::Model;
use rayon::prelude::*;

use crate::engine::{Shared, State};
use crate::forward::{Rows, read, step};
use crate::limits::RequestLimits;
use crate::prefill::{PrefillOrder, StepTimes};
use crate::prefix_cache::{PrefixCache, PrefixHit};
use crate::resident::Resident;
use crate::retention::RetentionEstimate;
use crate::sequence::{Next, Sequence};
use crate::warm::warm_up;
use crate::{EngineOptions, FinishReason, HeadPages, Result, Stats};

/// Interval of the page statistics.
const COUNT_EVERY: Duration = Duration::from_millis(500);

/// Logits per parallel sampling task.
const TASK_LOGITS: usize = 1 << 14;

/// State of the scheduler.
pub(crate) struct Scheduler {
    pub(crate) model: Arc<Model>,
    pub(crate) options: EngineOptions,
    pub(crate) limits: RequestLimits,
    pub(crate) policy: PagePolicy,
    pub(crate) prefixes: PrefixCache,
    /// Slots of decoding sequences, where the device has them.
    resident: Option<Resident>,
    shared: Arc<Shared>,
    /// Oldest first.
    pub(crate) running: Vec<Sequence>,
    /// Preempted requests, oldest first. They are resumed before new requests are admitted.
    pub(crate) preempted: VecDeque<Sequence>,
    pub(crate) arrivals: u64,
    pub(crate) retention: RetentionEstimate,
    order: PrefillOrder,
    step_times: StepTimes,
    pub(crate) stats: Stats,
    /// Whether pages were added or evicted since they were counted, and the time of that count.
    pub(crate) pages_changed: bool,
    counted: Instant,
}

/// Marks the thread as ended when it returns or panics.
struct End(Arc<Shared>);

impl Drop for End {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.ended = true;
        // Dropping the sinks ends the event channels of requests that did not run.
        state.queue.clear();
        drop(state);
        self.0.notify();
    }
}

impl Scheduler {
    pub fn new(mut model: Model, mut options: EngineOptions, shared: Arc<Shared>) -> Result<Self> {
        model.pack_weights(options.weights)?;
        let policy = model.page_policy(options.eviction.log_tolerance(), options.max_context)?;
        // A model without a paged cache is refused here rather than at the first request.
        drop(model.new_paged_cache(&policy)?);
        let chunk = options.prefill_chunk.min(options.max_context);
        let resident = Resident::open(&model, &options, &policy)?;
        // A separate policy has a separate meter, so that the warm-up counts against no budget.
        let unmetered = model.page_policy(options.eviction.log_tolerance(), options.max_context)?;
        warm_up(&model, &unmetered, chunk, resident.is_some())?;
        let slots = resident.as_ref().map_or(0, Resident::slots);
        if resident.is_some() {
            options.max_batch = slots;
        }
        Ok(Scheduler {
            limits: RequestLimits::new(&model, &options, policy.meter()),
            prefixes: PrefixCache::new(options.prefill_chunk, policy.meter().clone()),
            stats: Stats { cache_budget: options.cache_bytes, slots, ..Stats::default() },
            model: Arc::new(model),
            options,
            policy,
            resident,
            shared,
            running: Vec::new(),
            preempted: VecDeque::new(),
            arrivals: 0,
            retention: RetentionEstimate::default(),
            order: PrefillOrder::default(),
            step_times: StepTimes::default(),
            pages_changed: true,
            counted: Instant::now(),
        })
    }

    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    pub fn limits(&self) -> &RequestLimits {
        &self.limits
    }

    /// Runs until the engine is closed and nothing is left to do.
    pub fn run(mut self) {
        let _end = End(self.shared.clone());
        while self.wait_for_work() {
            match self.resident.is_some() {
                // The device runs asynchronously: entering the thread pool would only add latency to every step.
                true => self.step(),
                // On a thread of the pool, so that the ops of a step do not enter it one by one.
                false => rayon::scope(|_| self.step()),
            }
        }
    }

    fn step(&mut self) {
        self.decode();
        self.prefill();
        self.finish();
    }

    /// Admits requests that fit; waits until one runs. False when the engine is closed and idle.
    fn wait_for_work(&mut self) -> bool {
        let shared = self.shared.clone();
        let mut state = shared.lock();
        loop {
            let count = |this: &Self, state: &State| {
                this.running.len() + this.preempted.len() + state.queue.len()
            };
            let before = count(self, &state);
            self.running.retain(|r| !r.is_cancelled());
            self.preempted.retain(|r| !r.is_cancelled());
            state.queue.retain(|queued| !queued.cancelled.load(Ordering::Relaxed));
            let cancelled = before - count(self, &state);
            self.stats.cancelled += cancelled as u64;
            self.pages_changed |= cancelled > 0;
            if state.interrupted {
                self.interrupt(&mut state);
            }
            while self.running.len() < self.options.max_batch && self.admit_one(&mut state) {}
            self.measure();
            state.stats = self.stats.clone();
            if !self.running.is_empty() {
                return true;
            }
            if state.closed {
                return false;
            }
            state = shared.wait(state);
        }
    }

    /// Ends all requests at once.
    fn interrupt(&mut self, state: &mut State) {
        self.pages_changed = true;
        for mut r in self.running.drain(..).chain(self.preempted.drain(..)) {
            self.stats.finished += 1;
            r.ended = Some(FinishReason::Interrupted);
            r.finish();
        }
        for mut queued in state.queue.drain(..) {
            queued.end(FinishReason::Interrupted);
        }
    }

    /// Prefills chunks of prompts, for about as long as the decode batch of this step took.
    fn prefill(&mut self) {
        let mut unread: Vec<usize> = self.running.iter().map(Sequence::unread).collect();
        let decodes = self.running.iter().any(|r| r.next().is_some());
        // Without a decode batch one chunk at a time, so that new requests are admitted soon.
        let budget =
            if decodes { self.step_times.prompt_tokens(self.options.step_tokens) } else { 0 };
        let arrivals: Vec<u64> = self.running.iter().map(|r| r.arrival).collect();
        let chunks = self.order.select(&mut unread, self.limits.prefill_chunk, budget);
        for at in chunks {
            self.pages_changed = true;
            let start = Instant::now();
            // A request may have been preempted meanwhile.
            let position =
                |this: &Self| this.running.iter().position(|r| r.arrival == arrivals[at]);
            let Some(here) = position(self) else { continue };
            if self.running[here].read == 0 {
                self.share_prefix(here);
            }
            self.make_room_for_step(|r| r.arrival == arrivals[at]);
            let Some(here) = position(self) else { continue };
            let tokens = self.prefill_chunk(here);
            self.step_times.prefilled(tokens, start.elapsed());
        }
    }

    /// Prefills the next chunk of a prompt; returns its number of tokens.
    fn prefill_chunk(&mut self, at: usize) -> usize {
        if self.running[at].unread() == 0 {
            return 0;
        }
        let r = &mut self.running[at];
        let (first, echo) = (r.read, r.echoes());
        let end = r.prompt().len().min(first + self.limits.prefill_chunk);
        let is_last = end == r.prompt().len();
        let Some(SequenceState::Cache(mut cache)) = r.cache.take() else { return 0 };
        let rows = match (echo, is_last) {
            (true, _) => Rows::All,
            (false, true) => Rows::Last,
            (false, false) => Rows::None,
        };
        let result = read(&self.model, &r.prompt()[first..end], &mut cache, rows);
        r.cache = Some(cache.into());
        r.read = end;
        self.stats.prefilled_tokens += (end - first) as u64;
        self.stats.steps += 1;
        let logits = match result {
            Ok(logits) => logits,
            Err(error) => {
                r.fail(error.to_string());
                return end - first;
            }
        };
        if echo {
            r.score_prompt(first, &logits, self.limits.vocab);
        }
        let last = is_last.then(|| &logits[logits.len() - self.limits.vocab..]);
        self.cache_prefix(at, last);
        if let Some(logits) = last {
            if let Some(cache) = &self.running[at].cache {
                self.retention.observe(cache);
            }
            let taken = self.running[at].take(logits);
            self.stats.generated_tokens += u64::from(taken);
        }
        end - first
    }

    /// Takes the longest cached prefix of a prompt.
    fn share_prefix(&mut self, at: usize) {
        let r = &mut self.running[at];
        if !self.options.share_prefixes || r.echoes() {
            return;
        }
        // The empty cache is dropped before the copy is made, so that both are not counted at once.
        let fresh = r.cache.take();
        let Some(PrefixHit { cache, len, logits }) = self.prefixes.find(r.prompt()) else {
            r.cache = fresh;
            return;
        };
        drop(fresh);
        r.share(cache, len);
        self.stats.shared_tokens += len as u64;
        if let Some(logits) = logits {
            let taken = r.take(&logits);
            self.stats.generated_tokens += u64::from(taken);
        }
    }

    /// Adds the state of a prompt to the prefix cache, if there is room.
    fn cache_prefix(&mut self, at: usize, logits: Option<&[f32]>) {
        let read = self.running[at].read;
        if !self.options.share_prefixes
            || !(logits.is_some() || self.prefixes.is_cached_length(read))
        {
            return;
        }
        let cost = PrefixCache::cost(read, logits.map_or(0, <[f32]>::len));
        if self.make_room(self.limits.budget.cost().fixed() + cost, self.promised()) {
            let r = &self.running[at];
            if let Some(SequenceState::Cache(cache)) = &r.cache {
                self.prefixes.insert(&r.prompt()[..read], cache, logits);
            }
        }
    }

    /// One decode step of every sequence whose prompt is complete.
    fn decode(&mut self) {
        let start = Instant::now();
        if self.running.iter().all(|r| r.next().is_none()) {
            return;
        }
        let is_roomy = self.make_room_for_step(|r| r.next().is_some());
        match self.resident.is_some() {
            true => self.decode_in_slots(is_roomy),
            false => self.decode_gathered(),
        }
        self.step_times.decoded(start.elapsed());
    }

    /// Begins the next step in slots and finishes the one before it. With `is_roomy`, pages are reserved ahead.
    fn decode_in_slots(&mut self, is_roomy: bool) {
        let Some(resident) = &mut self.resident else { return };
        let takes_part = |r: &&mut Sequence| r.input().is_some();
        let mut group: Vec<&mut Sequence> = self.running.iter_mut().filter(takes_part).collect();
        let begins = !group.is_empty();
        if begins {
            self.stats.steps += 1;
            let begun = resident.begin(&mut group).and_then(|entered| {
                Ok(entered | (is_roomy && resident.reserve_ahead(&mut group)?))
            });
            match begun {
                Ok(changed) => self.pages_changed |= changed,
                Err(error) => fail(&mut group, &error),
            }
        }
        let waits = |resident: &Resident| {
            resident.unfinished() > usize::from(begins) || resident.needs_logits()
        };
        while self.resident.as_ref().is_some_and(waits) {
            self.finish_step();
        }
    }

    /// Finishes the oldest unfinished step in slots; whether there was one.
    pub(crate) fn finish_step(&mut self) -> bool {
        let Some(resident) = &mut self.resident else { return false };
        if resident.unfinished() == 0 {
            return false;
        }
        // An error has ended the requests of the step.
        let (next, evicted) = resident.finish(&mut self.running).unwrap_or_default();
        self.pages_changed |= evicted;
        let mut next = next.into_iter().peekable();
        let running = self.running.iter_mut().enumerate();
        let stepped = running.filter_map(|(at, r)| Some((r, next.next_if(|(n, _)| *n == at)?.1)));
        let (logits, chosen): (Vec<_>, Vec<_>) =
            stepped.partition(|(_, next)| matches!(next, Next::Logits(_)));
        // Only sampling from logits is worth a parallel task.
        let take = |(r, next): (&mut Sequence, Next)| r.ended.is_none() && r.stepped_to(&next);
        let taken = chosen.into_iter().map(take).filter(|taken| *taken).count()
            + logits.into_par_iter().map(take).filter(|taken| *taken).count();
        self.stats.generated_tokens += taken as u64;
        true
    }

    /// A step that gathers the states of its sequences.
    fn decode_gathered(&mut self) {
        let ready = |r: &&mut Sequence| r.next().is_some();
        let mut ready: Vec<&mut Sequence> = self.running.iter_mut().filter(ready).collect();
        if ready.is_empty() {
            return;
        }
        // A larger batch would use another kernel, with another reduction order.
        for group in ready.chunks_mut(self.model.device().backend().caps().decode_batch) {
            self.stats.steps += 1;
            match step(&self.model, group) {
                Ok(logits) => {
                    let rows = logits.par_chunks(self.limits.vocab);
                    let taken = group.par_iter_mut().zip(rows).map(|(r, row)| r.stepped(row));
                    // Rows of a small vocabulary share a task.
                    let taken = taken.with_min_len((TASK_LOGITS / self.limits.vocab).max(1));
                    self.stats.generated_tokens += taken.filter(|taken| *taken).count() as u64;
                }
                Err(error) => fail(group, &error),
            }
        }
        self.pages_changed = true;
    }

    /// Reports and removes requests that have ended.
    pub(crate) fn finish(&mut self) {
        for r in self.running.extract_if(.., |r| r.ended.is_some()) {
            self.pages_changed = true;
            if let Some(cache) = &r.cache {
                self.retention.observe(cache);
            }
            self.stats.finished += 1;
            r.finish();
        }
    }

    fn measure(&mut self) {
        let stats = &mut self.stats;
        stats.running = self.running.len();
        stats.decoding = self.running.iter().filter(|r| r.next().is_some()).count();
        stats.peak_decoding = stats.peak_decoding.max(stats.decoding);
        stats.queued = self.preempted.len();
        stats.cache_bytes = self.policy.meter().bytes();
        stats.peak_cache_bytes = self.policy.meter().peak();
        // Counting pages takes longer than the rest of the host's work in a step on a GPU, so it is done at intervals and
        // when the engine becomes idle.
        let due = self.running.is_empty() || self.counted.elapsed() >= COUNT_EVERY;
        if !self.pages_changed || !due {
            return;
        }
        (self.pages_changed, self.counted) = (false, Instant::now());
        stats.heads.clear();
        for r in &self.running {
            let Some(cache) = &r.cache else { continue };
            for (l, layer) in cache.page_counts().into_iter().enumerate() {
                if stats.heads.len() <= l {
                    stats.heads.push(vec![HeadPages::default(); layer.len()]);
                }
                for (head, (held, dropped)) in stats.heads[l].iter_mut().zip(layer) {
                    head.held += held;
                    head.evicted += dropped;
                }
            }
        }
    }
}

/// Ends the requests of a failed step.
fn fail(group: &mut [&mut Sequence], error: &fox_model::Error) {
    group.iter_mut().for_each(|r| r.fail(error.to_string()));
}
