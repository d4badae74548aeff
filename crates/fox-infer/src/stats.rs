//! Statistics of an engine.

use serde::Serialize;

/// Statistics of an engine between two steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Stats {
    /// Requests in the queue, preempted ones included.
    pub queued: usize,
    /// Requests that prefill or decode.
    pub running: usize,
    /// Requests that decode.
    pub decoding: usize,
    /// Largest number of requests that decoded at a time.
    pub peak_decoding: usize,
    /// Requests that ended, failed ones included.
    pub finished: u64,
    /// Requests that were dropped before their end.
    pub cancelled: u64,
    /// Preemptions for lack of memory.
    pub preempted: u64,
    /// Prompt tokens prefilled.
    pub prefilled_tokens: u64,
    /// Prompt tokens taken from the prefix cache.
    pub shared_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Prefill chunks and decode steps.
    pub steps: u64,
    /// Bytes of all KV caches, cached prefixes included.
    pub cache_bytes: usize,
    /// Peak of `cache_bytes`.
    pub peak_cache_bytes: usize,
    /// Limit of `cache_bytes`.
    pub cache_budget: usize,
    /// Slots of the device; 0 where every step gathers its states.
    pub slots: usize,
    /// Pages of the running sequences, per layer and key head.
    pub heads: Vec<Vec<HeadPages>>,
}

impl Stats {
    /// Fraction of the running sequences' pages that was evicted, from 0 to 1.
    pub fn evicted_fraction(&self) -> f64 {
        let sum = |f: fn(&HeadPages) -> usize| self.heads.iter().flatten().map(f).sum::<usize>();
        let (held, evicted) = (sum(|h| h.held), sum(|h| h.evicted));
        if evicted == 0 { 0.0 } else { evicted as f64 / (held + evicted) as f64 }
    }
}

/// Pages of one key head, over the running sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct HeadPages {
    /// In memory.
    pub held: usize,
    /// Evicted.
    pub evicted: usize,
}
