//! A small cache of recently used values.

use std::sync::{Arc, Mutex, PoisonError};

use crate::Result;

/// The values used last, by key: a training run uses the same ones at every step.
pub(crate) struct LruCache<K, V>(Mutex<Vec<(K, Arc<V>)>>);

impl<K, V> Default for LruCache<K, V> {
    fn default() -> Self {
        LruCache(Mutex::default())
    }
}

impl<K: PartialEq, V> LruCache<K, V> {
    const CAPACITY: usize = 64;

    pub(crate) fn get(&self, key: K, make: impl FnOnce() -> Result<V>) -> Result<Arc<V>> {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = match entries.iter().rposition(|(k, _)| *k == key) {
            Some(found) => entries.remove(found),
            None => (key, Arc::new(make()?)),
        };
        let value = Arc::clone(&entry.1);
        entries.push(entry);
        if entries.len() > Self::CAPACITY {
            entries.remove(0);
        }
        Ok(value)
    }

    pub(crate) fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}
