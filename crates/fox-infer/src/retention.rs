//! Expected cache size of a request after eviction, from the sequences observed so far.

use fox_cache::{SequenceCost, SequenceState};

/// Weight of a new observation in the moving average.
const FRESH: f64 = 0.2;
/// Safety factor on the expected size, because sequences differ.
const MARGIN: f64 = 1.25;
/// Tokens below which a sequence is too short to have evicted anything.
const MIN_TOKENS: usize = 512;

/// The fraction of the cache that sequences retain.
#[derive(Debug)]
pub(crate) struct RetentionEstimate {
    fraction: f64,
    /// Sequences observed.
    observed: u32,
}

impl Default for RetentionEstimate {
    /// Everything, before any observation.
    fn default() -> Self {
        RetentionEstimate { fraction: 1.0, observed: 0 }
    }
}

impl RetentionEstimate {
    /// Records the cache of a sequence, if it is long enough.
    pub fn observe(&mut self, sequence: &SequenceState) {
        let usage = sequence.usage();
        if usage.tokens >= MIN_TOKENS && usage.full_bytes > 0 {
            let retained = usage.bytes as f64 / usage.full_bytes as f64;
            self.observed = self.observed.saturating_add(1);
            // The mean of the first observations: the initial value says nothing about the model.
            let weight = FRESH.max(1.0 / f64::from(self.observed));
            self.fraction += weight * (retained - self.fraction);
        }
    }

    /// Expected bytes of a sequence of `tokens` tokens that is fed `step` tokens at a time.
    pub fn expected(&self, cost: &SequenceCost, tokens: usize, step: usize) -> usize {
        let worst = cost.worst_case(tokens);
        let pages = (worst - cost.fixed()) as f64 * (self.fraction * MARGIN).min(1.0);
        worst.min(cost.fixed() + cost.step(step) + pages as usize)
    }
}

#[cfg(test)]
mod tests {
    use fox_cache::{AttentionStateSpec, StateSpec};
    use fox_tensor::{AttentionWeights, PAGE};

    use super::*;

    #[test]
    fn expected_size_has_a_margin() {
        let spec = AttentionStateSpec {
            heads: 2,
            kv_heads: 2,
            head_dim: 8,
            gated: true,
            k_shift: false,
            v_shift: false,
            window: None,
            weights: AttentionWeights::Softmax,
            transition: 0,
            conv: None,
        };
        let cost = SequenceCost::new([StateSpec::Attention(spec)], PAGE, &fox_cpu::device());
        let estimate = RetentionEstimate { fraction: 0.5, observed: 1 };
        let (pages, step) = (cost.worst_case(100 * PAGE), cost.step(1));
        assert_eq!(estimate.expected(&cost, 100 * PAGE, 1), step + pages / 8 * 5);
        // Never more than the full cache.
        assert_eq!(RetentionEstimate::default().expected(&cost, 100 * PAGE, 1), pages);
    }
}
