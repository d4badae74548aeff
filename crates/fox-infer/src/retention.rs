//! How many bytes a request is expected to need: what is left of its cache after forgetting, as seen so far.

use fox_cache::{SequenceCost, SequenceState};

/// How much one more sequence counts against the earlier ones, once there are some.
const FRESH: f64 = 0.2;
/// Sequences differ: this much more than what is expected is set aside.
const MARGIN: f64 = 1.25;
/// Tokens below which a sequence has had nothing to forget, and says nothing.
const TELLING: usize = 512;

/// The share of the cache that sequences keep.
#[derive(Debug)]
pub(crate) struct RetentionEstimate {
    share: f64,
    /// Sequences that were looked at.
    seen: u32,
}

impl Default for RetentionEstimate {
    /// Everything, as long as nothing is known.
    fn default() -> Self {
        RetentionEstimate { share: 1.0, seen: 0 }
    }
}

impl RetentionEstimate {
    /// Looks at the cache of a sequence that has got somewhere.
    pub fn observe(&mut self, sequence: &SequenceState) {
        let usage = sequence.usage();
        if usage.tokens >= TELLING && usage.full_bytes > 0 {
            let kept = usage.bytes as f64 / usage.full_bytes as f64;
            self.seen = self.seen.saturating_add(1);
            // The mean of the first ones: a guess from before them says nothing about the model.
            self.share += FRESH.max(1.0 / f64::from(self.seen)) * (kept - self.share);
        }
    }

    /// Bytes that a sequence of `tokens` tokens is expected to need, when it is fed `step` at a time.
    pub fn expected(&self, cost: &SequenceCost, tokens: usize, step: usize) -> usize {
        let worst = cost.worst_case(tokens);
        let pages = (worst - cost.fixed()) as f64 * (self.share * MARGIN).min(1.0);
        worst.min(cost.fixed() + cost.step(step) + pages as usize)
    }
}

#[cfg(test)]
mod tests {
    use fox_cache::{AttentionStateSpec, StateSpec};
    use fox_tensor::{AttentionWeights, PAGE};

    use super::*;

    #[test]
    fn a_quarter_more_than_what_was_kept_is_expected() {
        let spec = AttentionStateSpec {
            heads: 2,
            kv_heads: 2,
            head_dim: 8,
            gated: true,
            k_shift: false,
            v_shift: false,
            window: None,
            weights: AttentionWeights::Softmax,
        };
        let cost = SequenceCost::new([StateSpec::Attention(spec)], PAGE, &fox_cpu::device());
        let kept = RetentionEstimate { share: 0.5, seen: 1 };
        let (pages, step) = (cost.worst_case(100 * PAGE), cost.step(1));
        assert_eq!(kept.expected(&cost, 100 * PAGE, 1), step + pages / 8 * 5);
        // Never more than everything.
        assert_eq!(RetentionEstimate::default().expected(&cost, 100 * PAGE, 1), pages);
    }
}
