//! How much memory training and decoding take, from the configuration alone.
//!
//! ```text
//! training   weights 4 P + gradients 4 P + AdamW moments 8 P
//!          + activations 4 B T (L a + 3 D)                      a values kept per token and block
//!            with recomputation: 4 B T (2 L D + a + 3 D)        block inputs, and one block in full
//! decoding   weights 4 P + cache 4 L B (N c + s)                c = 2 H_kv d + H, s = shift states
//! ```
//!
//! `P` parameters, `B` sequences, `T` tokens each, `L` blocks, `N` tokens in the cache; everything in
//! f32. Scratch of single ops comes on top; a cache that grew by doubling may hold up to twice `N`.

use crate::config::ModelConfig;
use crate::params::ParamSpec;
use crate::{Result, declare};

/// Values (not bytes) that a block keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryShape {
    /// For the backward pass, per token.
    pub activations_per_token: usize,
    /// In the decode state, per token.
    pub cache_per_token: usize,
    /// In the decode state, per sequence.
    pub cache_per_sequence: usize,
}

/// Bytes needed, part by part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryEstimate {
    /// The parameters.
    pub weights: f64,
    /// Their gradients.
    pub gradients: f64,
    /// The optimizer's moments.
    pub optimizer: f64,
    /// Activations of a training step.
    pub activations: f64,
    /// Activations when every block is recomputed in the backward pass.
    pub activations_recomputed: f64,
    /// The decode state.
    pub cache: f64,
}

impl MemoryEstimate {
    /// For `batch` sequences of `length` tokens.
    pub fn new(config: &ModelConfig, batch: usize, length: usize) -> Result<Self> {
        config.validate("model configuration")?;
        let (specs, structure) = declare(config);
        let count = |keep: fn(&&ParamSpec) -> bool| -> f64 {
            specs.iter().filter(keep).map(|spec| spec.count() as f64).sum()
        };
        let (all, trained) = (count(|_| true), count(|spec| spec.trainable));
        let shape = structure.blocks[0].memory();
        let (layers, width) = (config.num_layers as f64, config.hidden_size as f64);
        let tokens = batch as f64 * length as f64;
        let block = shape.activations_per_token as f64;
        let cache = batch as f64
            * (length as f64 * shape.cache_per_token as f64 + shape.cache_per_sequence as f64);
        Ok(MemoryEstimate {
            weights: 4.0 * all,
            gradients: 4.0 * trained,
            optimizer: 8.0 * trained,
            activations: 4.0 * tokens * (layers * block + 3.0 * width),
            activations_recomputed: 4.0 * tokens * (2.0 * layers * width + block + 3.0 * width),
            cache: 4.0 * layers * cache,
        })
    }

    /// Bytes to train with every activation kept.
    pub fn train(&self) -> f64 {
        self.weights + self.gradients + self.optimizer + self.activations
    }

    /// Bytes to train with blocks recomputed.
    pub fn train_recomputed(&self) -> f64 {
        self.train() - self.activations + self.activations_recomputed
    }

    /// Bytes to decode.
    pub fn decode(&self) -> f64 {
        self.weights + self.cache
    }
}
