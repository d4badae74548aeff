//! A small random generator with the same stream on every machine: splitmix64 and Box-Muller.

/// Deterministic pseudo-random numbers for tests and benchmarks. Not for anything secret.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A stream that depends on `seed` alone.
    pub fn new(seed: u64) -> Self {
        Rng(seed)
    }

    /// The next 64 bits (splitmix64).
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `[0, 1)`.
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
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
