//! Shared code of mixers that are linear recurrences.

use fox_cache::{ConvStateSpec, RecurrentState, RecurrentStateSpec};
use fox_tensor::{
    Activation, HeadSpec, L2Norm, Result, ScanSpec, ScanVars, Segments, StateUpdate, Tape, Var,
};

use crate::config::Validator;

/// Tokens of a chunk of a linear recurrence.
const CHUNK: usize = 64;

/// Training saves one state for about this many tokens.
const TOKENS_PER_STATE: usize = 64;

/// `tape.scan` from `state`, `[R, H * dv]`; the state after the last tokens is staged in it. Without a state every
/// sequence starts from zeros, or from the state that another rank ended with.
pub fn scan(
    tape: &mut Tape<'_>,
    vars: &ScanVars<'_>,
    spec: &ScanSpec,
    state: Option<&mut RecurrentState>,
) -> Result<Var> {
    if let Some(rows) = tape.preceding_rows() {
        return rows.scan(tape, vars, spec);
    }
    let before = state.as_ref().map(|state| Var::constant(state.scan().clone()));
    let (out, after) = tape.scan(vars, before.as_ref(), before.is_some(), spec)?;
    if let Some((state, after)) = state.zip(after) {
        state.stage_scan(after.value().clone());
    }
    Ok(out)
}

/// The norm of the delta rule's queries and keys, over heads of this width.
pub(super) fn delta_norm(width: usize) -> L2Norm {
    L2Norm { width, eps: 1e-6 }
}

/// Strengths of the delta rule's writes `[R, H]`: `sigmoid(x W^T)`, or twice that with negative eigenvalues.
pub(super) fn write_strength(
    tape: &mut Tape<'_>,
    x: &Var,
    weight: &Var,
    negative_eigenvalues: bool,
) -> Result<Var> {
    let z = tape.linear(x, weight, None)?;
    let most = if negative_eigenvalues { 2.0 } else { 1.0 };
    let most = Var::constant(tape.device().full(z.value().shape(), most)?);
    tape.gated_norm(&most, None, Some(&z), 1, 0.0, Activation::Sigmoid)
}

/// `rms(o)` of every head of a scan's output `[R, H * dv]`, with a weight `[dv]` that the heads share.
pub(super) fn head_norm(
    tape: &mut Tape<'_>,
    o: &Var,
    weight: &Var,
    scan: &ScanSpec,
    norm_eps: f32,
) -> Result<Var> {
    let spec = HeadSpec {
        heads: scan.heads,
        head_dim: scan.value_dim,
        norm_eps,
        rope: None,
        segments: scan.segments.clone(),
    };
    tape.prepare_heads(o, None, None, Some(weight), &spec)
}

/// Sizes of a linear recurrence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanShape {
    /// Heads, each with a state.
    pub heads: usize,
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Width of a query and of a key.
    pub key_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
    /// Whether states are updated by the delta rule, and not only added to.
    pub delta: bool,
}

impl ScanShape {
    /// The recurrence over these sequences.
    pub fn spec(&self, scale: f32, segments: &Segments) -> ScanSpec {
        ScanSpec {
            heads: self.heads,
            key_heads: self.key_heads,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
            scale,
            update: if self.delta { StateUpdate::Delta } else { StateUpdate::Add },
            segments: segments.clone(),
        }
    }

    /// The decode state of the delta rule, whose queries, keys and values have convolutions of `taps`.
    pub(super) fn delta_state(&self, taps: Option<usize>) -> RecurrentStateSpec {
        let (keys, values) = (self.key_heads * self.key_dim, self.heads * self.value_dim);
        let convs = taps.map_or(Vec::new(), |taps| {
            [keys, keys, values].map(|channels| ConvStateSpec { channels, taps }).to_vec()
        });
        RecurrentStateSpec { convs, scan: self.heads * self.key_dim * self.value_dim }
    }

    /// Checks the sizes of a delta rule, under the names that they have in files.
    pub(super) fn validate_delta(&self, validator: &Validator<'_>) -> crate::Result<()> {
        let (heads, value_heads) = (self.key_heads, self.heads);
        validator.range("num_heads", heads, 1, Validator::MAX_WIDTH)?;
        validator.range("num_v_heads", value_heads, heads, Validator::MAX_WIDTH)?;
        validator.require(value_heads.is_multiple_of(heads), "num_v_heads", || {
            format!("is {value_heads}, not a multiple of `num_heads` {heads}")
        })?;
        validator.range("head_dim", self.key_dim, 1, Validator::MAX_HEAD)?;
        validator.range("expand_v", self.value_dim, 1, Validator::MAX_HEAD)
    }

    /// FLOPs per token, forward and backward. Products inside a chunk count for the visible half
    /// only; those of queries and keys once for all heads that share them.
    pub fn train_flops(&self, seq: usize) -> f64 {
        let (chunk, heads) = (CHUNK.min(seq.max(1)) as f64, self.heads as f64);
        let pairs = chunk * (self.key_heads * self.key_dim) as f64;
        let mixes = chunk * heads * self.value_dim as f64;
        let states = 2.0 * heads * (self.key_dim * self.value_dim) as f64;
        // Forward: Q K^T; A W; Q S, K^T W. Backward: Q K^T, dA K, dA^T Q; A^T dO, dO W^T;
        // K G, dO S^T, W G^T, Q^T dO.
        let additive = 4.0 * pairs + 3.0 * mixes + 6.0 * states;
        // The delta rule, forward: K K^T; the system; K S. Backward: K K^T, two of dK; both systems,
        // dE W^T; K S, dE S^T, K^T dE.
        let more = 4.0 * pairs + 4.0 * mixes + 4.0 * states;
        if self.delta { additive + more } else { additive }
    }
}

/// Values per token of the states that a training step saves for the backward pass of a scan whose states
/// have `elements` elements in all heads together.
pub fn saved_states(elements: usize) -> usize {
    elements.div_ceil(TOKENS_PER_STATE)
}

/// The bound of Xavier's uniform initialization with gain `2^-2.5`, for the linear layers of DeltaNet
/// and HGRN2.
pub(super) fn xavier_bound((rows, cols): (usize, usize)) -> f64 {
    2f64.powf(-2.5) * (6.0 / (rows + cols) as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_products_of_a_chunk() {
        let shape = ScanShape { heads: 2, key_heads: 1, key_dim: 3, value_dim: 5, delta: false };
        // 12 products of queries and keys, 40 of weights and values, 60 with the states.
        assert_eq!(shape.train_flops(4), 4.0 * 12.0 + 3.0 * 40.0 + 6.0 * 60.0);
        let more = 4.0 * (12.0 + 40.0 + 60.0);
        assert_eq!(ScanShape { delta: true, ..shape }.train_flops(4), 528.0 + more);
    }
}
