//! What ops hand back, and what the optimizer hands in.

use crate::{AdamW, Tensor};

/// Bytes of device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Held by live tensors and scratch.
    pub in_use: usize,
    /// The most that was ever in use at once.
    pub peak: usize,
    /// Taken from the system, in use or kept for reuse.
    pub reserved: usize,
}

/// The time that a device spent on one kind of op.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OpTime {
    /// The op and its direction.
    pub op: &'static str,
    /// How often it ran.
    pub calls: usize,
    /// In all.
    pub seconds: f64,
}

/// Result of the attention forward.
#[derive(Clone, Debug)]
pub struct AttentionOut {
    /// Output `[R_q, H * d]`; zero for rows outside every segment.
    pub o: Tensor,
    /// Natural log of the softmax denominator, or of what is left of the stick, `[R_q, H]`; `-inf`
    /// for rows outside every segment.
    pub lse: Tensor,
    /// Blocks visited and blocks a plain causal (or windowed) pass would visit, per head: `[H, 2]` i32.
    pub blocks: Tensor,
}

/// Result of the attention backward.
#[derive(Clone, Debug)]
pub struct AttentionGrads {
    /// `[R_q, H * d]`.
    pub dq: Tensor,
    /// `[R_k, H_kv * d]`.
    pub dk: Tensor,
    /// `[R_k, H_kv * d]`.
    pub dv: Tensor,
    /// `[R_k, H]`; present when there are gates.
    pub dlog_gates: Option<Tensor>,
}

/// Result of the `prepare_heads` backward (also of `gated_norm`: `u` is then the input `x` and
/// `shift` the gate logits).
#[derive(Clone, Debug)]
pub struct HeadGrads {
    /// Gradient of the raw projection, shape of `u`.
    pub du: Tensor,
    /// Gradient of the shift logits (or gate logits).
    pub dshift: Option<Tensor>,
    /// Gradient of the norm weights.
    pub dnorm: Option<Tensor>,
}

/// Result of the fused output projection and cross-entropy.
#[derive(Clone, Debug)]
pub struct LossOut {
    /// Loss of every row `[R]`, unweighted; 0 where the label is ignored.
    pub loss: Tensor,
    /// Gradient of `sum_r weights[r] * loss[r]` with respect to `x` and the projection; present
    /// when asked for.
    pub grads: Option<(Tensor, Tensor)>,
}

/// A parameter, its gradient and its moments, all of one shape, and the update to make.
#[derive(Debug)]
pub struct ParamUpdate<'a> {
    /// The parameter.
    pub param: &'a mut Tensor,
    /// Its gradient.
    pub grad: &'a Tensor,
    /// Running mean of the gradient.
    pub m: &'a mut Tensor,
    /// Running mean of its square.
    pub v: &'a mut Tensor,
    /// How.
    pub step: AdamW,
}
