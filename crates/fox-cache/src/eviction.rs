//! Eviction of pages that every later query has provably forgotten.
//!
//! The rule bounds the evicted fraction of the softmax, not the change of the output: of any later query's softmax over at
//! most `N` keys, evicted keys would have had together a fraction of at most `eps`. The output changes by at most
//! `2 eps max|v|`, see [`output_change_bound`](fox_tensor::output_change_bound), for the largest norm of a value. How far
//! a logit changes depends on all later layers.
//!
//! For a query at position `i` and a key at `j`, `|q . k| scale <= U` for all pairs gives key `j` a fraction of at most
//! `exp(2 U + c_i - c_j)`, because query `i` sees at least itself. `c`, the sum of log gates, never increases, so once
//!
//! ```text
//! c_i - c_j < -(2 U + ln N) + ln eps
//! ```
//!
//! the fraction is below `eps / N` for this and all later queries, and at most `N` such keys have together at most `eps`.
//! The last key of a page has the largest fraction, so the rule tests that key alone. A page is evicted when all query
//! heads that read its key head have forgotten it.
//!
//! A sliding window needs no bound: keys outside of it are never read again.

use std::sync::Arc;

use fox_tensor::PAGE;

use crate::meter::CacheMeter;

/// The eviction policy of a model's paged caches, and the meter of their bytes.
#[derive(Clone, Debug, Default)]
pub struct PagePolicy {
    /// Per layer and query head, the decay below which a key is forgotten. `None` for layers without eviction by decay;
    /// empty if no layer has it.
    thresholds: Vec<Option<Arc<[f64]>>>,
    meter: CacheMeter,
}

impl PagePolicy {
    /// Evicts only pages outside a sliding window.
    pub fn keep_all() -> Self {
        PagePolicy::default()
    }

    /// Also evicts keys with at most a fraction of `e^log_tolerance` of any later softmax over at most
    /// `max_context` keys. `bounds[l]` are the bounds `U` of layer `l` by query head, see
    /// [`logit_bounds`](crate::bound::logit_bounds); `None` for layers without gates.
    pub fn forgetting(bounds: &[Option<Vec<f64>>], log_tolerance: f64, max_context: usize) -> Self {
        let keys = (max_context.max(1) as f64).ln();
        let threshold = |bound: &f64| -(2.0 * bound + keys) + log_tolerance;
        let layer = |bounds: &Option<Vec<f64>>| -> Option<Arc<[f64]>> {
            Some(bounds.as_ref()?.iter().map(threshold).collect())
        };
        let thresholds = bounds.iter().map(layer).collect();
        PagePolicy { thresholds, meter: CacheMeter::default() }
    }

    /// The meter of all caches with this policy.
    pub fn meter(&self) -> &CacheMeter {
        &self.meter
    }

    /// Per query head of a layer, the decay below which a key is forgotten; `None` without eviction by decay.
    pub fn thresholds(&self, layer: usize) -> Option<Arc<[f64]>> {
        self.thresholds.get(layer).cloned().flatten()
    }

    /// The rule of layer `layer`.
    pub(crate) fn rule(&self, layer: usize, window: Option<usize>, gated: bool) -> EvictionRule {
        EvictionRule { window, thresholds: self.thresholds(layer).filter(|_| gated) }
    }
}

/// The eviction rule of a layer.
#[derive(Clone, Debug, Default)]
pub struct EvictionRule {
    /// Sliding window: the keys that a query sees, its own included.
    pub window: Option<usize>,
    /// Per query head, the decay (a difference of sums of log gates) below which a key is forgotten.
    pub thresholds: Option<Arc<[f64]>>,
}

impl EvictionRule {
    /// Whether every query from position `len` on has forgotten a full page of key head `head` whose first
    /// key is at `first`. `end` are the sums of the log gates up to the last key of the page, and `now` those of the
    /// `len` tokens so far, for each query head that reads the key head.
    pub fn forgets(
        &self,
        head: usize,
        (first, end): (usize, &[f64]),
        len: usize,
        now: &[f64],
    ) -> bool {
        // The next query, at position `len`, sees keys from `len + 1 - window` on.
        let out_of_window = self.window.is_some_and(|window| first + PAGE + window <= len + 1);
        let decayed = self.thresholds.as_ref().is_some_and(|thresholds| {
            let own = &thresholds[head * now.len()..][..now.len()];
            own.iter().enumerate().all(|(g, threshold)| now[g] - end[g] < *threshold)
        });
        out_of_window || decayed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evicts_when_all_query_heads_have_forgotten() {
        let bounds = [None, Some(vec![1.0, 2.0, 1.0, 3.0])];
        let policy = PagePolicy::forgetting(&bounds, -10.0, 1000);
        let rule = policy.rule(1, None, true);
        let ln = 1000f64.ln();
        let want = [-12.0 - ln, -14.0 - ln, -12.0 - ln, -16.0 - ln];
        assert_eq!(rule.thresholds.as_deref(), Some(&want[..]));
        let end = [-5.0, -7.0];
        let forgets = |head: usize, by: [f64; 2]| {
            let now = [-5.0 + by[0], -7.0 + by[1]];
            rule.forgets(head, (0, &end), 500, &now)
        };
        assert!(forgets(0, [want[0] - 0.1, want[1] - 0.1]));
        assert!(!forgets(0, [want[0] + 0.1, want[1] - 0.1]), "the first head remembers");
        assert!(!forgets(0, [want[0] - 0.1, want[1] + 0.1]), "the second head remembers");
        assert!(!forgets(1, [want[0] - 0.1, want[1] - 0.1]), "other heads, other thresholds");
        assert!(forgets(1, [want[2] - 0.1, want[3] - 0.1]));
    }

    #[test]
    fn layers_without_gates_evict_nothing() {
        let policy = PagePolicy::forgetting(&[None, Some(vec![0.0])], -1.0, 10);
        assert!(policy.rule(0, None, true).thresholds.is_none());
        assert!(policy.rule(1, None, false).thresholds.is_none());
        assert!(PagePolicy::keep_all().rule(1, None, true).thresholds.is_none());
        let rule = policy.rule(0, None, true);
        assert!(!rule.forgets(0, (0, &[0.0, 0.0]), 1 << 20, &[-1e9, -1e9]));
    }

    #[test]
    fn window_evicts_after_the_last_visible_key() {
        let rule = EvictionRule { window: Some(50), thresholds: None };
        // Key 63 is the last of the first page; the query at position 112 is the last that sees it.
        let end = [0.0, 0.0];
        assert!(!rule.forgets(0, (0, &end), 112, &[0.0, 0.0]));
        assert!(rule.forgets(0, (0, &end), 113, &[0.0, 0.0]));
    }
}
