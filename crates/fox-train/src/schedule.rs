//! The learning rate as a function of the tokens consumed before a step.
//!
//! ```text
//! n tokens before the step, W warm-up, N in all, D decay (N - W when not given), p = (n - (N - D)) / D
//! n < W        peak * n / W
//! n < N - D    peak
//! else         peak * (f + (1 - f) * shape(p))      f the final fraction
//! ```

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

/// How the learning rate falls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Decay {
    /// `(1 + cos(pi p)) / 2`, the published recipes.
    #[default]
    #[serde(rename = "cosine")]
    Cosine,
    /// `1 - p`.
    #[serde(rename = "linear")]
    Linear,
    /// `1 - sqrt(p)`; with `decay_tokens` the last part of warm-up, stable, decay.
    #[serde(rename = "1-sqrt")]
    OneMinusSqrt,
    /// Not at all.
    #[serde(rename = "constant")]
    Constant,
}

/// The whole schedule. All lengths are in tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// The highest learning rate.
    pub peak: f64,
    /// Length of the linear warm-up from 0.
    pub warmup: u64,
    /// Length of the run.
    pub total: u64,
    /// Length of the decay at the end; everything after the warm-up when not given.
    pub decay_tokens: Option<u64>,
    /// The shape of the decay.
    pub decay: Decay,
    /// Learning rate at the end, relative to the peak.
    pub final_fraction: f64,
}

impl Schedule {
    /// The learning rate of a step that `tokens` tokens came before.
    pub fn lr(&self, tokens: u64) -> f64 {
        if tokens < self.warmup {
            return self.peak * tokens as f64 / self.warmup as f64;
        }
        let after_warmup = self.total.saturating_sub(self.warmup);
        let length = self.decay_tokens.unwrap_or(after_warmup).min(after_warmup);
        let start = self.total - length;
        if tokens < start || self.decay == Decay::Constant {
            return self.peak;
        }
        let p = if length == 0 { 1.0 } else { (tokens - start) as f64 / length as f64 };
        let p = p.min(1.0);
        let shape = match self.decay {
            Decay::Cosine => (1.0 + (PI * p).cos()) / 2.0,
            Decay::Linear => 1.0 - p,
            Decay::OneMinusSqrt => 1.0 - p.sqrt(),
            Decay::Constant => 1.0,
        };
        self.peak * (self.final_fraction + (1.0 - self.final_fraction) * shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(decay: Decay) -> Schedule {
        Schedule {
            peak: 2e-3,
            warmup: 100,
            total: 500,
            decay_tokens: None,
            decay,
            final_fraction: 0.0,
        }
    }

    fn close(got: f64, want: f64) {
        assert!((got - want).abs() <= 1e-15, "{got}, not {want}");
    }

    #[test]
    fn warm_up_is_linear_from_zero() {
        for decay in [Decay::Cosine, Decay::Linear, Decay::OneMinusSqrt, Decay::Constant] {
            let s = schedule(decay);
            close(s.lr(0), 0.0);
            close(s.lr(25), 5e-4);
            close(s.lr(100), 2e-3);
        }
    }

    #[test]
    fn decay_shapes_match_formulas() {
        let s = schedule(Decay::Cosine);
        close(s.lr(300), 1e-3);
        close(s.lr(200), 2e-3 * (1.0 + 0.5f64.sqrt()) / 2.0);
        close(s.lr(500), 0.0);
        let s = schedule(Decay::Linear);
        close(s.lr(200), 1.5e-3);
        close(s.lr(500), 0.0);
        let s = schedule(Decay::OneMinusSqrt);
        close(s.lr(200), 1e-3);
        close(s.lr(500), 0.0);
        let s = schedule(Decay::Constant);
        close(s.lr(499), 2e-3);
    }

    #[test]
    fn short_decay_follows_plateau() {
        let s = Schedule {
            decay_tokens: Some(100),
            final_fraction: 0.1,
            ..schedule(Decay::OneMinusSqrt)
        };
        close(s.lr(399), 2e-3);
        close(s.lr(400), 2e-3);
        close(s.lr(425), 2e-3 * (0.1 + 0.9 * 0.5));
        close(s.lr(500), 2e-4);
        close(s.lr(900), 2e-4);
    }

    #[test]
    fn decay_longer_than_run_starts_after_warm_up() {
        for decay_tokens in [401, 500, 501, 10_000, u64::MAX] {
            let long = Schedule { decay_tokens: Some(decay_tokens), ..schedule(Decay::Linear) };
            for tokens in [0, 99, 100, 101, 300, 499, 500, 900] {
                close(long.lr(tokens), schedule(Decay::Linear).lr(tokens));
            }
        }
    }

    #[test]
    fn published_schedule_matches() {
        let s = Schedule {
            peak: 1e-3,
            warmup: 1 << 28,
            total: 48_318_382_080,
            decay_tokens: None,
            decay: Decay::Cosine,
            final_fraction: 0.0,
        };
        let step = 524_288;
        close(s.lr(step), 1e-3 / 512.0);
        let middle = (s.total - s.warmup) / 2 + s.warmup;
        close(s.lr(middle), 5e-4);
        // The last step still learns a little.
        assert!(s.lr(s.total - step) > 0.0 && s.lr(s.total - step) < 1e-12);
    }

    #[test]
    fn run_shorter_than_warm_up_only_warms_up() {
        let s = Schedule { total: 50, ..schedule(Decay::Cosine) };
        close(s.lr(49), 2e-3 * 0.49);
    }
}
