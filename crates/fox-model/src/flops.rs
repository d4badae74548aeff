//! How much arithmetic a model needs, for reporting speed against the floor.

use crate::ModelConfig;
use crate::config::MixerConfig;
use crate::params::ParamGroup;

/// FLOPs of a causal attention's forward pass, both products, over a whole sequence: a query at
/// position `i` meets `min(i + 1, window)` keys.
pub fn attention_flops(seq: usize, window: Option<usize>, width: usize) -> f64 {
    let (seq, reach) = (seq as f64, window.map_or(seq, |w| w.min(seq)) as f64);
    let pairs = reach * (seq - reach) + reach * reach / 2.0;
    4.0 * pairs * width as f64
}

/// The backward pass has five products where the forward has two.
pub const ATTENTION_BACKWARD: f64 = 2.5;

impl ModelConfig {
    /// FLOPs of a training step per token, forward and backward: 6 for every weight of a matrix
    /// product, and causal attention at sequences of `seq` tokens.
    pub fn train_flops_per_token(&self, seq: usize) -> f64 {
        let specs = self.param_specs();
        let matrices = specs.iter().filter(|spec| spec.dims.len() == 2);
        let products = matrices.filter(|spec| spec.group != ParamGroup::Embedding);
        let mut weights: usize = products.map(|spec| spec.count()).sum();
        if self.tie_word_embeddings {
            weights += self.vocab_size * self.hidden_size;
        }
        let MixerConfig::Forgetting(mixer) = &self.mixer;
        let width = mixer.heads * self.head_dim();
        let attention = attention_flops(seq, mixer.window, width) / seq.max(1) as f64;
        6.0 * weights as f64 + self.num_layers as f64 * attention * (1.0 + ATTENTION_BACKWARD)
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
    fn a_small_model_counted_by_hand() {
        let mut config = ModelConfig::fox_llama(256, 4, 4);
        config.vocab_size = 256;
        config.mlp.intermediate_size = Some(768);
        let layer = 4 * 256 * 256 + 4 * 256 + 3 * 256 * 768;
        let expected = 6 * (4 * layer + 256 * 256) + 4 * 7 * 512 * 256;
        assert_eq!(config.train_flops_per_token(512), expected as f64);
    }
}
