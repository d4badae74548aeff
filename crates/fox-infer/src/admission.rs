//! Memory: who is let in, and who is put back when there is not enough.
//!
//! Requests are let in by what they are expected to need. The [`Budget`](fox_cache::Budget) is asked before every
//! step. When there is no memory for one, kept prefixes are forgotten, and then the youngest request is put back; the
//! oldest one is never, so that all get to their end.

use fox_tensor::PAGE;

use crate::FinishReason;
use crate::engine::{QueuedRequest, State};
use crate::scheduler::Scheduler;
use crate::sequence::Sequence;

/// How often later requests may go before one that there is no memory for, and how many are looked at.
const MAX_PASSED: u32 = 64;
const LOOK_AHEAD: usize = 32;

impl Scheduler {
    /// Lets in one request that is expected to fit, those that were put back first; whether there was one.
    pub(crate) fn admit_one(&mut self, state: &mut State) -> bool {
        if let Some(r) = self.waiting.front() {
            let (tokens, need) = (r.tokens(), r.need);
            return self.has_room(tokens, need, self.promised()) && self.resume();
        }
        if state.queue.is_empty() {
            return false;
        }
        // Once for all that are looked at: it counts the pages of every running sequence.
        let promised = self.promised();
        for at in 0..state.queue.len().min(LOOK_AHEAD) {
            let request = &state.queue[at].request;
            if self.has_room(request.prompt.len() + request.max_tokens, 0, promised) {
                state.queue.iter_mut().take(at).for_each(|job| job.passed += 1);
                if let Some(job) = state.queue.remove(at) {
                    self.admit(job);
                }
                return true;
            }
            // It has waited long enough: whatever comes free is for this one.
            if state.queue[at].passed >= MAX_PASSED {
                return false;
            }
        }
        false
    }

    /// Whether a request of `tokens` tokens, which is known to need `need` bytes, is expected to fit beside those
    /// that run, to whom bytes are promised. Alone, it may try: nobody knows what it will forget.
    fn has_room(&mut self, tokens: usize, need: usize, promised: usize) -> bool {
        let cost = self.limits.budget.cost();
        let bytes = match self.running.is_empty() {
            true => cost.fixed() + cost.step(self.limits.piece),
            false => self.retention.expected(cost, tokens, self.limits.piece).max(need),
        };
        // A budget of less than a step's worst case still fits requests of a few tokens.
        let bytes = bytes.min(cost.worst_case(tokens).max(need));
        self.make_room(bytes, promised)
    }

    /// Whether `bytes` more may be given out beside what the running sequences are promised; kept prefixes are
    /// forgotten for it.
    pub(crate) fn make_room(&mut self, bytes: usize, promised: usize) -> bool {
        let wanted = bytes.saturating_add(promised);
        self.limits.budget.make_room(std::iter::empty(), wanted, || self.prefixes.forget_one())
    }

    /// Bytes that the running sequences are expected to take beyond what they hold.
    pub(crate) fn promised(&self) -> usize {
        let cost = self.limits.budget.cost();
        let promised = |r: &Sequence| {
            let (held, len) =
                r.cache.as_ref().map_or((0, 0), |cache| (cache.usage().bytes, cache.len()));
            let step = if r.next().is_some() { 1 } else { self.limits.piece };
            let all =
                self.retention.expected(cost, r.tokens(), self.limits.piece).saturating_sub(held);
            // What it holds has forgotten already. The page that it is in may be a copy.
            let rest = self.retention.expected(cost, r.tokens().saturating_sub(len) + PAGE, step);
            all.min(rest).max(r.need.saturating_sub(held))
        };
        self.running.iter().map(promised).fold(0, usize::saturating_add)
    }

    fn admit(&mut self, mut job: QueuedRequest) {
        self.arrivals += 1;
        match self.model.new_paged_cache(&self.policy) {
            Ok(cache) => self.running.push(Sequence::new(job, cache, self.arrivals)),
            Err(error) => job.end(FinishReason::Failed(error.to_string())),
        }
    }

    /// Lets the first request that was put back begin again.
    fn resume(&mut self) -> bool {
        let Some(mut r) = self.waiting.pop_front() else { return false };
        match self.model.new_paged_cache(&self.policy) {
            Ok(cache) => r.cache = Some(cache.into()),
            Err(error) => r.ended = Some(FinishReason::Failed(error.to_string())),
        }
        let at = self.running.partition_point(|other| other.arrival < r.arrival);
        self.running.insert(at, r);
        true
    }

    /// Makes room for the next step of the running requests that `takes_part`: forgets prefixes, then puts the
    /// youngest requests back. A request that has all the memory and needs more ends. Whether there was room for a page
    /// of every head more than the step can take.
    pub(crate) fn make_room_for_step(&mut self, takes_part: impl Fn(&Sequence) -> bool) -> bool {
        loop {
            let piece = self.limits.piece;
            let demand = self.running.iter().filter(|r| r.ended.is_none() && takes_part(r));
            // Nearly always there is room for the worst that a step can do, and nobody has to count pages.
            let cost = self.limits.budget.cost();
            let tokens = |r: &Sequence| if r.next().is_some() { 1 } else { piece };
            let most = demand.clone().map(|r| cost.step(tokens(r))).fold(0, usize::saturating_add);
            let budget = &self.limits.budget;
            if budget.make_room(std::iter::empty(), most, || false) {
                return true;
            }
            let exact = demand.filter_map(|r| {
                let (held, tokens) = r.demand(piece)?;
                Some(cost.outstanding(held.len(), &held.page_counts(), tokens))
            });
            if budget.make_room(exact, 0, || self.prefixes.forget_one()) {
                return false;
            }
            let alone = self.running.iter().filter(|r| r.cache.is_some()).count() == 1;
            let youngest = self.running.iter().rposition(|r| r.cache.is_some());
            let Some(at) = youngest else { return false };
            if alone {
                let words = format!(
                    "the request has filled the cache of {} bytes and needs more; increase cache_bytes",
                    self.options.cache_bytes
                );
                let r = &mut self.running[at];
                r.ended = Some(FinishReason::Failed(words));
                r.cache = None;
                self.pages_changed = true;
                return false;
            }
            self.pages_changed = true;
            let mut r = self.running.remove(at);
            if let Some(cache) = &r.cache {
                self.retention.observe(cache);
                r.need = cache.usage().bytes + self.limits.budget.cost().step(piece);
            }
            r.preempt();
            self.stats.preempted += 1;
            let at = self.waiting.partition_point(|other| other.arrival < r.arrival);
            self.waiting.insert(at, r);
        }
    }
}
