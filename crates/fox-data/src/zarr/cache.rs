//! Decoded blocks kept for the next reader, up to a number of bytes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A block: chunk row, chunk column, number inside the chunk.
pub(super) type BlockKey = (u64, u64, usize);

/// The blocks used most recently.
#[derive(Debug)]
pub(super) struct BlockCache {
    capacity: usize,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    blocks: HashMap<BlockKey, (Arc<Vec<u8>>, u64)>,
    bytes: usize,
    clock: u64,
}

impl BlockCache {
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, inner: Mutex::default() }
    }

    /// A panic elsewhere cannot leave the map inconsistent in a way that matters: at worst a block is lost.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn get(&self, key: BlockKey) -> Option<Arc<Vec<u8>>> {
        let mut inner = self.lock();
        inner.clock += 1;
        let now = inner.clock;
        let (block, used) = inner.blocks.get_mut(&key)?;
        *used = now;
        Some(Arc::clone(block))
    }

    pub(super) fn insert(&self, key: BlockKey, block: Arc<Vec<u8>>) {
        let mut inner = self.lock();
        inner.clock += 1;
        let now = inner.clock;
        inner.bytes += block.len();
        if let Some((old, _)) = inner.blocks.insert(key, (block, now)) {
            inner.bytes -= old.len();
        }
        while inner.bytes > self.capacity && inner.blocks.len() > 1 {
            // Blocks are few and large, so looking at all of them costs little beside decoding one.
            let oldest =
                inner.blocks.iter().min_by_key(|(_, (_, used))| *used).map(|(key, _)| *key);
            if let Some((old, _)) = oldest.and_then(|key| inner.blocks.remove(&key)) {
                inner.bytes -= old.len();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evicts_the_least_recently_used_block() {
        let cache = BlockCache::new(20);
        let block = |n| Arc::new(vec![0; n]);
        cache.insert((0, 0, 0), block(10));
        cache.insert((0, 0, 1), block(10));
        assert!(cache.get((0, 0, 0)).is_some());
        cache.insert((0, 0, 2), block(5));
        assert!(cache.get((0, 0, 1)).is_none());
        assert!(cache.get((0, 0, 0)).is_some());
        cache.insert((9, 9, 9), block(100));
        assert!(cache.get((9, 9, 9)).is_some());
        assert!(cache.get((0, 0, 2)).is_none());
    }
}
