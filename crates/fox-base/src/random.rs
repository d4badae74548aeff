//! SplitMix64: the same numbers in every version and on every machine.
//!
//! Initial weights, the order of training data, the synthetic corpus and the cases of every op are drawn
//! from it, so the generator stands here rather than in a dependency that may change it.

/// The distance between two states of [`SplitMix64`]: 2^64 over the golden ratio, made odd.
pub const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64's finalizer: a bijection of 64-bit integers that mixes every bit.
#[inline]
pub fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Deterministic pseudo-random numbers. Not for anything secret.
///
/// Each output is a bijective hash of a counter, so any seed is a good one and the stream can be entered at
/// any place.
#[derive(Clone, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// A stream that depends on `seed` alone.
    pub fn new(seed: u64) -> Self {
        SplitMix64(seed)
    }

    /// The next 64 bits.
    #[inline]
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// The same stream after `draws` more numbers.
    pub fn after(&self, draws: u64) -> Self {
        SplitMix64(self.0.wrapping_add(STEP.wrapping_mul(draws)))
    }

    /// A number below `bound` (which must not be 0). The bias is below `bound / 2^64`.
    pub fn below(&mut self, bound: u64) -> u64 {
        debug_assert!(bound > 0);
        ((u128::from(self.bits()) * u128::from(bound)) >> 64) as u64
    }

    /// Uniform in `[0, 1)`.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform in `(0, 1]`: safe for a logarithm.
    pub fn positive_unit(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Outputs of the published C version for the seed 1234567.
    #[test]
    fn the_stream_is_that_of_the_reference() {
        let mut random = SplitMix64::new(1_234_567);
        let drawn: [u64; 5] = std::array::from_fn(|_| random.bits());
        assert_eq!(
            drawn,
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423,
                4_593_380_528_125_082_431,
                16_408_922_859_458_223_821,
            ]
        );
    }

    #[test]
    fn a_stream_can_be_entered_anywhere() {
        let mut random = SplitMix64::new(u64::MAX - 3);
        let start = random.clone();
        for draws in 0..20 {
            assert_eq!(start.after(draws).bits(), random.bits(), "after {draws}");
        }
    }

    #[test]
    fn below_covers_its_range_evenly() {
        let mut random = SplitMix64::new(7);
        let mut counts = [0_u32; 10];
        for _ in 0..10_000 {
            counts[random.below(10) as usize] += 1;
        }
        assert!(counts.iter().all(|c| (900..1100).contains(c)), "{counts:?}");
    }

    #[test]
    fn units_differ_by_their_last_place_only() {
        let (mut a, mut b) = (SplitMix64::new(5), SplitMix64::new(5));
        for _ in 0..1000 {
            let (below, above) = (a.unit(), b.positive_unit());
            assert!((0.0..1.0).contains(&below) && above > 0.0 && above <= 1.0);
            assert_eq!(above - below, 1.0 / (1u64 << 53) as f64);
        }
    }
}
