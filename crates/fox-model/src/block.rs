//! A block: norm and mixer, then norm and MLP where there is one, around a residual stream.
//!
//! The residual stream is passed as `(h, delta)`, the sum so far and the last addend, because adding and normalizing
//! are one op.

use std::sync::Arc;

use fox_cache::LayerState;
use fox_tensor::{Activation, DecodeBlock, DecodeMlp, Dropout, ParamId, Result, Tape, Tensor, Var};

use crate::config::ModelConfig;
use crate::mixers::forgetting::{DecayTime, ForgettingLayer};
use crate::mixers::{LayerParams, Mixer, MixerContext, SavedActivations};
use crate::params::{ParamGroup, ParamList, Parameters};

/// One block: its mixer and where its other parameters are.
#[derive(Debug)]
pub(crate) struct Block {
    mixer_norm: ParamId,
    mixer: Box<dyn Mixer>,
    mlp: Option<Mlp>,
    norm_eps: f32,
    width: usize,
}

/// The feed-forward half of a block.
#[derive(Debug)]
struct Mlp {
    norm: ParamId,
    gate_up: ParamId,
    down: ParamId,
    activation: Activation,
    inner: usize,
}

/// The output of a block.
pub(crate) struct BlockOutput {
    /// The residual stream before the last half of the block `[R, D]`.
    pub h: Var,
    /// The last half's output `[R, D]`, not yet added.
    pub delta: Var,
    /// Attention tiles visited and in total `[H, 4]` i32; `None` without attention.
    pub tiles: Option<Tensor>,
}

impl Block {
    /// Declares the parameters of block number `index`; `shared` is a parameter of all mixers.
    pub fn declare(
        config: &ModelConfig,
        index: usize,
        shared: Option<ParamId>,
        list: &mut ParamList,
    ) -> Self {
        let (mixer, width) = (config.mixer_of(index), config.hidden_size);
        let names = config.mixer.names();
        let block = format!("{}.layers.{index}", names.stem);
        let norm = format!("{block}.{}.weight", names.mixer_norm);
        let prefix = format!("{block}.{}", names.mixer);
        let mixer_norm = list.vector(ParamGroup::Norm, norm, width, 1.0);
        let mut layer = LayerParams { index, prefix: &prefix, shared, list };
        Block {
            mixer_norm,
            mixer: mixer.declare(config, &mut layer),
            mlp: config.has_mlp().then(|| Mlp::declare(config, index, &block, list)),
            norm_eps: config.norm_eps as f32,
            width,
        }
    }

    /// `h` and `delta` are `[R, D]`; the first block has no `delta`. `dropout` is that of the outputs of mixer and MLP.
    pub fn forward(
        &self,
        tape: &mut Tape<'_>,
        h: &Var,
        delta: Option<&Var>,
        context: &MixerContext<'_>,
        dropout: Option<[Dropout; 2]>,
        state: Option<&mut LayerState>,
    ) -> Result<BlockOutput> {
        let var = |id: ParamId| context.params.var(id);
        let (h, x) = tape.add_rms_norm(h, delta, &var(self.mixer_norm), self.norm_eps)?;
        let mut mixed = self.mixer.forward(tape, &x, context, state)?;
        if let Some([mixer, _]) = &dropout {
            mixed.out = tape.dropout(&mixed.out, mixer)?;
        }
        let Some(mlp) = &self.mlp else {
            return Ok(BlockOutput { h, delta: mixed.out, tiles: mixed.tiles });
        };
        let (h, x) = tape.add_rms_norm(&h, Some(&mixed.out), &var(mlp.norm), self.norm_eps)?;
        let gate_up = tape.linear(&x, &var(mlp.gate_up), None)?;
        let inner = tape.glu(&gate_up, mlp.activation)?;
        let mut delta = tape.linear(&inner, &var(mlp.down), None)?;
        if let Some([_, mlp]) = &dropout {
            delta = tape.dropout(&delta, mlp)?;
        }
        Ok(BlockOutput { h, delta, tiles: mixed.tiles })
    }

    /// The mixer and the weights of the norm in front of it.
    pub fn mixer(&self) -> (&dyn Mixer, ParamId) {
        (&*self.mixer, self.mixer_norm)
    }

    /// See [`Mixer::gate_biases`](crate::mixers::Mixer::gate_biases).
    pub fn gate_biases(&self, time: DecayTime) -> Vec<(ParamId, Vec<f32>)> {
        self.mixer.gate_biases(time)
    }

    /// The attention layer and the weights of the norm in front of it; `None` in recurrent models.
    pub fn attention(&self) -> Option<(&ForgettingLayer, ParamId)> {
        Some((self.mixer.attention()?, self.mixer_norm))
    }

    /// The weights for decoding in slots; `None` if the mixer only runs op by op. `thresholds` are those of
    /// [`DecodeAttention`](fox_tensor::DecodeAttention).
    pub fn decode_block(
        &self,
        params: &Parameters,
        thresholds: Option<Arc<[f64]>>,
    ) -> Option<DecodeBlock> {
        let (mixer, mlp) = (self.mixer.decode_weights(params, thresholds)?, self.mlp.as_ref()?);
        let value = |id: ParamId| params.value(id).clone();
        let mlp = DecodeMlp {
            norm: value(mlp.norm),
            gate_up: value(mlp.gate_up),
            down: value(mlp.down),
            act: mlp.activation,
        };
        Some(DecodeBlock { mixer_norm: value(self.mixer_norm), mixer, mlp })
    }

    /// The mixer's values, and here a sum with its norm and scale for each half, `[g | u]` and the gated
    /// product.
    pub fn saved_activations(&self) -> SavedActivations {
        let mixer = self.mixer.saved_activations();
        let half = 2 * self.width + 1;
        let mlp = self.mlp.as_ref().map_or(0, |mlp| half + 3 * mlp.inner);
        // Norms and the gated product.
        let cheap = self.width + self.mlp.as_ref().map_or(0, |mlp| self.width + mlp.inner);
        SavedActivations {
            per_token: mixer.per_token + half + mlp,
            cheap_per_token: mixer.cheap_per_token + cheap,
        }
    }
}

impl Mlp {
    fn declare(config: &ModelConfig, index: usize, prefix: &str, list: &mut ParamList) -> Self {
        let (width, inner, std) =
            (config.hidden_size, config.mlp_width_of(index), config.initializer_range);
        let down_std = config.mixer.mlp_down_std(config);
        let path = |name: &str| format!("{prefix}.{name}.weight");
        let norm = list.vector(ParamGroup::Norm, path("mlp_norm"), width, 1.0);
        let gate_up = list.matrix(ParamGroup::Mlp, path("mlp.gate_proj"), 2 * inner, width, std);
        Mlp {
            norm,
            gate_up: list.stacked(gate_up, &[inner, inner]),
            down: list.matrix(ParamGroup::Mlp, path("mlp.down_proj"), width, inner, down_std),
            activation: config.mlp.activation,
            inner,
        }
    }
}
