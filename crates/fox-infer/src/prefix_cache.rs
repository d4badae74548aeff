//! The prefix cache: KV states of earlier prompts, for prompts with a common prefix.

use std::collections::VecDeque;
use std::sync::Arc;

use fox_cache::{Cache, CacheMeter, Lease};

/// Largest number of cached states. They share pages, so the longest one determines the size.
const CAPACITY: usize = 64;

/// The state after a prefix.
struct Entry {
    tokens: Vec<i32>,
    cache: Cache,
    /// Logits after the last token, if the prefix is a complete prompt.
    logits: Option<Arc<[f32]>>,
    _lease: Lease,
}

/// A cached prefix of a prompt.
pub(crate) struct PrefixHit {
    pub cache: Cache,
    /// Tokens of the prefix.
    pub len: usize,
    /// Logits after the last token, if the prefix is the complete prompt.
    pub logits: Option<Arc<[f32]>>,
}

/// States at the ends of prefill chunks and of prompts, most recently used first.
pub(crate) struct PrefixCache {
    entries: VecDeque<Entry>,
    /// Tokens of a prefill chunk. A prefix of another length would split a later prompt differently, with other bits.
    chunk: usize,
    meter: CacheMeter,
}

impl PrefixCache {
    pub fn new(chunk: usize, meter: CacheMeter) -> Self {
        PrefixCache { entries: VecDeque::new(), chunk, meter }
    }

    /// The longest cached prefix of `prompt`.
    pub fn find(&mut self, prompt: &[i32]) -> Option<PrefixHit> {
        let usable = |entry: &Entry| match entry.tokens.len() {
            len if len == prompt.len() => entry.logits.is_some() && entry.tokens == prompt,
            len => len.is_multiple_of(self.chunk) && prompt.starts_with(&entry.tokens),
        };
        let candidates = self.entries.iter().enumerate().filter(|(_, entry)| usable(entry));
        let (at, _) = candidates.max_by_key(|(_, entry)| entry.tokens.len())?;
        let entry = self.entries.remove(at)?;
        let len = entry.tokens.len();
        let logits = entry.logits.clone().filter(|_| len == prompt.len());
        let found = PrefixHit { cache: entry.cache.clone(), len, logits };
        self.entries.push_front(entry);
        Some(found)
    }

    /// Whether prefixes of `len` tokens are cached: after each of the first chunks, then every second, every fourth and so
    /// on, so that one long prompt does not fill the cache.
    pub fn is_cached_length(&self, len: usize) -> bool {
        let chunks = len / self.chunk;
        let stride = (chunks / 4).checked_ilog2().map_or(1, |log| 1 << log);
        len.is_multiple_of(self.chunk) && chunks.is_multiple_of(stride)
    }

    /// Bytes of an entry besides its KV state.
    pub fn cost(tokens: usize, logits: usize) -> usize {
        4 * (tokens + logits)
    }

    /// Caches the state after `tokens`.
    pub fn insert(&mut self, tokens: &[i32], cache: &Cache, logits: Option<&[f32]>) {
        if let Some(old) = self.entries.iter().position(|entry| entry.tokens == tokens) {
            // An entry with logits serves complete prompts and prefixes.
            if logits.is_none() || self.entries[old].logits.is_some() {
                return;
            }
            self.entries.remove(old);
        }
        self.entries.truncate(CAPACITY - 1);
        let bytes = Self::cost(tokens.len(), logits.map_or(0, <[f32]>::len));
        self.entries.push_front(Entry {
            tokens: tokens.to_vec(),
            cache: cache.clone(),
            logits: logits.map(Arc::from),
            _lease: self.meter.lease(bytes),
        });
    }

    /// Evicts the least recently used state; returns whether there was one.
    pub fn evict_one(&mut self) -> bool {
        self.entries.pop_back().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cached_lengths_get_sparser_along_a_prompt() {
        let prefixes = PrefixCache::new(10, CacheMeter::default());
        let lengths: Vec<usize> = (1..300).filter(|len| prefixes.is_cached_length(*len)).collect();
        let want = [10, 20, 30, 40, 50, 60, 70, 80, 100, 120, 140, 160, 200, 240, 280];
        assert_eq!(lengths, want);
        assert!(
            (1..10_000_000).step_by(10).filter(|at| prefixes.is_cached_length(at - 1)).count()
                < 100
        );
    }

    #[test]
    fn entries_cost_ids_and_logits() {
        let meter = CacheMeter::default();
        let mut prefixes = PrefixCache::new(2, meter.clone());
        prefixes.insert(&[1, 2, 3], &state(), Some(&[0.0; 5]));
        assert_eq!((PrefixCache::cost(3, 5), meter.bytes()), (32, 32));
        prefixes.evict_one();
        assert_eq!(meter.bytes(), 0);
    }

    fn state() -> Cache {
        Cache::new([], 1, 1, &fox_cpu::device()).unwrap()
    }

    #[test]
    fn least_recently_used_is_evicted_first() {
        let mut prefixes = PrefixCache::new(2, CacheMeter::default());
        for first in [1, 2, 3] {
            prefixes.insert(&[first, 0], &state(), None);
        }
        let known = |prefixes: &mut PrefixCache, first| prefixes.find(&[first, 0, 5]).is_some();
        assert!(known(&mut prefixes, 1));
        assert!(prefixes.evict_one());
        assert_eq!([1, 2, 3].map(|first| known(&mut prefixes, first)), [true, false, true]);
    }

    #[test]
    fn logits_only_for_complete_prompts() {
        let mut prefixes = PrefixCache::new(2, CacheMeter::default());
        prefixes.insert(&[1, 0], &state(), Some(&[0.5]));
        let found = prefixes.find(&[1, 0, 5]).unwrap();
        assert_eq!((found.len, found.logits), (2, None), "the prompt is longer");
        assert_eq!(prefixes.find(&[1, 0]).unwrap().logits.as_deref(), Some(&[0.5][..]));
    }
}
