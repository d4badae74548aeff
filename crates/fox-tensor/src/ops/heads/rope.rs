//! Frequencies of the rotary position embedding.

use std::f64::consts::TAU;

/// Rotary position embedding, half-split pairs over the whole head dim.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of frequencies.
    pub base: f64,
    /// Scaling of low frequencies, for contexts longer than those of the training.
    pub scaling: Option<RopeScaling>,
    /// Factor on all angles: 1 by default, 0 for no positional encoding.
    pub strength: f64,
}

/// RoPE scaling of Llama 3: frequencies with more than `high_freq_factor` periods in the original context are kept,
/// those with less than `low_freq_factor` periods are divided by `factor`, those between are interpolated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeScaling {
    /// Divisor of low frequencies.
    pub factor: f64,
    /// Periods per context below which a frequency is low.
    pub low_freq_factor: f64,
    /// Periods per context above which a frequency is high.
    pub high_freq_factor: f64,
    /// Length of the original context, in tokens.
    pub original_length: usize,
}

impl Rope {
    /// Frequencies of a geometric series, not scaled.
    pub fn new(base: f64) -> Self {
        Rope { base, scaling: None, strength: 1.0 }
    }

    /// Angle per position of pair `m` of a head of width `head_dim`, in radians.
    pub fn frequency(&self, m: usize, head_dim: usize) -> f64 {
        let plain = self.base.powf(-2.0 * m as f64 / head_dim as f64);
        self.strength * self.scaling.map_or(plain, |scaling| scaling.frequency(plain))
    }

    /// Cache key: equal for embeddings with equal frequencies.
    pub fn key(&self) -> [u64; 6] {
        let numbers = match self.scaling {
            None => [0.0; 4],
            Some(s) => [s.factor, s.low_freq_factor, s.high_freq_factor, s.original_length as f64],
        };
        let [a, b, c, d] = numbers.map(f64::to_bits);
        [self.base.to_bits(), self.strength.to_bits(), a, b, c, d]
    }
}

impl RopeScaling {
    fn frequency(&self, plain: f64) -> f64 {
        let waves = self.original_length as f64 * plain / TAU;
        let (low, high) = (self.low_freq_factor, self.high_freq_factor);
        let kept = ((waves - low) / (high - low)).clamp(0.0, 1.0);
        (1.0 - kept) * plain / self.factor + kept * plain
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_rope_frequencies_as_llama3() {
        let scaling = RopeScaling {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_length: 32,
        };
        let rope = Rope { scaling: Some(scaling), ..Rope::new(10_000.0) };
        // 32 tokens hold 5.09 waves of the first pair, 1.61 of the second, 0.51 of the third.
        assert_eq!(rope.frequency(0, 16), 1.0);
        let plain = Rope::new(10_000.0).frequency(1, 16);
        let kept = (32.0 * plain / TAU - 1.0) / 3.0;
        let want = plain * (kept + (1.0 - kept) / 8.0);
        assert!((rope.frequency(1, 16) / want - 1.0).abs() < 1e-14);
        assert_eq!(rope.frequency(2, 16), Rope::new(10_000.0).frequency(2, 16) / 8.0);
    }

    #[test]
    fn rope_strength_scales_every_angle() {
        let (full, half) = (Rope::new(100.0), Rope { strength: 0.5, ..Rope::new(100.0) });
        assert_eq!(half.frequency(3, 16), 0.5 * full.frequency(3, 16));
        assert_ne!(half.key(), full.key());
    }
}
