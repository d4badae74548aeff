//! Memory that training and decoding need, from the configuration alone.
//!
//! ```text
//! training   weights 4 P + gradients 4 P + optimizer state 8 P (AdamW; other optimizers differ)
//!          + activations 4 B T (L a + 3 D)                      a values saved per token and block
//!            with recomputation: 4 B T (2 L D + a + 3 D)        block inputs, and one block in full
//! decoding   weights 4 P + cache 4 L B (N c + s)                c = 2 H_kv d + H, s = shift states
//! ```
//!
//! `P` parameters, `B` sequences, `T` tokens each, `L` blocks, `N` tokens in the cache; everything in
//! f32. Scratch of single ops comes on top; a cache that grew by doubling may hold up to twice `N`.
//!
//! ```text
//! training   weights 4 P + optimizer state 8 P
//! in bf16  + the larger of gradients 4 P, and activations 2 B T (L (a - r) + 2 D) with those of the loss:
//!            gradients 4 V D + 2 B T D and logits, 2 B T V up to 576 MiB
//! ```
//!
//! `r` values per token that are computed again in the backward pass, `V` tokens in the vocabulary; gradients
//! appear as activations go.
//!
//! ```text
//! in bf16,   the largest of three moments instead:
//! recomputed   the loss    2 B T (2 L D + 2 D) with those of the loss as above: no block is in memory
//!              last block  the same with 2 B T a instead of the logits, which are gone
//!              first block gradients 4 (P - V D), all but those of the token table (4 P where it is the output
//!                          projection too), and 2 B T a: no inputs are left
//! ```

use fox_tensor::LOSS_CHUNK_BYTES;

use crate::Result;
use crate::block::Block;
use crate::config::ModelConfig;
use crate::mixers::SavedActivations;
use crate::model::declare;
use crate::params::{ParamGroup, ParamSpec};

/// Bytes of activations in bf16 on a GPU at the moments of a pass in which blocks are recomputed, one block at a time.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct RecomputedMoments {
    /// The loss: the inputs of all blocks, the logits, and the gradient of the output projection. No block is there.
    pub loss: f64,
    /// The backward pass of the last block: the inputs of all blocks, the gradient of the output projection, and one
    /// block in full. The logits are gone.
    pub last_block: f64,
    /// The backward pass of the first block: it alone. [`MemoryEstimate::gradients_of_blocks`] are beside it.
    pub first_block: f64,
}

impl RecomputedMoments {
    /// Bytes of activations and gradients where they are most, for `gradients` bytes of complete gradients beside the
    /// first block.
    pub fn peak(&self, gradients: f64) -> f64 {
        self.loss.max(self.last_block).max(self.first_block + gradients)
    }
}

/// Bytes needed, by purpose.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct MemoryEstimate {
    /// The parameters.
    pub weights: f64,
    /// Their gradients.
    pub gradients: f64,
    /// The optimizer's state.
    pub optimizer: f64,
    /// Activations of a training step.
    pub activations: f64,
    /// Activations when every block is recomputed in the backward pass.
    pub activations_recomputed: f64,
    /// The decode state.
    pub cache: f64,
    /// Activations of a training step in bf16 on a GPU, with the gradients of the loss.
    pub activations_bf16: f64,
    /// The same at the moments of a pass in which every block is recomputed.
    pub recomputed_bf16: RecomputedMoments,
    /// Gradients beside the first block: all, but that of a token table that is not the output projection too, which
    /// comes last.
    pub gradients_of_blocks: f64,
    /// All of a training step in bf16 on a GPU.
    pub train_bf16: f64,
    /// The same when every block is recomputed.
    pub train_bf16_recomputed: f64,
}

/// Bytes of AdamW's state for every element of a parameter: two moments in f32.
const ADAMW: f64 = 8.0;

impl MemoryEstimate {
    /// For `batch` sequences of `length` tokens, trained with AdamW.
    pub fn new(config: &ModelConfig, batch: usize, length: usize) -> Result<Self> {
        Self::with_state(config, batch, length, |_| ADAMW)
    }

    /// The same for an optimizer that keeps `bytes(spec)` bytes for every element of a parameter.
    pub fn with_state(
        config: &ModelConfig,
        batch: usize,
        length: usize,
        bytes: impl Fn(&ParamSpec) -> f64,
    ) -> Result<Self> {
        config.validate("model configuration")?;
        let (specs, structure) = declare(config);
        let count = |keep: fn(&&ParamSpec) -> bool| -> f64 {
            specs.iter().filter(keep).map(|spec| spec.count() as f64).sum()
        };
        let (all, trained) = (count(|_| true), count(|spec| spec.trainable));
        let kept: Vec<SavedActivations> =
            structure.blocks.iter().map(Block::saved_activations).collect();
        let sum = |value: fn(&SavedActivations) -> usize| -> f64 {
            kept.iter().map(|kept| value(kept) as f64).sum()
        };
        let (blocks, cheap) = (sum(|kept| kept.per_token), sum(|kept| kept.cheap_per_token));
        // Of recomputed blocks, one is in memory in full.
        let largest = kept.iter().map(|kept| kept.per_token).max().unwrap_or(0) as f64;
        let optimizer: f64 = specs
            .iter()
            .filter(|spec| spec.trainable)
            .map(|spec| bytes(spec) * spec.count() as f64)
            .sum();
        let (layers, width) = (config.num_layers as f64, config.hidden_size as f64);
        let tokens = batch as f64 * length as f64;
        let state = |layer: usize| {
            let state = config.state_of(layer);
            length as f64 * state.values_per_token() as f64 + state.values_per_sequence() as f64
        };
        let cache = batch as f64 * (0..config.num_layers).map(state).sum::<f64>();
        let vocab = config.vocab_size as f64;
        let logits = (2.0 * tokens * vocab).min(LOSS_CHUNK_BYTES as f64);
        let narrow = |per_token: f64| {
            let loss = 4.0 * vocab * width + 2.0 * tokens * width + logits;
            2.0 * tokens * (per_token + 2.0 * width) + loss
        };
        let (kept, inputs) = (narrow(blocks - cheap), narrow(2.0 * layers * width));
        let first_block = 2.0 * tokens * largest;
        let last_block = inputs - logits + first_block;
        let moments = RecomputedMoments { loss: inputs, last_block, first_block };
        let gradients = 4.0 * trained;
        let table = match config.tie_word_embeddings {
            true => 0.0,
            false => count(|spec| spec.trainable && spec.group == ParamGroup::Embedding),
        };
        let gradients_of_blocks = gradients - 4.0 * table;
        let recomputed = moments.peak(gradients_of_blocks);
        let train = |activations: f64| 4.0 * all + optimizer + activations.max(gradients);
        Ok(MemoryEstimate {
            activations_bf16: kept,
            recomputed_bf16: moments,
            gradients_of_blocks,
            train_bf16: train(kept),
            train_bf16_recomputed: train(recomputed),
            weights: 4.0 * all,
            gradients,
            optimizer,
            activations: 4.0 * tokens * (blocks + 3.0 * width),
            activations_recomputed: 4.0 * tokens * (2.0 * layers * width + largest + 3.0 * width),
            cache: 4.0 * cache,
        })
    }

    /// Bytes to train with every activation saved.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn training_memory_is_the_sum_of_its_parts() {
        let config = ModelConfig::fox_pro(64, 2, 2);
        let estimate = |batch| MemoryEstimate::new(&config, batch, 128).unwrap();
        let (one, two) = (estimate(1), estimate(2));
        let parameters: usize = config.param_specs().iter().map(ParamSpec::count).sum();
        assert_eq!(one.weights, 4.0 * parameters as f64);
        assert_eq!(two.activations, 2.0 * one.activations);
        assert_eq!(two.activations_recomputed, 2.0 * one.activations_recomputed);
        assert_eq!((two.weights, two.cache), (one.weights, 2.0 * one.cache));
        let state = one.weights + one.gradients + one.optimizer;
        assert_eq!(one.train(), state + one.activations);
        assert_eq!(one.train_recomputed(), state + one.activations_recomputed);
    }

    #[test]
    fn recomputation_peaks_at_any_of_its_moments() {
        let (width, layers) = (64, 2);
        let estimate = |vocab: usize, batch: usize| {
            let config = ModelConfig::fox_pro(width, layers, 2).with_vocab(vocab);
            MemoryEstimate::new(&config, batch, 128).unwrap()
        };
        let peak = |e: &MemoryEstimate| {
            assert_eq!(e.train_bf16_recomputed, e.weights + e.optimizer + moment(e).1);
            moment(e).0
        };
        // (name, bytes) of the largest moment.
        fn moment(e: &MemoryEstimate) -> (&'static str, f64) {
            let m = e.recomputed_bf16;
            let all = [
                ("loss", m.loss),
                ("last block", m.last_block),
                ("first block", m.first_block + e.gradients_of_blocks),
                ("gradients", e.gradients),
            ];
            all.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap()
        }
        // Many logits; few; few tokens, so that gradients of weights are most, also those of a large token table.
        assert_eq!(peak(&estimate(20_000, 64)), "loss");
        assert_eq!(peak(&estimate(100, 64)), "last block");
        assert_eq!(peak(&estimate(100, 1)), "first block");
        let e = estimate(100, 1);
        let loss = (4 * 100 * width + 2 * 128 * width + 2 * 128 * 100) as f64;
        assert_eq!(e.recomputed_bf16.loss, (2 * 128 * (2 * layers + 2) * width) as f64 + loss);
        assert_eq!(e.gradients - e.gradients_of_blocks, (4 * 100 * width) as f64);
    }

    #[test]
    fn tied_tables_have_an_early_gradient() {
        let tied = |tie_word_embeddings| {
            let config = ModelConfig { tie_word_embeddings, ..ModelConfig::fox_pro(64, 2, 2) };
            MemoryEstimate::new(&config.with_vocab(500), 1, 128).unwrap()
        };
        assert_eq!(tied(true).gradients_of_blocks, tied(true).gradients);
        // Apart from the table, both have the same gradients.
        assert_eq!(tied(true).gradients_of_blocks, tied(false).gradients_of_blocks);
    }

    #[test]
    fn activations_of_mamba2_are_counted() {
        let estimate = MemoryEstimate::new(&ModelConfig::mamba2(64, 1, 4), 1, 1).unwrap();
        // Three tensors of inner width 128, two of the 384 channels of the convolution, three values per head.
        let mixer = 3 * 128 + 2 * 384 + 3 * 4;
        // A state of 128 x 128 values for 64 tokens; the residual sum, its norm and its scale.
        let block = mixer + 128 * 128 / 64 + 2 * 64 + 1;
        // Three tensors of the hidden width outside of the block.
        assert_eq!(estimate.activations, 4.0 * (block + 3 * 64) as f64);
    }

    #[test]
    fn memory_estimate_matches_a_gpu_measurement() {
        let estimate = |(width, layers, heads): (usize, usize, usize), batch: usize| {
            let config = ModelConfig::fox_pro(width, layers, heads).with_vocab(50304);
            MemoryEstimate::new(&config, batch, 16384).unwrap()
        };
        let (m125, m360, m760) = ((768, 12, 12), (1024, 24, 16), (1536, 24, 24));
        // Peaks of `fox bench train --device cuda --arch fox-pro --seq 16384 --vocab 50304 [--recompute]`, one
        // H200, in GiB: 125M on 2026-11-20, the others on 2026-11-15, with chunks of the loss 0.3 GiB smaller.
        for (bytes, measured) in [
            (estimate(m125, 2).train_bf16, 9.32),
            (estimate(m360, 2).train_bf16, 23.6),
            (estimate(m760, 1).train_bf16, 23.4),
            (estimate(m760, 1).train_bf16_recomputed, 13.4),
            (estimate(m760, 10).train_bf16_recomputed, 44.3),
        ] {
            let gib = bytes / (1u64 << 30) as f64;
            assert!((gib / measured - 1.0).abs() < 0.05, "{gib}, not {measured}");
        }
    }
}
