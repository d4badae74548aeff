//! What the synthetic corpus is like.

use fox_base::random::{SplitMix64, mix};
use serde::{Deserialize, Serialize};

use super::words::ACTIONS;

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
    /// How many circles the people of a document form; 2 to 5. The first has one person, each of the others twice as
    /// many as the one before, and all circles have as many facts.
    pub circles: u32,
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
        Self::DEFAULT
    }
}

impl SyntheticConfig {
    /// What recipes read that name no data and change nothing.
    pub const DEFAULT: Self = Self {
        seed: 0,
        documents: 1 << 32,
        document_len: 1 << 12,
        circles: 4,
        actions: 16,
        filler_percent: 30,
        shortest_chapter: 32,
        octaves: 6,
    };

    /// The same kind of corpus with other documents, for evaluation.
    pub fn held_out(self) -> Self {
        Self { seed: mix(self.seed ^ 0x6865_6c64_6f75_7421), ..self }
    }

    /// The first key whose number is out of its range, and what is wrong with it.
    ///
    /// # Errors
    /// That key and the words.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        let ranged = self.in_range();
        let pairs = [
            ("circles", self.circles as u64, ranged.circles as u64),
            ("actions", self.actions as u64, ranged.actions as u64),
            ("filler_percent", self.filler_percent, ranged.filler_percent),
            ("shortest_chapter", self.shortest_chapter, ranged.shortest_chapter),
            ("octaves", self.octaves.into(), ranged.octaves.into()),
        ];
        match pairs.into_iter().find(|(_, asked, ranged)| asked != ranged) {
            Some((key, asked, ranged)) => {
                let bound = if asked < ranged { "at least" } else { "at most" };
                Err((key, format!("is {asked}, but must be {bound} {ranged}")))
            }
            None => Ok(()),
        }
    }

    /// This configuration with every number brought into its range, so that generating cannot fail.
    pub(super) fn in_range(self) -> Self {
        Self {
            circles: self.circles.clamp(2, 5),
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

    /// How many people there are: 3, 7, 15 or 31.
    pub fn people(&self) -> usize {
        (1 << self.in_range().circles) - 1
    }

    /// The people in the random order of a document, circle after circle.
    pub(super) fn cast(&self, random: &mut SplitMix64) -> Vec<usize> {
        let mut cast: Vec<usize> = (0..self.people()).collect();
        for i in 1..cast.len() {
            cast.swap(i, random.below(i as u64 + 1) as usize);
        }
        cast
    }

    /// The person of a fact, from the cast of its document: a circle evenly, then one of its people evenly.
    pub(super) fn person(&self, cast: &[usize], random: &mut SplitMix64) -> usize {
        let size = 1 << random.below(u64::from(self.circles));
        // The circles before it have one person fewer than it has.
        cast[size - 1 + random.below(size as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::super::words::PEOPLE;
    use super::*;

    #[test]
    fn circles_have_equal_facts_and_doubling_people() {
        let config = SyntheticConfig { circles: 3, ..SyntheticConfig::default() };
        let mut random = SplitMix64::new(1);
        let cast = config.cast(&mut random);
        let mut counts = [0_u32; 7];
        for _ in 0..120_000 {
            counts[config.person(&cast, &mut random)] += 1;
        }
        for (i, person) in cast.iter().enumerate() {
            let want = [40_000_u32, 20_000, 20_000, 10_000, 10_000, 10_000, 10_000][i];
            // Four standard deviations of the largest.
            assert!(counts[*person].abs_diff(want) < 660, "{cast:?} {counts:?}");
        }
    }

    #[test]
    fn any_person_can_be_first() {
        let config = SyntheticConfig::default();
        let mut random = SplitMix64::new(3);
        let mut counts = [0_u32; 15];
        for _ in 0..30_000 {
            counts[config.cast(&mut random)[0]] += 1;
        }
        assert!(counts.iter().all(|count| count.abs_diff(2000) < 180), "{counts:?}");
        assert!(PEOPLE.len() >= SyntheticConfig { circles: 99, ..config }.people());
    }

    #[test]
    fn chapter_lengths_follow_their_distribution() {
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
