//! Random numbers whose stream is part of this crate's file formats.
//!
//! The synthetic corpus and the shuffled order must give the same tokens in every version and on every
//! platform, so the generator (SplitMix64) stands here rather than in a dependency that may change it,
//! and nothing drawn from it goes through floating point.

/// One round of SplitMix64's finalizer: a bijection of 64-bit integers that mixes every bit.
pub(crate) fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// SplitMix64.
#[derive(Debug, Clone)]
pub(crate) struct Random {
    state: u64,
}

impl Random {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

    /// A stream of its own for each pair of seed and index.
    pub(crate) fn new(seed: u64, index: u64) -> Self {
        let seed = mix(seed.wrapping_add(Self::STEP));
        Self { state: mix(seed ^ mix(index.wrapping_mul(Self::STEP))) }
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(Self::STEP);
        mix(self.state)
    }

    /// A number below `bound` (which must not be 0). The bias is below `bound / 2^64`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        debug_assert!(bound > 0);
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_never_changes() {
        let mut random = Random::new(1, 2);
        let drawn: Vec<u64> = (0..3).map(|_| random.below(1000)).collect();
        assert_eq!(drawn, [36, 565, 203]);
    }

    #[test]
    fn below_covers_its_range_evenly() {
        let mut random = Random::new(7, 0);
        let mut counts = [0_u32; 10];
        for _ in 0..10_000 {
            counts[random.below(10) as usize] += 1;
        }
        assert!(counts.iter().all(|c| (900..1100).contains(c)), "{counts:?}");
    }
}
