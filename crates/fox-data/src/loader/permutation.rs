//! A pseudorandom permutation of `0..n` without a table: any element is computed alone.

use fox_base::random::{STEP, mix};

/// A Feistel network over the smallest even number of bits that covers `n`, walked until it lands inside.
#[derive(Debug, Clone, Copy)]
pub(super) struct Permutation {
    n: u64,
    half_bits: u32,
    keys: [u64; Self::ROUNDS],
}

impl Permutation {
    const ROUNDS: usize = 6;

    /// The permutation of `0..n` for a seed and an epoch.
    pub(super) fn new(n: u64, seed: u64, epoch: u64) -> Self {
        let bits = u64::BITS - n.saturating_sub(1).leading_zeros();
        let half_bits = bits.div_ceil(2).max(1);
        let mut key = mix(seed ^ mix(epoch.wrapping_add(0x7368_7566_666c_6521)));
        let keys = std::array::from_fn(|_| {
            key = mix(key.wrapping_add(STEP));
            key
        });
        Self { n, half_bits, keys }
    }

    /// Where `x` goes; `x` must be below `n`.
    pub(super) fn apply(&self, x: u64) -> u64 {
        debug_assert!(x < self.n);
        let mut y = self.shuffle(x);
        // At most 4n values, so it takes 4 rounds on average; a cycle must come back inside, at the latest at `x`.
        while y >= self.n {
            y = self.shuffle(y);
        }
        y
    }

    fn shuffle(&self, x: u64) -> u64 {
        let mask = (1_u64 << self.half_bits) - 1;
        let (mut left, mut right) = (x >> self.half_bits, x & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        left << self.half_bits | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permutation_is_a_bijection() {
        for n in [1, 2, 3, 5, 64, 65, 1000] {
            let permutation = Permutation::new(n, 7, 3);
            let mut seen: Vec<u64> = (0..n).map(|x| permutation.apply(x)).collect();
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..n), "{n}");
        }
    }

    #[test]
    fn permutation_depends_on_seed_and_epoch() {
        let order = |seed, epoch| {
            let permutation = Permutation::new(10, seed, epoch);
            (0..10).map(|x| permutation.apply(x)).collect::<Vec<_>>()
        };
        assert_eq!(order(0, 0), [2, 3, 0, 1, 8, 4, 7, 6, 5, 9]);
        assert_ne!(order(0, 0), order(0, 1));
        assert_ne!(order(0, 0), order(1, 0));
    }

    #[test]
    fn permutation_separates_neighbours() {
        let n = 10_000;
        let permutation = Permutation::new(n, 1, 0);
        let distance: u64 =
            (1..n).map(|x| permutation.apply(x).abs_diff(permutation.apply(x - 1))).sum();
        let mean = distance as f64 / n as f64;
        // Two random places are n/3 apart on average.
        assert!((mean / (n as f64 / 3.0) - 1.0).abs() < 0.05, "{mean}");
    }

    #[test]
    fn permutes_the_largest_range() {
        let permutation = Permutation::new(1 << 46, 1, 0);
        assert!(permutation.apply((1 << 46) - 1) < 1 << 46);
        let permutation = Permutation::new(u64::MAX, 1, 0);
        assert!(permutation.apply(5) < u64::MAX);
    }
}
