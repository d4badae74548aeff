//! A block: norm, mixer, norm, MLP, around a residual stream.
//!
//! The stream travels as `(h, delta)`, the sum so far and the last addend, because adding and
//! normalising are one op.

use fox_tensor::{Activation, ParamId, Result, Tape, Tensor, Var};

use crate::MemoryShape;
use crate::cache::LayerState;
use crate::config::ModelConfig;
use crate::mixers::{Mixer, MixerContext};
use crate::params::{ParamGroup, ParamList};

/// One block: its mixer and where its other parameters are.
#[derive(Debug)]
pub(crate) struct Block {
    attn_norm: ParamId,
    mixer: Mixer,
    mlp_norm: ParamId,
    gate_up: ParamId,
    down: ParamId,
    activation: Activation,
    norm_eps: f32,
    widths: (usize, usize),
}

/// What a block gives on.
pub(crate) struct BlockOutput {
    /// The residual stream before the MLP `[R, D]`.
    pub h: Var,
    /// The MLP's output `[R, D]`, not yet added.
    pub delta: Var,
    /// Attention blocks visited and in all `[H, 2]`.
    pub blocks: Tensor,
}

impl Block {
    /// Declares the parameters of block `index`.
    pub fn declare(config: &ModelConfig, index: usize, list: &mut ParamList) -> Self {
        let prefix = format!("model.layers.{index}");
        let (width, inner, std) =
            (config.hidden_size, config.mlp_width(), config.initializer_range);
        let path = |name: &str| format!("{prefix}.{name}.weight");
        Block {
            attn_norm: list.vector(ParamGroup::Norm, path("attn_norm"), width, 1.0),
            mixer: Mixer::declare(config, &format!("{prefix}.attn"), list),
            mlp_norm: list.vector(ParamGroup::Norm, path("mlp_norm"), width, 1.0),
            gate_up: list.matrix(ParamGroup::Mlp, path("mlp.gate_proj"), 2 * inner, width, std),
            down: list.matrix(ParamGroup::Mlp, path("mlp.down_proj"), width, inner, std),
            activation: config.mlp.activation,
            norm_eps: config.norm_eps as f32,
            widths: (width, inner),
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
        let (h, x) = tape.add_rms_norm(h, delta, &var(self.attn_norm), self.norm_eps)?;
        let mixed = self.mixer.forward(tape, &x, context, state)?;
        let (h, x) = tape.add_rms_norm(&h, Some(&mixed.out), &var(self.mlp_norm), self.norm_eps)?;
        let gate_up = tape.linear(&x, &var(self.gate_up), None)?;
        let inner = tape.glu(&gate_up, self.activation)?;
        let delta = tape.linear(&inner, &var(self.down), None)?;
        Ok(BlockOutput { h, delta, blocks: mixed.blocks })
    }

    /// Values kept per token: the mixer's, and here two sums with their norms and scales, `[g | u]`
    /// and the gated product.
    pub fn memory(&self) -> MemoryShape {
        let (width, inner) = self.widths;
        let mixer = self.mixer.memory();
        MemoryShape {
            activations_per_token: mixer.activations_per_token + 4 * width + 2 + 3 * inner,
            ..mixer
        }
    }
}
