//! The FoX layer's weights for decoding in slots.

use std::sync::Arc;

use fox_tensor::{
    Activation, AttentionShape, AttentionWeights, DecodeAttention, DecodeMixer, DecodeProjection,
    ParamId,
};

use super::gate::Gate;
use super::layer::ForgettingLayer;
use super::projection::Projection;
use crate::params::Parameters;

impl ForgettingLayer {
    /// `None` for layers that only run op by op: stick-breaking, gates without a projection per head.
    pub(super) fn slot_weights(
        &self,
        params: &Parameters,
        thresholds: Option<Arc<[f64]>>,
    ) -> Option<DecodeMixer> {
        let options = &self.options;
        let value = |id: ParamId| params.value(id).clone();
        let gate = match &self.gate {
            Gate::None => None,
            Gate::Projected { weight, bias } => Some((value(*weight), value(*bias))),
            Gate::Shared { .. } | Gate::Constant { .. } | Gate::KeyScale { .. } => return None,
        };
        let softmax = options.weights == AttentionWeights::Softmax;
        if !softmax || options.heads * self.head_dim != self.width {
            return None;
        }
        let projection = |p: &Projection| DecodeProjection {
            weight: value(p.weight),
            bias: p.bias.map(value),
            shift: p.shift.map(value),
            norm: p.norm.map(value),
        };
        Some(DecodeMixer::Attention(Box::new(DecodeAttention {
            shape: AttentionShape {
                heads: options.heads,
                kv_heads: options.kv_heads,
                head_dim: self.head_dim,
                window: options.window,
                rope: options.rope,
                qk_eps: options.qk_norm_eps as f32,
                norm_eps: self.norm_eps,
                output_act: options.output_gate.unwrap_or(Activation::Sigmoid),
            },
            q: projection(&self.q),
            k: projection(&self.k),
            v: projection(&self.v),
            gate,
            output_gate: self.output_gate.map(value),
            output_norm: self.output_norm.map(value),
            sinks: self.sinks.map(value),
            o_proj: value(self.o_proj),
            thresholds,
        })))
    }
}
