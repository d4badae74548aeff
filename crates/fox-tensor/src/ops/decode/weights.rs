//! The weights of a model whose sequences decode in slots, block by block.
//!
//! Tensors are shared handles. A mixer describes itself as a [`DecodeMixer`]; a device that does not support one of the
//! blocks opens no slots, and the model decodes op by op.

use std::sync::Arc;

use crate::{Activation, Rope, Tensor};

/// A model for [`SlotDecodeOps::open_slots`](crate::SlotDecodeOps::open_slots). `D` is its width.
#[derive(Clone, Debug)]
pub struct DecodeWeights {
    /// Number of slots.
    pub slots: usize,
    /// Largest number of tokens of a sequence.
    pub max_context: usize,
    /// `[V, D]`.
    pub embeddings: Tensor,
    /// The blocks, in order.
    pub blocks: Vec<DecodeBlock>,
    /// Weights of the norm after the last block `[D]`.
    pub norm: Tensor,
    /// Epsilon of the norms of the residual stream.
    pub norm_eps: f32,
    /// The output projection `[V, D]`.
    pub head: Tensor,
}

/// A block: norm and mixer, then norm and MLP.
#[derive(Clone, Debug)]
pub struct DecodeBlock {
    /// Weights of the norm in front of the mixer `[D]`.
    pub mixer_norm: Tensor,
    /// The mixer.
    pub mixer: DecodeMixer,
    /// The MLP.
    pub mlp: DecodeMlp,
}

/// A mixer that can decode in slots.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum DecodeMixer {
    /// Softmax attention, with or without forget gates.
    Attention(Box<DecodeAttention>),
}

/// `down (act(g) * u)` with `[g | u] = gate_up x`.
#[derive(Clone, Debug)]
pub struct DecodeMlp {
    /// Weights of the norm in front `[D]`.
    pub norm: Tensor,
    /// `[2 I, D]`.
    pub gate_up: Tensor,
    /// `[D, I]`.
    pub down: Tensor,
    /// Nonlinearity of the gate.
    pub act: Activation,
}

/// An attention layer.
#[derive(Clone, Debug)]
pub struct DecodeAttention {
    /// Sizes and options.
    pub shape: AttentionShape,
    /// Queries.
    pub q: DecodeProjection,
    /// Keys.
    pub k: DecodeProjection,
    /// Values.
    pub v: DecodeProjection,
    /// Weights `[H, D]` and bias `[H]` of the forget gate.
    pub gate: Option<(Tensor, Tensor)>,
    /// Weights of the output gate `[H * d, D]`.
    pub output_gate: Option<Tensor>,
    /// Weights of the output norm `[H * d]`.
    pub output_norm: Option<Tensor>,
    /// Attention sinks `[H]`.
    pub sinks: Option<Tensor>,
    /// `[D, H * d]`.
    pub o_proj: Tensor,
    /// Per query head, the decay below which a page is skipped; none are if absent.
    pub thresholds: Option<Arc<[f64]>>,
}

/// A query, key or value projection.
#[derive(Clone, Debug)]
pub struct DecodeProjection {
    /// `[heads * d, D]`.
    pub weight: Tensor,
    /// `[heads * d]`.
    pub bias: Option<Tensor>,
    /// Weights of the shift coefficient `[heads, D]`.
    pub shift: Option<Tensor>,
    /// Norm weights `[heads * d]` or `[d]`.
    pub norm: Option<Tensor>,
}

/// Sizes and options of an attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Query heads `H`.
    pub heads: usize,
    /// Key heads.
    pub kv_heads: usize,
    /// Width of a head `d`.
    pub head_dim: usize,
    /// Sliding window.
    pub window: Option<usize>,
    /// The rotation of queries and keys.
    pub rope: Option<Rope>,
    /// Epsilon of the norms of queries and keys.
    pub qk_eps: f32,
    /// Epsilon of the output norm.
    pub norm_eps: f32,
    /// Nonlinearity of the output gate.
    pub output_act: Activation,
}
