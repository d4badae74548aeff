//! What the synthetic corpus is like.

use fox_base::random::{SplitMix64, mix};
use serde::{Deserialize, Serialize};

use super::words::{ACTIONS, PEOPLE};

/// The least common multiple of 1 to 32: every `ZIPF / rank` is a whole number.
const ZIPF: u64 = 144_403_552_893_600;

/// What the synthetic corpus is like. The default is what `fox demo` trains on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SyntheticConfig {
    /// Every document is a function of this seed and its index.
    pub seed: u64,
    /// How many documents the corpus has.
    pub documents: u64,
    /// Tokens in every document.
    pub document_len: u64,
    /// How many people occur; 2 to 32. Person number n is mentioned in proportion to 1/n.
    pub people: usize,
    /// How many things a person may do; 2 to 32.
    pub actions: usize,
    /// How many of a hundred sentences are filler; 0 to 99.
    pub filler_percent: u64,
    /// Shortest chapter, in tokens; at least 1.
    pub shortest_chapter: u64,
    /// How many times a chapter can double: the longest has `shortest_chapter * 2^octaves - 1` tokens. 1 to 40.
    pub octaves: u32,
}

impl Default for SyntheticConfig {
    fn default() -> Self {
        Self {
            seed: 0,
            documents: 1 << 32,
            document_len: 1 << 12,
            people: 16,
            actions: 16,
            filler_percent: 30,
            shortest_chapter: 32,
            octaves: 6,
        }
    }
}

impl SyntheticConfig {
    /// The same kind of corpus with other documents, for evaluation.
    pub fn held_out(self) -> Self {
        Self { seed: mix(self.seed ^ 0x6865_6c64_6f75_7421), ..self }
    }

    /// This configuration with every number brought into its range, so that generating cannot fail.
    pub(super) fn in_range(self) -> Self {
        Self {
            people: self.people.clamp(2, PEOPLE.len()),
            actions: self.actions.clamp(2, ACTIONS.len()),
            filler_percent: self.filler_percent.min(99),
            shortest_chapter: self.shortest_chapter.clamp(1, 1 << 20),
            octaves: self.octaves.clamp(1, 40),
            ..self
        }
    }

    /// The length of a chapter: an octave evenly, then a length inside it evenly, so that each doubling of the
    /// length is equally likely (log-uniform by steps).
    pub(super) fn chapter_len(&self, random: &mut SplitMix64) -> u64 {
        let low = self.shortest_chapter << random.below(u64::from(self.octaves));
        low + random.below(low)
    }

    /// Probability that a chapter has at most `len` tokens.
    pub(super) fn chapter_within(&self, len: u64) -> f64 {
        if len < self.shortest_chapter {
            return 0.0;
        }
        let octave = (len / self.shortest_chapter).ilog2();
        if octave >= self.octaves {
            return 1.0;
        }
        let low = self.shortest_chapter << octave;
        let inside = (len - low + 1) as f64 / low as f64;
        (f64::from(octave) + inside) / f64::from(self.octaves)
    }

    /// One of the people, by index.
    pub(super) fn person(&self, random: &mut SplitMix64) -> usize {
        let mut drawn = random.below(self.mentions());
        (0..self.people)
            .find(|&person| {
                let weight = ZIPF / (person as u64 + 1);
                let here = drawn < weight;
                drawn = drawn.saturating_sub(weight);
                here
            })
            .unwrap_or(0)
    }

    /// Part of all facts that are about this person.
    pub(super) fn person_share(&self, person: usize) -> f64 {
        (ZIPF / (person as u64 + 1)) as f64 / self.mentions() as f64
    }

    /// Sum of the people's weights.
    fn mentions(&self) -> u64 {
        (1..=self.people as u64).map(|rank| ZIPF / rank).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_are_mentioned_in_proportion_to_their_rank() {
        let config = SyntheticConfig { people: 3, ..SyntheticConfig::default() };
        let shares: Vec<f64> = (0..3).map(|p| config.person_share(p)).collect();
        assert!((shares[0] - 6.0 / 11.0).abs() < 1e-12 && (shares[2] - 2.0 / 11.0).abs() < 1e-12);
        let mut random = SplitMix64::new(1);
        let mut counts = [0_u32; 3];
        for _ in 0..110_000 {
            counts[config.person(&mut random)] += 1;
        }
        for (count, want) in counts.iter().zip([60_000_u32, 30_000, 20_000]) {
            // Four standard deviations of the largest.
            assert!(count.abs_diff(want) < 660, "{counts:?}");
        }
        for rank in 1..=PEOPLE.len() as u64 {
            assert_eq!(ZIPF % rank, 0);
        }
    }

    #[test]
    fn the_distribution_of_chapter_lengths_is_the_one_drawn_from() {
        let config =
            SyntheticConfig { shortest_chapter: 3, octaves: 3, ..SyntheticConfig::default() };
        let mut random = SplitMix64::new(2);
        let drawn: Vec<u64> = (0..30_000).map(|_| config.chapter_len(&mut random)).collect();
        for len in 0..30 {
            let within = drawn.iter().filter(|d| **d <= len).count() as f64 / 30_000.0;
            let want = config.chapter_within(len);
            assert!((within - want).abs() < 0.012, "{len}: {within} {want}");
        }
        assert_eq!((config.chapter_within(2), config.chapter_within(23)), (0.0, 1.0));
    }
}
