//! Bytes of all decode states.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::recycled::FreePages;

/// Counts the bytes of all live pages and recurrent states made with it, shared pages once. Clones share the count.
#[derive(Clone, Debug, Default)]
pub struct CacheMeter(Arc<Counts>, FreePages);

#[derive(Debug, Default)]
struct Counts {
    now: AtomicUsize,
    peak: AtomicUsize,
}

impl CacheMeter {
    /// Bytes held now.
    pub fn bytes(&self) -> usize {
        self.0.now.load(Ordering::Relaxed)
    }

    /// Largest number of bytes held at the same time.
    pub fn peak(&self) -> usize {
        self.0.peak.load(Ordering::Relaxed)
    }

    /// Free pages, which are not counted.
    pub(crate) fn free_pages(&self) -> &FreePages {
        &self.1
    }

    /// Counts `bytes` until the result is dropped.
    pub fn lease(&self, bytes: usize) -> Lease {
        self.add(bytes);
        Lease { bytes, meter: self.clone() }
    }

    pub(crate) fn add(&self, bytes: usize) {
        let now = self.0.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.0.peak.fetch_max(now, Ordering::Relaxed);
    }

    pub(crate) fn subtract(&self, bytes: usize) {
        self.0.now.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Bytes that count while this exists. A clone counts again.
#[derive(Debug)]
pub struct Lease {
    bytes: usize,
    meter: CacheMeter,
}

impl Lease {
    /// How many they are.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Clone for Lease {
    fn clone(&self) -> Self {
        self.meter.lease(self.bytes)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.meter.subtract(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_count_until_dropped() {
        let meter = CacheMeter::default();
        let first = meter.lease(10);
        let second = first.clone();
        assert_eq!((meter.clone().bytes(), meter.peak()), (20, 20));
        drop(first);
        assert_eq!((meter.bytes(), meter.peak()), (10, 20));
        drop(second);
        assert_eq!((meter.bytes(), meter.peak()), (0, 20));
    }
}
