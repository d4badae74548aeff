//! The values that were used last.

use std::sync::{Arc, Mutex, PoisonError};

use crate::Result;

/// Values by key, the ones used last: a training run asks for the same ones at every step.
pub(crate) struct Recent<K, V>(Mutex<Vec<(K, Arc<V>)>>);

impl<K, V> Default for Recent<K, V> {
    fn default() -> Self {
        Recent(Mutex::default())
    }
}

impl<K: PartialEq, V> Recent<K, V> {
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
