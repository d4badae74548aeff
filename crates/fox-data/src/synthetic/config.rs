//! What the synthetic corpus is like.

use fox_base::random::{SplitMix64, mix};
use serde::{Deserialize, Serialize};

use super::words::{ACTIONS, PEOPLE};

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
    /// How many people occur; 2 to 32.
    pub people: usize,
    /// How many of them are the main characters of a document; at least 1, and fewer than all.
    pub main_people: usize,
    /// How many of a hundred facts are about the main characters; 1 to 99.
    pub main_percent: u64,
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
        people: 16,
        main_people: 4,
        main_percent: 70,
        actions: 16,
        filler_percent: 30,
        shortest_chapter: 32,
        octaves: 6,
    };

    /// The same kind of corpus with other documents, for evaluation.
    pub fn held_out(self) -> Self {
        Self { seed: mix(self.seed ^ 0x6865_6c64_6f75_7421), ..self }
    }

    /// This configuration with every number brought into its range, so that generating cannot fail.
    pub(super) fn in_range(self) -> Self {
        let people = self.people.clamp(2, PEOPLE.len());
        Self {
            people,
            main_people: self.main_people.clamp(1, people - 1),
            main_percent: self.main_percent.clamp(1, 99),
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

    /// The people in an order of their own for a document, the main characters first.
    pub(super) fn cast(&self, random: &mut SplitMix64) -> Vec<usize> {
        let mut cast: Vec<usize> = (0..self.people).collect();
        for i in 0..self.main_people {
            cast.swap(i, i + random.below((self.people - i) as u64) as usize);
        }
        cast
    }

    /// The person of a fact, from the cast of its document.
    pub(super) fn person(&self, cast: &[usize], random: &mut SplitMix64) -> usize {
        let (main, others) = cast.split_at(self.main_people);
        let group = if random.below(100) < self.main_percent { main } else { others };
        group[random.below(group.len() as u64) as usize]
    }

    /// Part of all facts that are about a person who is a main character, and about one who is not.
    pub(super) fn person_shares(&self) -> [f64; 2] {
        let main = self.main_percent as f64 / 100.0;
        [main / self.main_people as f64, (1.0 - main) / (self.people - self.main_people) as f64]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_are_mentioned_as_often_as_their_part_says() {
        let config = SyntheticConfig { people: 5, main_people: 2, ..SyntheticConfig::default() };
        let mut random = SplitMix64::new(1);
        let cast = config.cast(&mut random);
        let mut counts = [0_u32; 5];
        for _ in 0..100_000 {
            counts[config.person(&cast, &mut random)] += 1;
        }
        let [main, other] = config.person_shares();
        assert!((main - 0.35).abs() < 1e-12 && (other - 0.1).abs() < 1e-12);
        for (i, person) in cast.iter().enumerate() {
            let want = if i < 2 { 35_000_u32 } else { 10_000 };
            assert!(counts[*person].abs_diff(want) < 600, "{cast:?} {counts:?}");
        }
    }

    #[test]
    fn everybody_can_be_a_main_character() {
        let config = SyntheticConfig::default();
        let mut random = SplitMix64::new(3);
        let mut counts = [0_u32; 16];
        for _ in 0..8000 {
            let cast = config.cast(&mut random);
            cast[..4].iter().for_each(|person| counts[*person] += 1);
        }
        assert!(counts.iter().all(|count| count.abs_diff(2000) < 200), "{counts:?}");
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
