//! Prompts that were read before, for those that begin alike.

use std::collections::VecDeque;
use std::sync::Arc;

use fox_cache::{Cache, CacheMeter, Lease};

/// States kept, at most. They share their pages, so what counts is the length of the longest.
const MOST: usize = 64;

/// The state after some tokens.
struct Entry {
    tokens: Vec<i32>,
    cache: Cache,
    /// Logits after the last token, where a whole prompt ended.
    logits: Option<Arc<[f32]>>,
    _lease: Lease,
}

/// A state to go on from.
pub(crate) struct PrefixHit {
    pub cache: Cache,
    /// Tokens it has seen.
    pub len: usize,
    /// Logits after the last token, when the state is that of the whole prompt.
    pub logits: Option<Arc<[f32]>>,
}

/// States at the ends of chunks and prompts, the one used last in front.
pub(crate) struct PrefixCache {
    entries: VecDeque<Entry>,
    /// Tokens of a chunk: states in between would cut a later prompt differently than if it were read
    /// from its beginning.
    chunk: usize,
    meter: CacheMeter,
}

impl PrefixCache {
    pub fn new(chunk: usize, meter: CacheMeter) -> Self {
        PrefixCache { entries: VecDeque::new(), chunk, meter }
    }

    /// The state after the longest known beginning of `prompt`.
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

    /// Whether the state after `len` tokens is one of those that are kept: all of the first pieces, then every
    /// second, every fourth and so on, so that one long prompt does not take all places.
    pub fn is_cached_length(&self, len: usize) -> bool {
        let pieces = len / self.chunk;
        let stride = (pieces / 4).checked_ilog2().map_or(1, |log| 1 << log);
        len.is_multiple_of(self.chunk) && pieces.is_multiple_of(stride)
    }

    /// Bytes that keeping a state takes at once, apart from `fixed` for the state itself.
    pub fn cost(tokens: usize, logits: usize) -> usize {
        4 * (tokens + logits)
    }

    /// Keeps the state after `tokens`.
    pub fn keep(&mut self, tokens: &[i32], cache: &Cache, logits: Option<&[f32]>) {
        if let Some(old) = self.entries.iter().position(|entry| entry.tokens == tokens) {
            // One that knows the logits is good for both uses.
            if logits.is_none() || self.entries[old].logits.is_some() {
                return;
            }
            self.entries.remove(old);
        }
        self.entries.truncate(MOST - 1);
        let bytes = Self::cost(tokens.len(), logits.map_or(0, <[f32]>::len));
        self.entries.push_front(Entry {
            tokens: tokens.to_vec(),
            cache: cache.clone(),
            logits: logits.map(Arc::from),
            _lease: self.meter.lease(bytes),
        });
    }

    /// Forgets the state that was not used for longest; whether there was one.
    pub fn forget_one(&mut self) -> bool {
        self.entries.pop_back().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_get_rarer_along_a_prompt() {
        let prefixes = PrefixCache::new(10, CacheMeter::default());
        let places: Vec<usize> = (1..300).filter(|len| prefixes.is_cached_length(*len)).collect();
        let want = [10, 20, 30, 40, 50, 60, 70, 80, 100, 120, 140, 160, 200, 240, 280];
        assert_eq!(places, want);
        assert!(
            (1..10_000_000).step_by(10).filter(|at| prefixes.is_cached_length(at - 1)).count()
                < 100
        );
    }

    fn state() -> Cache {
        Cache::new([], 1, 1, &fox_cpu::device()).unwrap()
    }

    #[test]
    fn what_was_used_last_is_forgotten_last() {
        let mut prefixes = PrefixCache::new(2, CacheMeter::default());
        for first in [1, 2, 3] {
            prefixes.keep(&[first, 0], &state(), None);
        }
        let known = |prefixes: &mut PrefixCache, first| prefixes.find(&[first, 0, 5]).is_some();
        assert!(known(&mut prefixes, 1));
        assert!(prefixes.forget_one());
        assert_eq!([1, 2, 3].map(|first| known(&mut prefixes, first)), [true, false, true]);
    }

    #[test]
    fn logits_are_those_of_the_whole_prompt() {
        let mut prefixes = PrefixCache::new(2, CacheMeter::default());
        prefixes.keep(&[1, 0], &state(), Some(&[0.5]));
        let found = prefixes.find(&[1, 0, 5]).unwrap();
        assert_eq!((found.len, found.logits), (2, None), "the prompt goes on");
        assert_eq!(prefixes.find(&[1, 0]).unwrap().logits.as_deref(), Some(&[0.5][..]));
    }
}
