//! Gates of HGRN2 and their lower bounds.

pub(crate) mod cases;
mod naive;
mod tape;

use crate::{Result, Tensor};

/// Operands of HGRN2's gates: `f = lower + (1 - lower) sigmoid(z)`.
#[derive(Clone, Debug)]
pub struct HgrnInputs<'a> {
    /// Raw queries `[R, C]`.
    pub q: &'a Tensor,
    /// Logits of the forget gates `[R, C]`.
    pub z: &'a Tensor,
    /// Lower bounds of the gates `[C]`, from 0 up to, but not including, 1; 0 when absent.
    pub lower: Option<&'a Tensor>,
}

/// What HGRN2's gates give, or their gradients; all `[R, C]`.
#[derive(Clone, Debug)]
pub struct HgrnGates {
    /// `silu(q)`.
    pub q: Tensor,
    /// `1 - f`.
    pub k: Tensor,
    /// `ln f`.
    pub log_f: Tensor,
}

/// Gradients of HGRN2's gates.
#[derive(Clone, Debug)]
pub struct HgrnGrads {
    /// `[R, C]`.
    pub dq: Tensor,
    /// `[R, C]`.
    pub dz: Tensor,
    /// `[C]`; present when there are lower bounds.
    pub dlower: Option<Tensor>,
}

/// A device's gates of HGRN2.
pub trait HgrnOps {
    /// Queries, keys and log decays of HGRN2.
    fn hgrn_gates_fwd(&self, inputs: &HgrnInputs<'_>) -> Result<HgrnGates>;
    /// Gradients of `hgrn_gates_fwd` from those of its outputs.
    fn hgrn_gates_bwd(&self, d_out: &HgrnGates, inputs: &HgrnInputs<'_>) -> Result<HgrnGrads>;

    /// The lower bounds `[C]` of layer `layer`: `sum_{1 <= m <= layer} softmax_m(table[L, C])`.
    fn lower_bound_fwd(&self, table: &Tensor, layer: usize) -> Result<Tensor>;
    /// `dtable[L, C]`.
    fn lower_bound_bwd(&self, dy: &Tensor, table: &Tensor, layer: usize) -> Result<Tensor>;
}
