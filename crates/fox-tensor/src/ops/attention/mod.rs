//! Forgetting attention: softmax attention with forget gates.
//!
//! `R_q` and `R_k` are rows of queries and keys, `H` heads, `d` the head dim, `C = H * d`.

pub(crate) mod cases;
mod check;
pub(crate) mod naive;
mod tape;

use std::sync::Arc;

pub(crate) use cases::cases;
pub use check::{
    check_attention_bwd, check_attention_fwd, check_stick_breaking_bwd, check_stick_breaking_fwd,
};

use crate::{Result, Segments, Tensor};

/// The attention mask.
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
    /// Stick-breaking: from the newest key to the oldest, each takes a fraction of the remaining stick,
    /// `b_ij prod_{j < l < i} (1 - b_il)` with `b = sigmoid(s)`. A query does not see itself.
    StickBreaking,
}

/// Adaptive computation pruning: skip tiles (blocks of queries against blocks of keys) whose softmax mass is
/// provably negligible.
///
/// The bound is on the softmax mass, not on the output: of the weights of all visible keys, those of the skipped
/// keys add up to at most `exp(log_tolerance)`. The change of the output also depends on the values, see
/// [`output_change_bound`].
///
/// A query `i` sees itself with a score of at least `-U`, and key `j` has a score of at most
/// `U + c_i - c_j`. Key `j` therefore has a weight of at most `exp(2 U + c_i - c_j)`, which is below
/// `exp(log_tolerance) / N` in every tile that is skipped, and there are at most `N` such keys.
#[derive(Clone, Debug)]
pub enum Acp {
    /// Visit every tile.
    Off,
    /// Skip a tile when the decay across it is below `-(2 U + ln N) + log_tolerance` for `N` keys.
    On {
        /// Natural logarithm of the softmax mass of a row that may be dropped, e.g. -10.
        log_tolerance: f32,
        /// Source of the bound `U` on the magnitude of the logits.
        bound: LogitBound,
    },
}

/// Natural log of the tolerance of [`Acp::auto`].
pub const AUTO_LOG_TOLERANCE: f32 = -10.0;

impl Acp {
    /// Norm-based bound with tolerance `e^-10`, as the published kernel's automatic mode.
    pub fn auto() -> Self {
        Acp::On { log_tolerance: AUTO_LOG_TOLERANCE, bound: LogitBound::Norms }
    }

    /// The natural logarithm of the tolerance; 0 without pruning.
    pub fn log_tolerance(&self) -> f32 {
        match self {
            Acp::On { log_tolerance, .. } => *log_tolerance,
            Acp::Off => 0.0,
        }
    }
}

/// Bound on the change of an attention output, in any norm, when keys with a softmax mass of `dropped < 1` are dropped
/// and `largest_value` is the largest such norm of a value of that head: `2 * dropped * largest_value`.
///
/// With weights `p_j` that add up to 1, `o = sum_j p_j v_j`. Without the dropped keys the remaining weights become
/// `p_j / (1 - dropped)`, so
///
/// ```text
/// o - o' = sum_dropped p_j v_j + (1 - 1 / (1 - dropped)) sum_remaining p_j v_j
///        = sum_dropped p_j v_j - dropped / (1 - dropped) sum_remaining p_j v_j
/// ```
///
/// The weights of the first sum add up to `dropped`, those of the second to `1 - dropped`, and so either has a norm of
/// at most `dropped * max|v|`. The bound is tight when dropped and remaining values are opposite.
pub fn output_change_bound(dropped: f64, largest_value: f64) -> f64 {
    2.0 * dropped * largest_value
}

/// The bound `U >= max |q_i . k_j| * scale`, per head.
#[derive(Clone, Debug)]
pub enum LogitBound {
    /// `max_i |q_i| * max_j |k_j| * scale`, over the segment.
    Norms,
    /// `max|w_q| * max|w_k| * d * scale` from QK-norm weights: `q` `[C]` or `[d]`, `k` `[C_kv]` or `[d]`.
    /// Where queries and keys are rounded to bf16 it is larger by `(1 + 2^-8)^2`, since rounding makes the
    /// norm of either at most `1 + 2^-8` times as large.
    QkNorm {
        /// Weights of the query norm.
        q: Tensor,
        /// Weights of the key norm.
        k: Tensor,
    },
    /// Given by the caller, `[segments, H]`. With `U = (log_tolerance - ln N - threshold) / 2` a tile is skipped
    /// when the decay across it is below `threshold`, which may make `U` negative.
    Given(Tensor),
}

/// Lower bound of log gates in prefix sums: older keys behind such a gate have weight 0 anyway, and sums of gates of
/// `-3e38` would be infinite, their differences NaN.
pub const LOG_GATE_FLOOR: f64 = -1e3;

/// A log gate clamped to at least [`LOG_GATE_FLOOR`] for prefix sums. NaN stays NaN, which `f64::max` would lose.
pub fn clamp_log_gate(gate: f64) -> f64 {
    if gate < LOG_GATE_FLOOR { LOG_GATE_FLOOR } else { gate }
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
    /// Log forget gates of the key rows `[R_k, H]`, all <= 0; `None` means no forgetting. See
    /// [`LOG_GATE_FLOOR`].
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
    /// The attention mask.
    pub mask: Mask,
    /// Sliding window `W`: query `i` sees keys `i - W + 1 ..= i` (bidirectional: `|i - j| < W`).
    pub window: Option<usize>,
    /// Adaptive computation pruning.
    pub acp: Acp,
    /// The sequences.
    pub segments: Segments,
    /// The full sequences, where segments are only their ends.
    pub full_sequence: Option<Arc<FullSequence>>,
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
            full_sequence: None,
        }
    }

    /// Whether position `i` attends to position `j` (both counted from the segment's first key).
    pub fn sees(&self, i: usize, j: usize) -> bool {
        let near = self.window.is_none_or(|w| i.abs_diff(j) < w);
        near && (self.mask == Mask::Bidirectional || j <= i)
    }
}

/// Facts about the full sequences of a call whose keys are only their last part. The call then returns, for its queries,
/// what a call with all keys would. Without it a segment is a full sequence.
///
/// Missing keys must be forgotten by all queries, by the rule of [`Acp`] or because their weight is 0 in
/// f32. Key blocks keep their borders when the position of the first key is a multiple of 64. `gate_sums` affects
/// decays by rounding only, so a device may ignore it and prune by the keys of the call.
#[derive(Clone, Debug, PartialEq)]
pub struct FullSequence {
    /// Sum of the log gates of all keys before a segment's first one, `[segments, H]`, row by row; empty without gates.
    pub gate_sums: Vec<f64>,
    /// Keys of each full sequence, those after the last query included: `N` of the pruning rule.
    pub keys: Vec<usize>,
    /// The bound [`LogitBound::Norms`] over each full sequence, `[segments, H]`; empty
    /// for other bounds.
    pub bounds: Vec<f64>,
}

/// Result of the attention forward.
#[derive(Clone, Debug)]
pub struct AttentionOut {
    /// Output `[R_q, H * d]`; zero for rows outside every segment.
    pub o: Tensor,
    /// Natural log of the softmax denominator, or of the remaining stick, `[R_q, H]`; `-inf` for rows outside every
    /// segment.
    pub lse: Tensor,
    /// Tiles visited and tiles a plain causal (or windowed) pass would visit, per head: `[H, 4]` i32, the halves of
    /// two counts in 64 bits; [`tile_counts`] reads them.
    pub tiles: Tensor,
}

/// Visited and total tiles per head: [`AttentionOut::tiles`] as numbers.
pub fn tile_counts(tiles: &Tensor) -> Result<Vec<[u64; 2]>> {
    let count = |low: i32, high: i32| {
        u64::from(low.cast_unsigned()) | u64::from(high.cast_unsigned()) << 32
    };
    let words = tiles.to_i32()?;
    Ok(words.chunks_exact(4).map(|w| [count(w[0], w[1]), count(w[2], w[3])]).collect())
}

/// Encodes counts as the integers of [`AttentionOut::tiles`].
pub fn tile_words(counts: &[[u64; 2]]) -> Vec<i32> {
    let words = |n: &u64| [*n as u32, (*n >> 32) as u32].map(u32::cast_signed);
    counts.iter().flatten().flat_map(words).collect()
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

/// Softmax attention on a device.
pub trait AttentionOps {
    /// Softmax attention with forget gates; see [`AttentionSpec`].
    fn attention_fwd(
        &self,
        inputs: &AttentionInputs<'_>,
        spec: &AttentionSpec,
    ) -> Result<AttentionOut>;
    /// Gradients of `attention_fwd`, from its result.
    fn attention_bwd(
        &self,
        d_out: &Tensor,
        inputs: &AttentionInputs<'_>,
        out: &AttentionOut,
        spec: &AttentionSpec,
    ) -> Result<AttentionGrads>;
}
