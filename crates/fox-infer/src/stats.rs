//! What an engine is doing.

use serde::Serialize;

/// A look at an engine between two steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Stats {
    /// Requests that wait.
    pub queued: usize,
    /// Requests whose prompt is being read or that decode.
    pub running: usize,
    /// Those of them that decode.
    pub decoding: usize,
    /// The most that ever decoded at a time.
    pub peak_decoding: usize,
    /// Requests that ended, in any way.
    pub finished: u64,
    /// Requests that were dropped before their end.
    pub cancelled: u64,
    /// Times that a running request was put back to wait because memory was short.
    pub preempted: u64,
    /// Prompt tokens computed.
    pub prefilled_tokens: u64,
    /// Prompt tokens taken from a shared prefix.
    pub shared_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Steps taken: chunks of prompts and decode steps.
    pub steps: u64,
    /// Bytes that caches hold now, shared prefixes included.
    pub cache_bytes: usize,
    /// The most they ever held.
    pub peak_cache_bytes: usize,
    /// Bytes they may hold.
    pub cache_budget: usize,
    /// Sequences that the device keeps at a time; 0 where steps gather their states.
    pub slots: usize,
    /// Pages of the running sequences, per layer and key head.
    pub heads: Vec<Vec<HeadPages>>,
}

impl Stats {
    /// Share of the running sequences' pages that was evicted, from 0 to 1.
    pub fn evicted_fraction(&self) -> f64 {
        let sum = |f: fn(&HeadPages) -> usize| self.heads.iter().flatten().map(f).sum::<usize>();
        let (held, evicted) = (sum(|h| h.held), sum(|h| h.evicted));
        if evicted == 0 { 0.0 } else { evicted as f64 / (held + evicted) as f64 }
    }
}

/// Pages of one key head, over the running sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HeadPages {
    /// In memory.
    pub held: usize,
    /// Evicted.
    pub evicted: usize,
}
