//! Free ranges of the blocks from the driver: a best-fit allocator.
//!
//! A request gets the smallest free range that holds it, and the rest stays free; freed ranges merge with free
//! neighbours. So memory of large activations serves for many small gradients later in the same step.

use std::collections::{BTreeMap, BTreeSet};

/// Ranges of device addresses.
#[derive(Debug, Default)]
pub(crate) struct Arena {
    /// Blocks from the driver: start and bytes.
    blocks: BTreeMap<u64, usize>,
    /// Free ranges: start and bytes. No two of a block touch.
    free: BTreeMap<u64, usize>,
    /// Free ranges as (bytes, start).
    by_size: BTreeSet<(usize, u64)>,
}

impl Arena {
    /// Allocates `bytes`, if a free range holds them.
    pub(crate) fn take(&mut self, bytes: usize) -> Option<u64> {
        let &(size, begin) = self.by_size.range((bytes, 0)..).next()?;
        self.forget(begin, size);
        if size > bytes {
            self.note(begin + bytes as u64, size - bytes);
        }
        Some(begin)
    }

    /// Frees a range of [`Arena::take`].
    pub(crate) fn put(&mut self, begin: u64, bytes: usize) {
        let (mut begin, mut bytes) = (begin, bytes);
        if let Some((&before, &size)) = self.free.range(..begin).next_back()
            && before + size as u64 == begin
            && !self.blocks.contains_key(&begin)
        {
            self.forget(before, size);
            (begin, bytes) = (before, bytes + size);
        }
        let end = begin + bytes as u64;
        if let Some(&size) = self.free.get(&end)
            && !self.blocks.contains_key(&end)
        {
            self.forget(end, size);
            bytes += size;
        }
        self.note(begin, bytes);
    }

    /// Adds a free block from the driver.
    pub(crate) fn add_block(&mut self, begin: u64, bytes: usize) {
        self.blocks.insert(begin, bytes);
        self.note(begin, bytes);
    }

    /// Removes and returns the blocks that are entirely free.
    pub(crate) fn remove_unused(&mut self) -> Vec<(u64, usize)> {
        let whole = |(begin, bytes): (&u64, &usize)| {
            (self.free.get(begin) == Some(bytes)).then_some((*begin, *bytes))
        };
        let unused: Vec<(u64, usize)> = self.blocks.iter().filter_map(whole).collect();
        for &(begin, bytes) in &unused {
            self.blocks.remove(&begin);
            self.forget(begin, bytes);
        }
        unused
    }

    fn note(&mut self, begin: u64, bytes: usize) {
        self.free.insert(begin, bytes);
        self.by_size.insert((bytes, begin));
    }

    fn forget(&mut self, begin: u64, bytes: usize) {
        self.free.remove(&begin);
        self.by_size.remove(&(bytes, begin));
    }
}

#[cfg(test)]
mod tests {
    use fox_tensor::cases::Rng;

    use super::*;

    #[test]
    fn ranges_split_and_merge() {
        let mut arena = Arena::default();
        assert_eq!(arena.take(10), None);
        // Two blocks that happen to touch stay two.
        arena.add_block(1000, 100);
        arena.add_block(1100, 60);
        assert_eq!(arena.take(50), Some(1100));
        let [a, b, c] = [40, 30, 30].map(|bytes| arena.take(bytes).unwrap());
        assert_eq!([a, b, c, arena.take(11).unwrap_or(0)], [1000, 1040, 1070, 0]);
        arena.put(a, 40);
        arena.put(c, 30);
        assert_eq!(arena.take(70), None);
        arena.put(b, 30);
        assert!(arena.remove_unused() == [(1000, 100)]);
        arena.put(1100, 50);
        assert_eq!(arena.take(60), Some(1100));
    }

    #[test]
    fn allocations_never_overlap() {
        let (mut arena, mut rng) = (Arena::default(), Rng::new(3));
        for block in 0..4u64 {
            arena.add_block(block << 20, 1 << 20);
        }
        let mut held: Vec<(u64, usize)> = Vec::new();
        for _ in 0..5000 {
            let bytes = 512 * rng.between(1, 600);
            match arena.take(bytes) {
                Some(begin) if !rng.chance(0.1) => {
                    let end = begin + bytes as u64;
                    assert!(begin >> 20 == (end - 1) >> 20, "across two blocks");
                    let apart = |(b, n): &(u64, usize)| end <= *b || b + *n as u64 <= begin;
                    assert!(held.iter().all(apart));
                    held.push((begin, bytes));
                }
                Some(begin) => arena.put(begin, bytes),
                None => {
                    let (begin, bytes) = held.swap_remove(rng.between(0, held.len() - 1));
                    arena.put(begin, bytes);
                }
            }
        }
        for (begin, bytes) in held {
            arena.put(begin, bytes);
        }
        assert_eq!(arena.remove_unused().len(), 4);
    }
}
