//! Observation of the attention layers of a forward pass.

use fox_tensor::{AttentionSpec, AttentionWeights, Result, Tensor};

/// The operands of one attention layer.
#[derive(Clone, Copy, Debug)]
pub struct AttentionView<'a> {
    /// Number of the layer, from 0.
    pub layer: usize,
    /// How scores become weights.
    pub weights: AttentionWeights,
    /// Queries after norm and rotation `[R_q, H * d]`.
    pub q: &'a Tensor,
    /// Keys after shift, norm and rotation `[R_k, H_kv * d]`.
    pub k: &'a Tensor,
    /// Log forget gates `[R_k, H]`; `None` when nothing is forgotten.
    pub log_gates: Option<&'a Tensor>,
    /// Heads, scale, window, pruning and sequences.
    pub spec: &'a AttentionSpec,
    /// Tiles visited and in total, per head: `[H, 4]` i32 ([`fox_tensor::tile_counts`]).
    pub tiles: &'a Tensor,
}

/// A callback for the layers of [`Model::observe`](crate::Model::observe).
pub trait Observer {
    /// Called once per attention layer, in order. An error ends the forward pass.
    fn attention(&self, view: &AttentionView<'_>) -> Result<()>;
}
