//! A small random generator with the same stream on every machine: SplitMix64 and Box-Muller.

use fox_base::random::SplitMix64;

/// Deterministic pseudo-random numbers for tests and benchmarks. Not for anything secret.
#[derive(Clone, Debug)]
pub struct Rng(SplitMix64);

impl Rng {
    /// A stream that depends on `seed` alone.
    pub fn new(seed: u64) -> Self {
        Rng(SplitMix64::new(seed))
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0.bits()
    }

    /// Uniform in `[0, 1)`.
    pub fn uniform(&mut self) -> f64 {
        self.0.unit()
    }

    /// Standard normal.
    pub fn normal(&mut self) -> f64 {
        // 1 - u is never 0, so the logarithm is finite.
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
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

    /// Normal values that an f32 holds exactly, so that every backend sees the same input.
    pub fn normals(&mut self, len: usize) -> Vec<f64> {
        (0..len).map(|_| round(self.normal())).collect()
    }
}

/// The nearest f32.
pub fn round(x: f64) -> f64 {
    f64::from(x as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first numbers for a seed, from an independent program: cases are the same in every version.
    #[test]
    fn the_streams_never_change() {
        let wanted = [-0.150_789_305_567_741_4, 1.235_966_682_434_082, -0.457_846_909_761_428_83];
        assert_eq!(Rng::new(3).normals(3), wanted);
        let mut rng = Rng::new(3);
        assert_eq!([(); 6].map(|()| rng.between(2, 9)), [7, 3, 3, 9, 8, 9]);
    }
}
