//! The FoX layer's part in a decode step of the whole model.

use fox_cache::Past;
use fox_tensor::{
    Activation, AttentionWeights, DecodeBlock, DecodeProjection, DecodeShape, ParamId, Tensor,
};

use super::gate::Gate;
use super::layer::{ForgettingLayer, Projection};
use crate::params::Parameters;

/// The rest of the block that a layer stands in, for a decode step of the whole.
pub(crate) struct Surroundings<'a> {
    pub mixer_norm: &'a Tensor,
    pub mlp_norm: &'a Tensor,
    pub gate_up: &'a Tensor,
    pub down: &'a Tensor,
}

impl ForgettingLayer {
    /// What a decode step of the whole model must know about the blocks; `None` for layers that only go op
    /// by op.
    pub(crate) fn decode_shape(&self, mlp_act: Activation) -> Option<DecodeShape> {
        let per_head = matches!(self.gate, Gate::None | Gate::Projected { .. });
        let usual = self.options.heads * self.head_dim == self.width;
        let softmax = self.options.weights == AttentionWeights::Softmax;
        (per_head && usual && softmax && self.sinks.is_none()).then(|| DecodeShape {
            heads: self.options.heads,
            kv_heads: self.options.kv_heads,
            head_dim: self.head_dim,
            window: self.options.window,
            rope: self.options.rope,
            norm_eps: self.norm_eps,
            qk_eps: self.options.qk_norm_eps as f32,
            output_act: self.options.output_gate.unwrap_or(Activation::Sigmoid),
            mlp_act,
        })
    }

    /// One token for each sequence through the block this layer is part of.
    pub(crate) fn decode<'a>(
        &self,
        around: Surroundings<'a>,
        params: &'a Parameters,
        past: Past<'a>,
    ) -> DecodeBlock<'a> {
        let value = |id: ParamId| params.value(id);
        let projection = |p: &Projection, last| DecodeProjection {
            weight: value(p.weight),
            bias: p.bias.map(value),
            shift: p.shift.map(value),
            norm: p.norm.map(value),
            last,
        };
        DecodeBlock {
            mixer_norm: around.mixer_norm,
            q: projection(&self.q, Vec::new()),
            k: projection(&self.k, past.last_k),
            v: projection(&self.v, past.last_v),
            gate: match &self.gate {
                Gate::Projected { weight, bias } => Some((value(*weight), value(*bias))),
                _ => None,
            },
            output_gate: self.output_gate.map(value),
            output_norm: self.output_norm.map(value),
            o_proj: value(self.o_proj),
            mlp_norm: around.mlp_norm,
            gate_up: around.gate_up,
            down: around.down,
            keys: past.keys,
        }
    }
}
