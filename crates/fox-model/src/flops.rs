//! FLOP counts of models, for reporting speed against the roofline.

use crate::ModelConfig;
use crate::params::ParamGroup;
use fox_tensor::{Segment, Segments};

/// FLOPs of a causal attention's forward pass, both products, over a whole sequence: a query at
/// position `i` sees `min(i + 1, window)` keys.
pub fn attention_flops(seq: usize, window: Option<usize>, width: usize) -> f64 {
    let (seq, reach) = (seq as f64, window.map_or(seq, |w| w.min(seq)) as f64);
    let pairs = reach * (seq - reach) + reach * reach / 2.0;
    4.0 * pairs * width as f64
}

/// The backward pass has five products where the forward has two.
pub const ATTENTION_BACKWARD: f64 = 2.5;

/// The arithmetic of training steps over sequences of any lengths.
#[derive(Clone, Debug)]
pub struct TrainFlops {
    config: ModelConfig,
    products: f64,
}

impl TrainFlops {
    /// Counts a model's matrices, once.
    pub fn new(config: &ModelConfig) -> Self {
        TrainFlops { config: config.clone(), products: config.product_flops_per_token() }
    }

    /// FLOPs of a step over these sequences, forward and backward.
    pub fn of(&self, segments: &Segments) -> f64 {
        let sequence = |s: &Segment| {
            s.q_len as f64 * (self.products + self.config.mixing_flops_per_token(s.q_len))
        };
        segments.as_slice().iter().map(sequence).sum()
    }
}

impl ModelConfig {
    /// FLOPs of a training step per token, forward and backward: 6 for every weight of a matrix
    /// product, and those of causal attention or a chunkwise scan over sequences of `seq`.
    pub fn train_flops_per_token(&self, seq: usize) -> f64 {
        self.product_flops_per_token() + self.mixing_flops_per_token(seq)
    }

    fn product_flops_per_token(&self) -> f64 {
        let specs = self.param_specs();
        let matrices = specs.iter().filter(|spec| spec.dims.len() == 2);
        let products = matrices.filter(|spec| spec.group != ParamGroup::Embedding);
        let mut weights: usize = products.map(|spec| spec.count()).sum();
        if self.tie_word_embeddings {
            weights += self.vocab_size * self.hidden_size;
        }
        6.0 * weights as f64
    }

    fn mixing_flops_per_token(&self, seq: usize) -> f64 {
        (0..self.num_layers).map(|l| self.mixer_of(l).train_flops(self, seq)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attention_flops_count_the_visible_pairs() {
        assert_eq!(attention_flops(8, None, 1), 4.0 * 32.0);
        assert_eq!(attention_flops(8, Some(2), 1), 4.0 * (2.0 * 6.0 + 2.0));
        assert_eq!(attention_flops(8, Some(100), 1), attention_flops(8, None, 1));
    }

    #[test]
    fn flops_match_a_hand_count() {
        let config = ModelConfig::fox_llama(256, 4, 4).with_vocab(256).with_mlp_width(768);
        let layer = 4 * 256 * 256 + 4 * 256 + 3 * 256 * 768;
        let expected = 6 * (4 * layer + 256 * 256) + 4 * 7 * 512 * 256;
        assert_eq!(config.train_flops_per_token(512), expected as f64);
        let flops = TrainFlops::new(&config).of(&Segments::uniform(3, 512));
        assert_eq!(flops, 3.0 * 512.0 * expected as f64);
        // A tied output projection multiplies as well.
        let tied = ModelConfig { tie_word_embeddings: true, ..config.clone() };
        assert_eq!(tied.train_flops_per_token(512), expected as f64);
        let documents =
            TrainFlops::new(&config).of(&Segments::packed(&[0, 100, 100, 612]).unwrap());
        let apart = 100.0 * config.train_flops_per_token(100) + 512.0 * expected as f64;
        assert_eq!(documents, apart);
    }
}
