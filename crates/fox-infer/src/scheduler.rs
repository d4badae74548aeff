//! The engine's thread: who runs next.
//!
//! Each round frees what was cancelled, admits requests for which there is memory even at worst, reads
//! one chunk of the oldest unread prompt, and lets every sequence that has its prompt take one step.
//!
//! Whether there is memory is the [`Budget`](fox_cache::Budget)'s to say.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use fox_cache::{Cache, PagePolicy};
use fox_model::{ForwardOptions, Model};
use fox_tensor::{Segments, Tape, Var};
use rayon::prelude::*;

use crate::engine::{Job, Shared};
use crate::plan::Plan;
use crate::prefixes::{Found, Prefixes};
use crate::running::Running;
use crate::{EngineOptions, FinishReason, HeadPages, Result, Stats};

/// Logits that make a task.
const TASK_LOGITS: usize = 1 << 14;

/// The thread's state.
pub(crate) struct Scheduler {
    model: Arc<Model>,
    options: EngineOptions,
    plan: Plan,
    policy: PagePolicy,
    prefixes: Prefixes,
    shared: Arc<Shared>,
    running: Vec<Running>,
    stats: Stats,
}

/// Tells everybody that the thread is gone, however it went.
struct End(Arc<Shared>);

impl Drop for End {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.ended = true;
        // Whoever waits for an answer must see that none will come.
        state.queue.clear();
        drop(state);
        self.0.notify();
    }
}

impl Scheduler {
    pub fn new(mut model: Model, options: EngineOptions, shared: Arc<Shared>) -> Result<Self> {
        model.pack_weights(options.weights)?;
        let policy = model.page_policy(options.eviction.log_tolerance(), options.max_context)?;
        // A model whose cache cannot be in pages is refused here rather than at the first request.
        drop(model.new_paged_cache(&policy)?);
        Ok(Scheduler {
            plan: Plan::new(&model, &options, policy.meter()),
            prefixes: Prefixes::new(options.prefill_chunk, policy.meter().clone()),
            stats: Stats { cache_budget: options.cache_bytes, ..Stats::default() },
            model: Arc::new(model),
            options,
            policy,
            shared,
            running: Vec::new(),
        })
    }

    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Runs until the engine is closed and nothing is left to do.
    pub fn run(mut self) {
        let _end = End(self.shared.clone());
        while self.wait_for_work() {
            // On a thread of the pool, so that the ops of a step need not get there one by one.
            rayon::scope(|_| {
                self.prefill();
                self.decode();
                self.finish();
            });
        }
    }

    /// Admits what fits; whether there is something to run.
    fn wait_for_work(&mut self) -> bool {
        let shared = self.shared.clone();
        let mut state = shared.lock();
        loop {
            let before = self.running.len() + state.queue.len();
            self.running.retain(|r| !r.is_cancelled());
            state.queue.retain(|job| !job.cancelled.load(Ordering::Relaxed));
            self.stats.cancelled += (before - self.running.len() - state.queue.len()) as u64;
            while self.running.len() < self.options.max_batch {
                let Some(job) = state.queue.front() else { break };
                if !self.make_room(self.plan.worst_case(&job.request)) {
                    break;
                }
                if let Some(job) = state.queue.pop_front() {
                    self.admit(job);
                }
            }
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

    /// Whether `bytes` more may be promised; kept prefixes are forgotten for it.
    fn make_room(&mut self, bytes: usize) -> bool {
        let running = self.running.iter().filter_map(Running::demand);
        self.plan.budget.make_room(running, bytes, || self.prefixes.forget_one())
    }

    fn admit(&mut self, mut job: Job) {
        match self.model.new_paged_cache(&self.policy) {
            Ok(cache) => self.running.push(Running::new(job, cache)),
            Err(error) => job.fail(error.to_string()),
        }
    }

    /// Reads one chunk of the oldest unread prompt.
    fn prefill(&mut self) {
        let Some(at) = self.running.iter().position(|r| r.next.is_none()) else { return };
        if self.running[at].read == 0 && self.share_prefix(at) {
            return;
        }
        let r = &mut self.running[at];
        let (first, echo) = (r.read, r.echoes());
        let end = r.prompt().len().min(first + self.options.prefill_chunk);
        let is_last = end == r.prompt().len();
        let Some(mut cache) = r.cache.take() else { return };
        let rows = match (echo, is_last) {
            (true, _) => Rows::All,
            (false, true) => Rows::Last,
            (false, false) => Rows::None,
        };
        let result = read(&self.model, &r.prompt()[first..end], &mut cache, rows);
        r.cache = Some(cache);
        r.read = end;
        self.stats.prefilled_tokens += (end - first) as u64;
        self.stats.steps += 1;
        let logits = match result {
            Ok(logits) => logits,
            Err(error) => {
                r.ended = Some(FinishReason::Failed(error.to_string()));
                return;
            }
        };
        if echo {
            r.score_prompt(first, &logits, self.plan.vocab);
        }
        let last = is_last.then(|| &logits[logits.len() - self.plan.vocab..]);
        self.keep_prefix(at, last);
        if let Some(logits) = last {
            let taken = self.running[at].take(logits);
            self.stats.generated_tokens += u64::from(taken);
        }
    }

    /// Goes on where an earlier prompt with the same beginning was; whether that is all of it.
    fn share_prefix(&mut self, at: usize) -> bool {
        let r = &mut self.running[at];
        if !self.options.share_prefixes || r.echoes() {
            return false;
        }
        // The fresh cache goes first, so that its bytes and those of the copy are not there at once.
        let fresh = r.cache.take();
        let Some(Found { cache, len, logits }) = self.prefixes.find(r.prompt()) else {
            r.cache = fresh;
            return false;
        };
        drop(fresh);
        r.share(cache, len);
        self.stats.shared_tokens += len as u64;
        let Some(logits) = logits else { return false };
        let taken = r.take(&logits);
        self.stats.generated_tokens += u64::from(taken);
        true
    }

    /// Keeps the state of a prompt for others that begin alike, if there is room.
    fn keep_prefix(&mut self, at: usize, logits: Option<&[f32]>) {
        let read = self.running[at].read;
        if !self.options.share_prefixes
            || !(logits.is_some() || read.is_multiple_of(self.options.prefill_chunk))
        {
            return;
        }
        let cost = Prefixes::cost(read, logits.map_or(0, <[f32]>::len));
        if self.make_room(self.plan.budget.cost().fixed() + cost) {
            let r = &self.running[at];
            if let Some(cache) = &r.cache {
                self.prefixes.keep(&r.prompt()[..read], cache, logits);
            }
        }
    }

    /// One step of every sequence that has its prompt.
    fn decode(&mut self) {
        let ready = |r: &&mut Running| r.next.is_some() && r.ended.is_none();
        let mut ready: Vec<&mut Running> = self.running.iter_mut().filter(ready).collect();
        // More rows than these would be another kernel, and other bits.
        for group in ready.chunks_mut(self.model.device().backend().caps().decode_batch) {
            self.stats.steps += 1;
            match step(&self.model, group) {
                Ok(logits) => {
                    let rows = logits.par_chunks(self.plan.vocab);
                    let taken = group.par_iter_mut().zip(rows).map(|(r, row)| r.take(row));
                    // Rows of a small vocabulary are not worth a task each.
                    let taken = taken.with_min_len((TASK_LOGITS / self.plan.vocab).max(1));
                    self.stats.generated_tokens += taken.filter(|taken| *taken).count() as u64;
                }
                Err(error) => {
                    for r in group {
                        r.ended = Some(FinishReason::Failed(error.to_string()));
                    }
                }
            }
        }
    }

    /// Reports and removes what has ended.
    fn finish(&mut self) {
        for r in self.running.extract_if(.., |r| r.ended.is_some()) {
            self.stats.finished += 1;
            r.finish();
        }
    }

    fn measure(&mut self) {
        let stats = &mut self.stats;
        stats.running = self.running.len();
        stats.cache_bytes = self.policy.meter().bytes();
        stats.peak_cache_bytes = self.policy.meter().peak();
        stats.heads.clear();
        for r in &self.running {
            let Some(cache) = &r.cache else { continue };
            for (l, layer) in cache.pages(0).into_iter().enumerate() {
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

/// Which rows of logits are wanted.
enum Rows {
    None,
    Last,
    All,
}

/// Feeds part of a prompt; the logits that are wanted.
fn read(
    model: &Model,
    chunk: &[i32],
    cache: &mut Cache,
    rows: Rows,
) -> fox_model::Result<Vec<f32>> {
    let device = model.device();
    let ids = device.from_i32(chunk, [chunk.len()])?;
    let segments = Segments::uniform(1, chunk.len());
    let mut tape = Tape::inference(device);
    let options = ForwardOptions::default();
    let hidden = model.forward(&mut tape, &ids, &segments, Some(cache), &options)?;
    let states = match rows {
        Rows::None => return Ok(Vec::new()),
        Rows::All => hidden.states,
        Rows::Last => Var::constant(hidden.states.value().slice_rows(chunk.len() - 1, 1)?),
    };
    Ok(model.logits(&mut tape, &states)?.value().to_f32()?)
}

/// Feeds every sequence its next token; the logits after them, `[n, V]`.
fn step(model: &Model, group: &mut [&mut Running]) -> fox_model::Result<Vec<f32>> {
    let tokens: Vec<i32> = group.iter().filter_map(|r| r.next).collect();
    let caches: Vec<Cache> = group.iter_mut().filter_map(|r| r.cache.take()).collect();
    let mut joined = Cache::join(caches)?;
    let rows: Vec<&[i32]> = tokens.chunks(1).collect();
    let result = model.decode(&rows, &mut joined, &ForwardOptions::default());
    for (r, cache) in group.iter_mut().zip(joined.split()?) {
        r.cache = Some(cache);
    }
    Ok(result?.to_f32()?)
}
