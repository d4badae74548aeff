//! What the synthetic corpus is like.

use fox_base::random::{SplitMix64, mix};
use serde::{Deserialize, Serialize};

use super::grammar::{self, FILLERS, QUESTIONS, STATEMENTS};
use super::words::{NAMES_PER_TITLE, TITLES};

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
    /// How many of the titles occur; 2 to 24. Each has one fact at a time.
    pub titles: usize,
    /// How many names each title can have; 2 to 8.
    pub names_per_title: usize,
    /// How many of a hundred mentions are followed by another mention of the same title nearby; 0 to 99.
    pub nearby_percent: u64,
    /// Longest gap to a mention nearby, in tokens; at least 1.
    pub nearby_gap: u64,
    /// Shortest gap to a mention far away, in tokens; at least 1.
    pub min_gap: u64,
    /// How many times the gap can double: the longest is `min_gap * 2^octaves - 1`. 1 to 40.
    pub octaves: u32,
    /// Mean number of mentions of a fact: one statement, the others questions; at least 1.
    pub mentions_per_fact: u64,
}

impl Default for SyntheticConfig {
    fn default() -> Self {
        Self {
            seed: 0,
            documents: 1 << 32,
            document_len: 1 << 14,
            titles: TITLES.len(),
            names_per_title: 4,
            nearby_percent: 20,
            nearby_gap: 16,
            min_gap: 16,
            octaves: 6,
            mentions_per_fact: 16,
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
            titles: self.titles.clamp(2, TITLES.len()),
            names_per_title: self.names_per_title.clamp(2, NAMES_PER_TITLE),
            nearby_percent: self.nearby_percent.min(99),
            nearby_gap: self.nearby_gap.clamp(1, 1 << 20),
            min_gap: self.min_gap.clamp(1, 1 << 20),
            octaves: self.octaves.clamp(1, 40),
            mentions_per_fact: self.mentions_per_fact.max(1),
            ..self
        }
    }

    /// Mean gap between two mentions of a title, in tokens.
    pub fn mean_gap(&self) -> f64 {
        let config = self.in_range();
        let far = (0..config.octaves)
            .map(|octave| {
                let low = (config.min_gap << octave) as f64;
                low + (low - 1.0) / 2.0
            })
            .sum::<f64>()
            / f64::from(config.octaves);
        let nearby = (config.nearby_gap + 1) as f64 / 2.0;
        let share = config.nearby_percent as f64 / 100.0;
        share * nearby + (1.0 - share) * far
    }

    /// Part of all sentences that mention a title, when the queue of due titles stays short.
    pub fn mention_share(&self) -> f64 {
        let config = self.in_range();
        let per_token = config.titles as f64 / self.mean_gap();
        let stated = 1.0 / config.mentions_per_fact as f64;
        let mention_len = stated * grammar::mean_len(&STATEMENTS)
            + (1.0 - stated) * grammar::mean_len(&QUESTIONS);
        let filler_len = grammar::mean_len(&FILLERS);
        let share = per_token * filler_len / (1.0 - per_token * (mention_len - filler_len));
        if (0.0..1.0).contains(&share) { share } else { 1.0 }
    }

    /// A gap between two mentions.
    pub(super) fn gap(&self, random: &mut SplitMix64) -> u64 {
        if random.below(100) < self.nearby_percent {
            return 1 + random.below(self.nearby_gap);
        }
        let low = self.min_gap << random.below(u64::from(self.octaves));
        low + random.below(low)
    }

    /// Time until the next mention of a title at a moment picked at random from an endless document:
    /// a gap is met in proportion to its length, at an even place inside it.
    pub(super) fn residual_gap(&self, random: &mut SplitMix64) -> u64 {
        let longest = self.nearby_gap.max(self.min_gap << self.octaves);
        loop {
            let gap = self.gap(random);
            if random.below(longest) < gap {
                return random.below(gap);
            }
        }
    }
}
