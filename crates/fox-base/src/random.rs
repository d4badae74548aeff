//! SplitMix64: the same numbers in every version and on every machine.
//!
//! Initial weights, the order of training data, the synthetic corpus, sampled tokens and the test cases of every op are
//! drawn from it. The generator is not a dependency, whose new version might draw other numbers.

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
/// Each output is a bijective hash of a counter: every seed is a good one, and any position of the sequence is reached
/// in constant time.
#[derive(Clone, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// A sequence that depends on `seed` alone.
    pub fn new(seed: u64) -> Self {
        SplitMix64(seed)
    }

    /// The next 64 bits.
    #[inline]
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// The same sequence after `draws` more numbers.
    pub fn after(&self, draws: u64) -> Self {
        SplitMix64(self.0.wrapping_add(STEP.wrapping_mul(draws)))
    }

    /// A number below `bound` (which must not be 0). The bias is below `bound / 2^64`.
    pub fn below(&mut self, bound: u64) -> u64 {
        debug_assert!(bound > 0);
        ((u128::from(self.bits()) * u128::from(bound)) >> 64) as u64
    }

    /// Uniform in `[0, 1)`.
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Standard normal, by the Box-Muller transform; uses two draws.
    pub fn normal(&mut self) -> f64 {
        // 1 - u is never 0, so the logarithm is finite.
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// Standard normal values rounded to f32, so that devices of every precision get the same input.
    pub fn normals(&mut self, len: usize) -> Vec<f64> {
        (0..len).map(|_| f64::from(self.normal() as f32)).collect()
    }

    /// An integer in `low..=high`.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        low + (self.bits() % (high - low + 1) as u64) as usize
    }

    /// True with probability `p`.
    pub fn chance(&mut self, p: f64) -> bool {
        self.uniform() < p
    }

    /// One of the items. Panics when there are none.
    pub fn pick<T: Clone>(&mut self, items: &[T]) -> T {
        items[self.between(0, items.len() - 1)].clone()
    }

    /// Uniform in `(0, 1]`: safe for a logarithm.
    pub fn uniform_positive(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Outputs of the published C version for the seed 1234567.
    #[test]
    fn matches_the_published_generator() {
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
    fn skips_ahead_in_constant_time() {
        let mut random = SplitMix64::new(u64::MAX - 3);
        let start = random.clone();
        for draws in 0..20 {
            assert_eq!(start.after(draws).bits(), random.bits(), "after {draws}");
        }
    }

    #[test]
    fn below_is_uniform() {
        let mut random = SplitMix64::new(7);
        let mut counts = [0_u32; 10];
        for _ in 0..10_000 {
            counts[random.below(10) as usize] += 1;
        }
        assert!(counts.iter().all(|c| (900..1100).contains(c)), "{counts:?}");
    }

    #[test]
    fn uniform_positive_excludes_zero() {
        let (mut a, mut b) = (SplitMix64::new(5), SplitMix64::new(5));
        for _ in 0..1000 {
            let (below, above) = (a.uniform(), b.uniform_positive());
            assert!((0.0..1.0).contains(&below) && above > 0.0 && above <= 1.0);
            assert_eq!(above - below, 1.0 / (1u64 << 53) as f64);
        }
    }

    /// Values from an independent program: the cases of every op are the same in every version.
    #[test]
    fn distributions_never_change() {
        let wanted = [-0.150_789_305_567_741_4, 1.235_966_682_434_082, -0.457_846_909_761_428_83];
        assert_eq!(SplitMix64::new(3).normals(3), wanted);
        let mut random = SplitMix64::new(3);
        assert_eq!([(); 6].map(|()| random.between(2, 9)), [7, 3, 3, 9, 8, 9]);
    }
}
