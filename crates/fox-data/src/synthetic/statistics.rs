//! Figures of the synthetic corpus, measured on its documents.

use super::document::{SyntheticConfig, SyntheticDocument, TokenKind};
use super::words::{NAMES, SURNAMES};

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
    /// Tokens that are names.
    pub names: u64,
    /// Surnames in statements.
    pub stated: u64,
    /// Surnames in questions.
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
            TokenKind::Name => self.names += 1,
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
    /// reader who knows the grammar, guesses names evenly, and remembers exactly the last `reach` tokens.
    ///
    /// It is a loss that can be attained, not a lower bound: a better reader also learns which names are
    /// likely to return soon. With `reach = u64::MAX` it is the loss of perfect memory.
    pub fn attainable_loss(&self, documents: u64, len: usize, reach: u64) -> Vec<f64> {
        let mut losses = vec![0.0; len];
        for index in 0..documents {
            let document = SyntheticDocument::new(self, index);
            for (loss, token) in losses.iter_mut().zip(document) {
                *loss += surprise(token.kind, reach);
            }
        }
        for loss in &mut losses {
            *loss /= documents.max(1) as f64;
        }
        losses
    }
}

/// Negative log-probability for the reader of [`SyntheticConfig::attainable_loss`].
fn surprise(kind: TokenKind, reach: u64) -> f64 {
    match kind {
        TokenKind::Grammar { surprise } => f64::from(surprise),
        TokenKind::Name => (NAMES.len() as f64).ln(),
        TokenKind::Asked { distance: Some(distance) } if distance <= reach => 0.0,
        TokenKind::Stated | TokenKind::Asked { .. } => (SURNAMES.len() as f64).ln(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_doubling_of_the_distance_is_about_equally_likely() {
        let statistics = SyntheticStatistics::measure(&SyntheticConfig::default(), 4, 60_000);
        let counts = &statistics.distances.counts;
        let inner: Vec<f64> =
            counts[4..13].iter().map(|&c| c as f64 / statistics.asked as f64).collect();
        assert!(inner.iter().all(|share| (0.06..0.15).contains(share)), "{inner:?}");
    }

    #[test]
    fn longer_memory_lowers_the_loss_far_beyond_any_training_length() {
        let config = SyntheticConfig::default();
        let mean = |range: std::ops::Range<usize>, reach: u64| {
            let losses = config.attainable_loss(64, 8192, reach);
            losses[range.clone()].iter().sum::<f64>() / range.len() as f64
        };
        let early = mean(256..512, u64::MAX);
        let late = mean(1536..2048, u64::MAX);
        let very_late = mean(6144..8192, u64::MAX);
        assert!(early - late > 0.05, "{early} {late}");
        assert!(late - very_late > 0.04, "{late} {very_late}");
        assert!(mean(1536..2048, 512) - late > 0.05);
    }

    #[test]
    fn the_mention_share_is_what_the_configuration_says() {
        let config = SyntheticConfig::default();
        let statistics = SyntheticStatistics::measure(&config, 4, 50_000);
        let measured = statistics.names as f64 / statistics.tokens as f64;
        let expected = NAMES.len() as f64 / config.mean_gap();
        assert!((measured / expected - 1.0).abs() < 0.05, "{measured} {expected}");
    }
}
