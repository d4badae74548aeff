//! A block: norm and mixer, then norm and MLP where there is one, around a residual stream.
//!
//! The stream travels as `(h, delta)`, the sum so far and the last addend, because adding and
//! normalising are one op.

use fox_tensor::{Activation, DecodeBlock, DecodeShape, ParamId, Result, Tape, Tensor, Var};

use crate::MemoryShape;
use crate::cache::LayerState;
use crate::config::{MixerConfig, ModelConfig};
use crate::mixers::{Forgetting, LayerPlace, Mixer, MixerContext, Surroundings};
use crate::params::{ParamGroup, ParamList, Parameters};

/// One block: its mixer and where its other parameters are.
#[derive(Debug)]
pub(crate) struct Block {
    mixer_norm: ParamId,
    mixer: Mixer,
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

/// What a block gives on.
pub(crate) struct BlockOutput {
    /// The residual stream before the last half of the block `[R, D]`.
    pub h: Var,
    /// The last half's output `[R, D]`, not yet added.
    pub delta: Var,
    /// Attention blocks visited and in all `[H, 2]`; `None` for what is no attention.
    pub blocks: Option<Tensor>,
}

impl Block {
    /// Declares the parameters of a block.
    pub fn declare(config: &ModelConfig, place: LayerPlace, list: &mut ParamList) -> Self {
        let width = config.hidden_size;
        let (prefix, norm, mixer) = match config.has_mlp() {
            true => (format!("model.layers.{}", place.index), "attn_norm", "attn"),
            false => (format!("backbone.layers.{}", place.index), "norm", "mixer"),
        };
        Block {
            mixer_norm: list.vector(
                ParamGroup::Norm,
                format!("{prefix}.{norm}.weight"),
                width,
                1.0,
            ),
            mixer: Mixer::declare(config, place, &format!("{prefix}.{mixer}"), list),
            mlp: config.has_mlp().then(|| Mlp::declare(config, &prefix, list)),
            norm_eps: config.norm_eps as f32,
            width,
        }
    }

    /// `h` and `delta` are `[R, D]`; the first block has no `delta`.
    pub fn forward(
        &self,
        tape: &mut Tape<'_>,
        h: &Var,
        delta: Option<&Var>,
        context: &MixerContext<'_>,
        state: Option<&mut LayerState>,
    ) -> Result<BlockOutput> {
        let var = |id: ParamId| context.params.var(id);
        let (h, x) = tape.add_rms_norm(h, delta, &var(self.mixer_norm), self.norm_eps)?;
        let mixed = self.mixer.forward(tape, &x, context, state)?;
        let Some(mlp) = &self.mlp else {
            return Ok(BlockOutput { h, delta: mixed.out, blocks: mixed.blocks });
        };
        let (h, x) = tape.add_rms_norm(&h, Some(&mixed.out), &var(mlp.norm), self.norm_eps)?;
        let gate_up = tape.linear(&x, &var(mlp.gate_up), None)?;
        let inner = tape.glu(&gate_up, mlp.activation)?;
        let delta = tape.linear(&inner, &var(mlp.down), None)?;
        Ok(BlockOutput { h, delta, blocks: mixed.blocks })
    }

    /// The attention layer and the weights of the norm in front of it; `None` in recurrent models.
    pub fn attention(&self) -> Option<(&Forgetting, ParamId)> {
        match &self.mixer {
            Mixer::Forgetting(layer) => Some((layer, self.mixer_norm)),
            _ => None,
        }
    }

    /// What a decode step of the whole model must know about its blocks; `None` where there is no such step.
    pub fn decode_shape(&self) -> Option<DecodeShape> {
        match (&self.mixer, &self.mlp) {
            (Mixer::Forgetting(mixer), Some(mlp)) => mixer.decode_shape(mlp.activation),
            _ => None,
        }
    }

    /// A step of one token for each sequence; `None` where the state is not of the right kind.
    pub fn decode<'a>(
        &self,
        params: &'a Parameters,
        state: &'a mut LayerState,
    ) -> Option<DecodeBlock<'a>> {
        let (Mixer::Forgetting(mixer), Some(mlp)) = (&self.mixer, &self.mlp) else { return None };
        let around = Surroundings {
            mixer_norm: params.value(self.mixer_norm),
            mlp_norm: params.value(mlp.norm),
            gate_up: params.value(mlp.gate_up),
            down: params.value(mlp.down),
        };
        Some(mixer.decode(around, params, state.past()?))
    }

    /// Values kept per token: the mixer's, and here a sum with its norm and scale for each half,
    /// `[g | u]` and the gated product.
    pub fn memory(&self) -> MemoryShape {
        let mixer = self.mixer.memory();
        let half = 2 * self.width + 1;
        let mlp = self.mlp.as_ref().map_or(0, |mlp| half + 3 * mlp.inner);
        let activations_per_token = mixer.activations_per_token + half + mlp;
        // Norms and the gated product.
        let cheap = self.width + self.mlp.as_ref().map_or(0, |mlp| self.width + mlp.inner);
        let cheap_per_token = mixer.cheap_per_token + cheap;
        MemoryShape { activations_per_token, cheap_per_token, ..mixer }
    }
}

impl Mlp {
    fn declare(config: &ModelConfig, prefix: &str, list: &mut ParamList) -> Self {
        let (width, inner, std) =
            (config.hidden_size, config.mlp_width(), config.initializer_range);
        // The official recurrent models start with smaller steps, the deeper they are.
        let down_std = match &config.mixer {
            MixerConfig::Forgetting(_) => std,
            _ => std / (2.0 * config.num_layers as f64).sqrt(),
        };
        let path = |name: &str| format!("{prefix}.{name}.weight");
        Mlp {
            norm: list.vector(ParamGroup::Norm, path("mlp_norm"), width, 1.0),
            gate_up: list.matrix(ParamGroup::Mlp, path("mlp.gate_proj"), 2 * inner, width, std),
            down: list.matrix(ParamGroup::Mlp, path("mlp.down_proj"), width, inner, down_std),
            activation: config.mlp.activation,
            inner,
        }
    }
}
