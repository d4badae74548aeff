//! Admission and preemption.
//!
//! Requests are admitted by their expected size. The [`Budget`](fox_cache::Budget) is checked before every step. When
//! there is no memory for one, cached prefixes are evicted, and then the youngest request is preempted. The oldest is
//! never preempted, so that every request finishes.

use fox_tensor::PAGE;

use crate::FinishReason;
use crate::engine::{QueuedRequest, State};
use crate::scheduler::Scheduler;
use crate::sequence::Sequence;

/// How often later requests may be admitted before one that does not fit, and how many of the queue are considered.
const MAX_PASSED: u32 = 64;
const LOOK_AHEAD: usize = 32;

impl Scheduler {
    /// Admits one request that is expected to fit, preempted ones first; returns whether there was one.
    pub(crate) fn admit_one(&mut self, state: &mut State) -> bool {
        if let Some(r) = self.preempted.front() {
            let (tokens, need) = (r.tokens(), r.need);
            return self.has_room(tokens, need, self.promised()) && self.resume();
        }
        if state.queue.is_empty() {
            return false;
        }
        // Once for all candidates: it counts the pages of every running sequence.
        let promised = self.promised();
        for at in 0..state.queue.len().min(LOOK_AHEAD) {
            let request = &state.queue[at].request;
            if self.has_room(request.prompt.len() + request.max_tokens, 0, promised) {
                state.queue.iter_mut().take(at).for_each(|queued| queued.passed += 1);
                if let Some(queued) = state.queue.remove(at) {
                    self.admit(queued);
                }
                return true;
            }
            // Passed over too often: memory that becomes free is reserved for this one.
            if state.queue[at].passed >= MAX_PASSED {
                return false;
            }
        }
        false
    }

    /// Whether a request of `tokens` tokens, which is known to need `need` bytes, is expected to fit beside the running
    /// ones, which have `promised` bytes. The only request is admitted if its first step fits: how much it will evict is
    /// unknown.
    fn has_room(&mut self, tokens: usize, need: usize, promised: usize) -> bool {
        let cost = self.limits.budget.cost();
        let bytes = match self.running.is_empty() {
            true => cost.fixed() + cost.step(self.limits.prefill_chunk),
            false => self.retention.expected(cost, tokens, self.limits.prefill_chunk).max(need),
        };
        // A budget below the worst case of a step still fits requests of a few tokens.
        let bytes = bytes.min(cost.worst_case(tokens).max(need));
        self.make_room(bytes, promised)
    }

    /// Whether `bytes` more fit beside the `promised` bytes of the running sequences; evicts cached prefixes for it.
    pub(crate) fn make_room(&mut self, bytes: usize, promised: usize) -> bool {
        let wanted = bytes.saturating_add(promised);
        self.limits.budget.make_room(std::iter::empty(), wanted, || self.prefixes.evict_one())
    }

    /// Bytes that the running sequences are expected to allocate.
    pub(crate) fn promised(&self) -> usize {
        let cost = self.limits.budget.cost();
        let promised = |r: &Sequence| {
            let (held, len) =
                r.cache.as_ref().map_or((0, 0), |cache| (cache.usage().bytes, cache.len()));
            let step = if r.next().is_some() { 1 } else { self.limits.prefill_chunk };
            let all = self
                .retention
                .expected(cost, r.tokens(), self.limits.prefill_chunk)
                .saturating_sub(held);
            // Its pages have been through eviction already. Its last page may be a copy.
            let rest = self.retention.expected(cost, r.tokens().saturating_sub(len) + PAGE, step);
            all.min(rest).max(r.need.saturating_sub(held))
        };
        self.running.iter().map(promised).fold(0, usize::saturating_add)
    }

    fn admit(&mut self, mut queued: QueuedRequest) {
        self.arrivals += 1;
        match self.model.new_paged_cache(&self.policy) {
            Ok(cache) => self.running.push(Sequence::new(queued, cache, self.arrivals)),
            Err(error) => queued.end(FinishReason::Failed(error.to_string())),
        }
    }

    /// Resumes the oldest preempted request with an empty cache.
    fn resume(&mut self) -> bool {
        let Some(mut r) = self.preempted.pop_front() else { return false };
        match self.model.new_paged_cache(&self.policy) {
            Ok(cache) => r.cache = Some(cache.into()),
            Err(error) => r.ended = Some(FinishReason::Failed(error.to_string())),
        }
        let at = self.running.partition_point(|other| other.arrival < r.arrival);
        self.running.insert(at, r);
        true
    }

    /// Makes room for the next step of the requests for which `takes_part` holds: evicts cached prefixes, then preempts
    /// the youngest requests. A request that has all the memory and needs more fails. Returns whether there was room for
    /// the worst case and one more page per head.
    pub(crate) fn make_room_for_step(&mut self, takes_part: impl Fn(&Sequence) -> bool) -> bool {
        loop {
            let chunk = self.limits.prefill_chunk;
            let demand = self.running.iter().filter(|r| r.ended.is_none() && takes_part(r));
            // Nearly always the worst case fits, and pages need not be counted.
            let cost = self.limits.budget.cost();
            let tokens = |r: &Sequence| if r.next().is_some() { 1 } else { chunk };
            let most = demand.clone().map(|r| cost.step(tokens(r))).fold(0, usize::saturating_add);
            let budget = &self.limits.budget;
            if budget.make_room(std::iter::empty(), most, || false) {
                return true;
            }
            let exact = demand.filter_map(|r| {
                let (held, tokens) = r.demand(chunk)?;
                Some(cost.outstanding(held.len(), &held.page_counts(), tokens))
            });
            if budget.make_room(exact, 0, || self.prefixes.evict_one()) {
                return false;
            }
            // What an unfinished step samples belongs to requests that are preempted.
            if self.finish_step() {
                self.finish();
                continue;
            }
            let alone = self.running.iter().filter(|r| r.cache.is_some()).count() == 1;
            let youngest = self.running.iter().rposition(|r| r.cache.is_some());
            let Some(at) = youngest else { return false };
            if alone {
                let message = format!(
                    "the request has filled the cache of {} bytes and needs more; increase cache_bytes",
                    self.options.cache_bytes
                );
                let r = &mut self.running[at];
                r.ended = Some(FinishReason::Failed(message));
                r.cache = None;
                self.pages_changed = true;
                return false;
            }
            self.pages_changed = true;
            let mut r = self.running.remove(at);
            if let Some(cache) = &r.cache {
                self.retention.observe(cache);
                r.need = cache.usage().bytes + self.limits.budget.cost().step(chunk);
            }
            r.preempt();
            self.stats.preempted += 1;
            let at = self.preempted.partition_point(|other| other.arrival < r.arrival);
            self.preempted.insert(at, r);
        }
    }
}
