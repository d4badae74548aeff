//! The random streams that are part of this crate's file formats.
//!
//! The synthetic corpus must give the same tokens in every version and on every platform, so nothing drawn
//! from a stream goes through floating point.

use fox_base::random::{STEP, SplitMix64, mix};

/// The random stream of a pair of seed and index.
pub(crate) fn stream(seed: u64, index: u64) -> SplitMix64 {
    let seed = mix(seed.wrapping_add(STEP));
    SplitMix64::new(mix(seed ^ mix(index.wrapping_mul(STEP))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_stream_is_pinned() {
        let mut random = stream(1, 2);
        let drawn: Vec<u64> = (0..3).map(|_| random.below(1000)).collect();
        assert_eq!(drawn, [36, 565, 203]);
    }
}
