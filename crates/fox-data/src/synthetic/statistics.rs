//! Figures of the synthetic corpus, measured on its documents.

use super::config::SyntheticConfig;
use super::document::{SyntheticDocument, TokenKind};

/// How often each doubling of the distance occurs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DistanceHistogram {
    /// `counts[k]`: questions whose answer was last mentioned `2^k` to `2^(k+1) - 1` tokens before.
    pub counts: Vec<u64>,
    /// Questions whose answer is not in the document.
    pub unanswerable: u64,
}

/// Figures of a number of documents.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SyntheticStatistics {
    /// Tokens looked at.
    pub tokens: u64,
    /// Tokens that are titles.
    pub titles: u64,
    /// Names in statements.
    pub stated: u64,
    /// Names in questions.
    pub asked: u64,
    /// Sum of the surprise of the grammar's words, in nats.
    pub grammar_nats: f64,
    /// Distances of the questions.
    pub distances: DistanceHistogram,
}

impl SyntheticStatistics {
    /// Looks at the first `len` tokens of the documents `0..documents`.
    pub fn measure(config: &SyntheticConfig, documents: u64, len: usize) -> Self {
        let mut statistics = Self::default();
        for index in 0..documents {
            for token in SyntheticDocument::new(config, index).take(len) {
                statistics.count(token.kind);
            }
        }
        statistics
    }

    fn count(&mut self, kind: TokenKind) {
        self.tokens += 1;
        match kind {
            TokenKind::Grammar { surprise } => self.grammar_nats += f64::from(surprise),
            TokenKind::Title => self.titles += 1,
            TokenKind::Stated => self.stated += 1,
            TokenKind::Asked { distance } => {
                self.asked += 1;
                match distance {
                    Some(distance) => {
                        let octave = distance.max(1).ilog2() as usize;
                        if self.distances.counts.len() <= octave {
                            self.distances.counts.resize(octave + 1, 0);
                        }
                        self.distances.counts[octave] += 1;
                    }
                    None => self.distances.unanswerable += 1,
                }
            }
        }
    }
}

impl SyntheticConfig {
    /// The loss in nats at each of the first `len` positions, averaged over the documents `0..documents`, of a
    /// reader who knows the grammar, guesses titles evenly, and remembers exactly the last `reach` tokens.
    ///
    /// It is a loss that can be attained, not a lower bound: a better reader also learns which titles are
    /// likely to return soon. With `reach = u64::MAX` it is the loss of perfect memory.
    pub fn attainable_loss(&self, documents: u64, len: usize, reach: u64) -> Vec<f64> {
        let mut losses = vec![0.0; len];
        for index in 0..documents {
            let document = SyntheticDocument::new(self, index);
            for (loss, token) in losses.iter_mut().zip(document) {
                *loss += self.surprise(token.kind, reach);
            }
        }
        for loss in &mut losses {
            *loss /= documents.max(1) as f64;
        }
        losses
    }

    /// Negative log-probability for the reader of [`Self::attainable_loss`].
    fn surprise(&self, kind: TokenKind, reach: u64) -> f64 {
        match kind {
            TokenKind::Grammar { surprise } => f64::from(surprise),
            TokenKind::Title => (self.in_range().titles as f64).ln(),
            TokenKind::Asked { distance: Some(distance) } if distance <= reach => 0.0,
            TokenKind::Stated | TokenKind::Asked { .. } => {
                (self.in_range().names_per_title as f64).ln()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_doubling_of_the_distance_is_about_equally_likely() {
        let statistics = SyntheticStatistics::measure(&SyntheticConfig::default(), 4, 60_000);
        // Gaps of 16 to 1023 tokens, and 20% of mentions nearby.
        let far: Vec<f64> = statistics.distances.counts[5..10]
            .iter()
            .map(|&count| count as f64 / statistics.asked as f64)
            .collect();
        assert!(far.iter().all(|share| (0.1..0.2).contains(share)), "{far:?}");
        assert!(statistics.distances.counts[11..].iter().sum::<u64>() == 0);
    }

    #[test]
    fn longer_memory_lowers_the_loss_far_beyond_any_training_length() {
        let config = SyntheticConfig::default();
        let mean = |range: std::ops::Range<usize>, reach: u64| {
            let losses = config.attainable_loss(1024, 1024, reach);
            losses[range.clone()].iter().sum::<f64>() / range.len() as f64
        };
        let early = mean(128..256, u64::MAX);
        let late = mean(512..1024, u64::MAX);
        assert!(early - late > 0.03, "{early} {late}");
        assert!(mean(512..1024, 256) - late > 0.02);
        assert!(mean(512..1024, 0) - late > 0.1);
    }

    #[test]
    fn the_mention_share_is_what_the_configuration_says() {
        let config = SyntheticConfig::default();
        let statistics = SyntheticStatistics::measure(&config, 4, 50_000);
        let measured = statistics.titles as f64 / statistics.tokens as f64;
        let expected = config.titles as f64 / config.mean_gap();
        assert!((measured / expected - 1.0).abs() < 0.05, "{measured} {expected}");
    }
}
