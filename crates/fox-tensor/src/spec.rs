//! What the fused ops are asked to do: options and operands of each, with their shapes.
//!
//! `R` is a number of rows (tokens), `H` heads, `d` the head dim, `C = H * d`.

use crate::{Segments, Tensor};

/// Which keys a query may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mask {
    /// Keys at or before the query. Bias `c_i - c_j`.
    Causal,
    /// All keys of the segment. The decay grows with distance on both sides: bias `-|c_i - c_j|`,
    /// the gates of the later of the two positions down to, but not including, the earlier one.
    /// On the causal half it is the causal bias.
    Bidirectional,
}

/// How scores become weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionWeights {
    /// `softmax_j(s_ij + c_i - c_j)`.
    Softmax,
    /// Stick-breaking: from the newest key to the oldest, each takes its share of what is left,
    /// `b_ij prod_{j < l < i} (1 - b_il)` with `b = sigmoid(s)`. A query does not see itself.
    StickBreaking,
}

/// Adaptive computation pruning: skip blocks whose softmax mass is provably negligible.
#[derive(Clone, Debug)]
pub enum Acp {
    /// Visit every block.
    Off,
    /// Skip a block when the decay across it is below
    /// `-(2 U + ln N) + log_tolerance` for `N` keys; the dropped mass of a row is then at most
    /// `exp(log_tolerance)`.
    On {
        /// Natural logarithm of the mass that may be dropped, e.g. -10.
        log_tolerance: f32,
        /// Where the bound `U` on the magnitude of the logits comes from.
        bound: LogitBound,
    },
}

impl Acp {
    /// Norm-based bound with tolerance `e^-10`, as the published kernel's automatic mode.
    pub fn auto() -> Self {
        Acp::On { log_tolerance: -10.0, bound: LogitBound::Norms }
    }
}

/// Natural logarithm of a rest of a stick that counts as nothing, pruning or not: there is no
/// smaller positive f32.
pub const STICK_USED_UP: f32 = -104.0;

/// The bound `U >= max |q_i . k_j| * scale`, per head.
#[derive(Clone, Debug)]
pub enum LogitBound {
    /// `max_i |q_i| * max_j |k_j| * scale`, over the segment at hand.
    Norms,
    /// `max|w_q| * max|w_k| * d * scale` from QK-norm weights: `q` `[C]` or `[d]`, `k` `[C_kv]` or `[d]`.
    QkNorm {
        /// Weights of the query norm.
        q: Tensor,
        /// Weights of the key norm.
        k: Tensor,
    },
}

/// Operands of forgetting attention.
#[derive(Clone, Debug)]
pub struct AttentionInputs<'a> {
    /// Queries `[R_q, H * d]`.
    pub q: &'a Tensor,
    /// Keys `[R_k, H_kv * d]`.
    pub k: &'a Tensor,
    /// Values `[R_k, H_kv * d]`.
    pub v: &'a Tensor,
    /// Log forget gates of the key rows `[R_k, H]`, all <= 0; `None` means no forgetting.
    pub log_gates: Option<&'a Tensor>,
}

/// Options of forgetting attention.
#[derive(Clone, Debug)]
pub struct AttentionSpec {
    /// Query heads `H`.
    pub heads: usize,
    /// Key/value heads; query head `h` reads key head `h / (H / H_kv)`.
    pub kv_heads: usize,
    /// Width of a head, a multiple of 8 from 8 to 256.
    pub head_dim: usize,
    /// Factor on `q . k`, usually `1 / sqrt(d)`.
    pub scale: f32,
    /// Which keys a query may see.
    pub mask: Mask,
    /// Sliding window `W`: query `i` sees keys `i - W + 1 ..= i` (bidirectional: `|i - j| < W`).
    pub window: Option<usize>,
    /// Adaptive computation pruning.
    pub acp: Acp,
    /// The sequences.
    pub segments: Segments,
}

impl AttentionSpec {
    /// Causal attention with as many key heads as query heads, no window, no pruning.
    pub fn causal(heads: usize, head_dim: usize, segments: Segments) -> Self {
        AttentionSpec {
            heads,
            kv_heads: heads,
            head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            mask: Mask::Causal,
            window: None,
            acp: Acp::Off,
            segments,
        }
    }

    /// The logarithm of the mass that stick-breaking may drop: a row is done with a block of keys,
    /// and all older ones, when so little of its stick, decay included, is left for them.
    pub fn stick_tolerance(&self) -> f32 {
        match self.acp {
            Acp::Off => STICK_USED_UP,
            Acp::On { log_tolerance, .. } => log_tolerance.max(STICK_USED_UP),
        }
    }

    /// Whether position `i` may see position `j` (both counted from the segment's first key).
    pub fn sees(&self, i: usize, j: usize) -> bool {
        let near = self.window.is_none_or(|w| i.abs_diff(j) < w);
        near && (self.mask == Mask::Bidirectional || j <= i)
    }
}

/// Rotary position embedding, half-split pairs over the whole head dim.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of frequencies.
    pub base: f64,
}

/// Operands of `prepare_heads`: token shift, then per-head RMS norm, then RoPE.
#[derive(Clone, Debug)]
pub struct HeadInputs<'a> {
    /// Raw projection `[R, H * d]`.
    pub u: &'a Tensor,
    /// Logits of the shift coefficient `[R, H]`: `a = sigmoid(.)` weighs the previous row of `u`.
    pub shift: Option<&'a Tensor>,
    /// The row of `u` before each segment's first `[segments, H * d]`; zeros when absent.
    pub prev: Option<&'a Tensor>,
    /// Norm weights, `[H * d]`, or `[d]` shared by the heads.
    pub norm: Option<&'a Tensor>,
}

/// Options of `prepare_heads`. Rows outside every segment come out as zeros.
#[derive(Clone, Debug)]
pub struct HeadSpec {
    /// Number of heads `H`.
    pub heads: usize,
    /// Width of a head `d`.
    pub head_dim: usize,
    /// Epsilon inside the norm's square root.
    pub norm_eps: f32,
    /// Rotate, with positions counted from each segment's first key.
    pub rope: Option<Rope>,
    /// The sequences (query rows).
    pub segments: Segments,
}

/// Pointwise nonlinearity of a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `1 / (1 + e^-x)`.
    Sigmoid,
    /// `x * sigmoid(x)`, also called swish.
    Silu,
}

/// Operands of `gated_norm`: `y = rms_groups(x; norm) * act(gate)`, either part optional.
#[derive(Clone, Debug)]
pub struct GatedNormInputs<'a> {
    /// Input `[R, C]`.
    pub x: &'a Tensor,
    /// Norm weights `[C]`.
    pub norm: Option<&'a Tensor>,
    /// Gate logits `[R, C]`.
    pub gate: Option<&'a Tensor>,
    /// Groups of channels normalised on their own (the heads).
    pub groups: usize,
    /// Epsilon inside the norm's square root.
    pub eps: f32,
    /// Nonlinearity of the gate.
    pub act: Activation,
}

/// One decoupled AdamW update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay; 0 for parameters without decay.
    pub weight_decay: f32,
    /// Number of this update, counted from 1, for bias correction.
    pub step: u64,
    /// Factor applied to the gradient first (clipping).
    pub grad_scale: f32,
}
