//! How a decode step chooses the next token.

/// Sampling parameters of a row. Tokens are ordered by descending probability, the lowest id first among equals; every
/// filter keeps a prefix of that order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenDraw {
    /// Above 0.
    pub temperature: f32,
    /// Number of most likely tokens to keep; 0 for all.
    pub top_k: usize,
    /// Keeps the smallest prefix with at least this fraction of the probability that top-k left; 1 for all.
    pub top_p: f32,
    /// Keeps tokens with at least this fraction of the probability of the most likely one.
    pub min_p: f32,
    /// A random number in `[0, 1)`: the token is where it falls in the cumulative weights of the kept tokens, by id.
    pub uniform: f64,
}

/// The next token of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampledToken {
    /// Its id; `None` if a logit is NaN or all are minus infinity.
    pub id: Option<i32>,
    /// Its log-probability, before temperature and filters.
    pub logprob: f32,
}

impl TokenDraw {
    /// The oracle: samples from finite `logits: [V]`.
    pub fn choose(&self, logits: &[f64]) -> usize {
        let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weight = |id: usize| ((logits[id] - top) / f64::from(self.temperature)).exp();
        let mut ids: Vec<usize> = (0..logits.len()).collect();
        ids.sort_by(|a, b| weight(*b).total_cmp(&weight(*a)).then(a.cmp(b)));
        if self.top_k > 0 {
            ids.truncate(self.top_k);
        }
        let enough = f64::from(self.top_p) * ids.iter().map(|id| weight(*id)).sum::<f64>();
        let (mut sum, mut kept) = (0.0, 0);
        while kept < ids.len() && (kept == 0 || self.top_p >= 1.0 || sum < enough) {
            sum += weight(ids[kept]);
            kept += 1;
        }
        ids.truncate(kept);
        ids.retain(|id| weight(*id) >= f64::from(self.min_p));
        ids.sort_unstable();
        let mut left = self.uniform * ids.iter().map(|id| weight(*id)).sum::<f64>();
        for id in &ids {
            left -= weight(*id);
            if left < 0.0 {
                return *id;
            }
        }
        ids.last().copied().unwrap_or(0)
    }
}
