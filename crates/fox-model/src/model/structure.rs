//! The modules of a model and the ids of their parameters.

use fox_tensor::ParamId;

use crate::block::Block;
use crate::config::ModelConfig;
use crate::params::{Init, ParamGroup, ParamList, ParamSpec};

/// Parameter ids of the modules.
#[derive(Debug)]
pub(crate) struct Structure {
    pub embeddings: ParamId,
    pub blocks: Vec<Block>,
    pub norm: ParamId,
    pub lm_head: ParamId,
}

/// The parameters of a configuration, and the modules that use them.
pub(crate) fn declare(config: &ModelConfig) -> (Vec<ParamSpec>, Structure) {
    let mut list = ParamList::default();
    let (vocab, width, std) = (config.vocab_size, config.hidden_size, config.initializer_range);
    let names = config.mixer.names();
    let embeddings = list.push(
        ParamGroup::Embedding,
        format!("{}.embeddings.weight", names.stem),
        vec![vocab, width],
        true,
        Init::Normal { std, zero_row: config.untrained_token() },
    );
    let shared = config.mixer.declare_shared(config, &mut list);
    let blocks =
        (0..config.num_layers).map(|l| Block::declare(config, l, shared, &mut list)).collect();
    let norm = format!("{}.{}.weight", names.stem, names.final_norm);
    let norm = list.vector(ParamGroup::Norm, norm, width, 1.0);
    let lm_head = match config.tie_word_embeddings {
        true => embeddings,
        false => {
            let init = config.mixer.head_init(config);
            list.push(ParamGroup::Head, "lm_head.weight", vec![vocab, width], true, init)
        }
    };
    (list.into_specs(), Structure { embeddings, blocks, norm, lm_head })
}

impl ModelConfig {
    /// The parameters of this model, in order. The configuration must be valid.
    pub fn param_specs(&self) -> Vec<ParamSpec> {
        declare(self).0
    }
}
