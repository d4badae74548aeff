//! How fast a step could be: its FLOPs over the rate of a plain matrix product on the same device.
//!
//! ```text
//! FLOPs = 6 P tokens + 14 L D pairs       P elements of matrices that tokens are multiplied with
//! ```
//!
//! `pairs` are the query-key pairs that causal (or windowed) attention looks at: 4 D each in the forward pass
//! and 10 D in the backward pass. Pruned blocks count as if they were computed.

use std::time::{Duration, Instant};

use fox_model::{ForgettingConfig, ModelConfig, ParamGroup};
use fox_tensor::{DType, Device, Segments};

use crate::Result;

/// FLOPs of a model's training step, by what they grow with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepFlops {
    per_token: f64,
    per_pair: f64,
    window: Option<usize>,
}

impl StepFlops {
    /// Counts a model's matrices.
    pub fn new(config: &ModelConfig) -> StepFlops {
        // A tied table multiplies as the output projection; an embedding of its own only looks up.
        let multiplies = |group| group != ParamGroup::Embedding || config.tie_word_embeddings;
        let specs = config.param_specs();
        let matrices = specs.iter().filter(|spec| spec.dims.len() == 2 && multiplies(spec.group));
        let elements: f64 = matrices.map(|spec| spec.count() as f64).sum();
        let attention = attention(config);
        let pair = 14.0 * (config.num_layers * config.hidden_size) as f64;
        StepFlops {
            per_token: 6.0 * elements,
            per_pair: if attention.is_some() { pair } else { 0.0 },
            window: attention.and_then(|mixer| mixer.window),
        }
    }

    /// Forward and backward over these sequences.
    pub fn of(&self, segments: &Segments) -> f64 {
        let lens = || segments.as_slice().iter().map(|segment| segment.q_len);
        let tokens: usize = lens().sum();
        let pairs: f64 = lens().map(|len| visible_pairs(len, self.window)).sum();
        self.per_token * tokens as f64 + self.per_pair * pairs
    }
}

/// Pairs of a query and a key at or before it, within the window.
fn visible_pairs(time: usize, window: Option<usize>) -> f64 {
    let (t, w) = (time as f64, window.unwrap_or(time).min(time) as f64);
    w * (w + 1.0) / 2.0 + (t - w) * w
}

/// The attention layer's options; `None` for a family without attention.
pub(crate) fn attention(config: &ModelConfig) -> Option<&ForgettingConfig> {
    config.mixer.forgetting()
}

/// FLOP/s of the best of several matrix products `[rows, D] x [4 D, D]^T`, in at most some tenths of a second.
pub fn gemm_rate(device: &Device, width: usize) -> Result<f64> {
    const ROWS: usize = 2048;
    const LIMIT: Duration = Duration::from_millis(150);
    let x = device.full([ROWS, width], 0.5)?;
    let w = device.full([4 * width, width], 0.25)?;
    let flops = 2.0 * (ROWS * width * 4 * width) as f64;
    // The first call pays for memory and start-up.
    let mut sink = device.zeros([1, 4 * width], DType::F32)?;
    let mut multiply = || -> Result<f64> {
        let start = Instant::now();
        let y = device.backend().linear_fwd(&x, &w, None)?;
        // Reading a row waits for the product on a device that works ahead.
        device.backend().copy_rows(&y, 0, &mut sink, 0, 1)?;
        sink.to_f32()?;
        Ok(start.elapsed().as_secs_f64())
    };
    multiply()?;
    let (begin, mut best) = (Instant::now(), f64::INFINITY);
    let mut calls = 0;
    while calls < 3 || (calls < 20 && begin.elapsed() < LIMIT) {
        best = best.min(multiply()?);
        calls += 1;
    }
    Ok(flops / best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_a_triangle_or_a_band() {
        assert_eq!(visible_pairs(4, None), 10.0);
        assert_eq!(visible_pairs(4, Some(9)), 10.0);
        assert_eq!(visible_pairs(5, Some(2)), 9.0);
        assert_eq!(visible_pairs(5, Some(1)), 5.0);
    }

    #[test]
    fn flops_are_counted_by_hand() {
        let mut config = ModelConfig::fox_llama(64, 2, 4);
        config.vocab_size = 100;
        config.mlp.intermediate_size = Some(96);
        let per_layer = 4 * 64 * 64 + 4 * 64 + 3 * 64 * 96;
        let matrices = (2 * per_layer + 100 * 64) as f64;
        let want = 6.0 * matrices * 24.0 + 14.0 * 2.0 * 64.0 * (3.0 * 36.0);
        assert_eq!(StepFlops::new(&config).of(&Segments::uniform(3, 8)), want);
    }

    #[test]
    fn a_device_multiplies_at_some_rate() {
        let rate = gemm_rate(&fox_cpu::device(), 64).unwrap();
        assert!(rate > 1e8 && rate < 1e14, "{rate}");
    }
}
