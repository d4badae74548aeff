//! Ops that only the baselines need: linear recurrences, the short convolution before them and
//! their gates.
//!
//! They stand apart from [`Backend`](crate::Backend) so that a device may lack them: then
//! [`Backend::baseline_ops`](crate::Backend::baseline_ops) says so. The conventions are the same:
//! shapes, types and segments were checked by the [`Tape`](crate::Tape).

use crate::{Activation, Result, Segments, Tensor};

/// How a token changes the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Update {
    /// Adds: `S_t = a_t S_{t-1} + k_t (b_t v_t)^T`.
    Add,
    /// Replaces what the key holds, in part: `S_t = a_t S_{t-1} + k_t (b_t e_t)^T` with
    /// `e_t = v_t - (a_t S_{t-1})^T k_t`, the delta rule.
    Delta,
}

/// Operands of a scan, a linear recurrence with a matrix `S: [dk, dv]` per head as its state.
#[derive(Clone, Debug)]
pub struct ScanInputs<'a> {
    /// Queries `[R, G * dk]`.
    pub q: &'a Tensor,
    /// Keys `[R, G * dk]`.
    pub k: &'a Tensor,
    /// Values `[R, H * dv]`.
    pub v: &'a Tensor,
    /// Log of the decay `a_t`, at most 0: `[R, H]`, or `[R, H * dk]` with one for every row of the
    /// state. Without it nothing decays.
    pub log_decay: Option<&'a Tensor>,
    /// Strength `b_t` of the write `[R, H]`; 1 when absent.
    pub write: Option<&'a Tensor>,
    /// Factor `[H]` with which the value itself is added to the output.
    pub skip: Option<&'a Tensor>,
    /// The state before each segment `[segments, H * dk * dv]`; zeros when absent. No gradient.
    pub state: Option<&'a Tensor>,
}

/// Options of a scan: `o_t = scale * S_t^T q_t + skip * v_t`. Rows outside every segment are zero.
#[derive(Clone, Debug)]
pub struct ScanSpec {
    /// Heads `H`, each with a state of its own.
    pub heads: usize,
    /// Heads `G` of queries and keys; head `h` reads `h / (H / G)`.
    pub key_heads: usize,
    /// Width of a query and of a key.
    pub key_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
    /// Factor on what is read from the state.
    pub scale: f32,
    /// How a token changes the state.
    pub update: Update,
    /// The sequences (query rows).
    pub segments: Segments,
}

impl ScanSpec {
    /// Elements of the states of all heads.
    pub fn state_len(&self) -> usize {
        self.heads * self.key_dim * self.value_dim
    }
}

/// What a forward scan shall give besides its output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScanKeep {
    /// The state after each segment.
    pub state: bool,
    /// What makes the backward pass cheaper.
    pub backward: bool,
}

/// Result of the forward scan.
#[derive(Clone, Debug)]
pub struct ScanOut {
    /// `[R, H * dv]`.
    pub o: Tensor,
    /// The state after each segment `[segments, H * dk * dv]`, if it was asked for.
    pub state: Option<Tensor>,
    /// For the backward pass: the backend's own business.
    pub saved: Option<Tensor>,
}

/// Result of the backward scan.
#[derive(Clone, Debug)]
pub struct ScanGrads {
    /// `[R, G * dk]`.
    pub dq: Tensor,
    /// `[R, G * dk]`.
    pub dk: Tensor,
    /// `[R, H * dv]`.
    pub dv: Tensor,
    /// As `log_decay`.
    pub dlog_decay: Option<Tensor>,
    /// `[R, H]`.
    pub dwrite: Option<Tensor>,
    /// `[H]`.
    pub dskip: Option<Tensor>,
}

/// Operands of the short convolution.
#[derive(Clone, Debug)]
pub struct ConvInputs<'a> {
    /// Input `[R, C]`.
    pub x: &'a Tensor,
    /// Filters, `K` taps for every channel, the last one for the current row: `C * K` elements.
    pub weight: &'a Tensor,
    /// `[C]`.
    pub bias: Option<&'a Tensor>,
    /// The `K - 1` rows before each segment, oldest first `[segments * (K - 1), C]`; zeros when
    /// absent. No gradient.
    pub before: Option<&'a Tensor>,
}

impl ConvInputs<'_> {
    /// Number of taps `K`.
    pub fn taps(&self) -> usize {
        self.weight.len() / self.x.cols().max(1)
    }
}

/// Options of the short convolution: `y = l2(act(conv(x) + bias))`.
#[derive(Clone, Debug)]
pub struct ConvSpec {
    /// Nonlinearity after the bias.
    pub activation: Option<Activation>,
    /// Division by the Euclidean norm, head by head.
    pub l2_norm: Option<L2Norm>,
    /// The sequences (query rows). Rows outside come out as zeros.
    pub segments: Segments,
}

/// `x / sqrt(sum x^2 + eps)` over every `width` channels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct L2Norm {
    /// Width of a head.
    pub width: usize,
    /// Inside the square root.
    pub eps: f32,
}

/// Gradients of the short convolution.
#[derive(Clone, Debug)]
pub struct ConvGrads {
    /// `[R, C]`.
    pub dx: Tensor,
    /// As the filters.
    pub dweight: Tensor,
    /// `[C]`; present when there is a bias.
    pub dbias: Option<Tensor>,
}

/// Operands of the time step: `dt = clamp(softplus(z + bias))`, `log_decay = -exp(a_log) dt`.
#[derive(Clone, Debug)]
pub struct TimeStepInputs<'a> {
    /// `[R, H]`.
    pub z: &'a Tensor,
    /// `[H]`.
    pub bias: &'a Tensor,
    /// `[H]`.
    pub a_log: &'a Tensor,
    /// Smallest and largest time step.
    pub limits: (f32, f32),
}

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

/// A device's ops for the baselines.
pub trait BaselineOps {
    /// Columns of `x[R, C]`, cut into parts of these widths, which add up to `C`.
    fn split_columns(&self, x: &Tensor, widths: &[usize]) -> Result<Vec<Tensor>>;
    /// Parts of equal row count side by side: the inverse, and the gradient, of `split_columns`.
    fn join_columns(&self, parts: &[Tensor]) -> Result<Tensor>;

    /// Causal convolution of every channel with its own filter; see [`ConvSpec`].
    fn short_conv_fwd(&self, inputs: &ConvInputs<'_>, spec: &ConvSpec) -> Result<Tensor>;
    /// Gradients of `short_conv_fwd`; everything is recomputed from the inputs.
    fn short_conv_bwd(
        &self,
        dy: &Tensor,
        inputs: &ConvInputs<'_>,
        spec: &ConvSpec,
    ) -> Result<ConvGrads>;

    /// The linear recurrence; see [`ScanSpec`].
    fn scan_fwd(&self, inputs: &ScanInputs<'_>, spec: &ScanSpec, keep: ScanKeep)
    -> Result<ScanOut>;
    /// Gradients of `scan_fwd`; `saved` is what it saved.
    fn scan_bwd(
        &self,
        d_out: &Tensor,
        inputs: &ScanInputs<'_>,
        saved: Option<&Tensor>,
        spec: &ScanSpec,
    ) -> Result<ScanGrads>;

    /// `(dt, log_decay)`, both `[R, H]`.
    fn time_step_fwd(&self, inputs: &TimeStepInputs<'_>) -> Result<(Tensor, Tensor)>;
    /// `(dz[R, H], da_log[H])` from the gradients of `dt` and `log_decay`, if there are any. The
    /// bias has the column sums of `dz`.
    fn time_step_bwd(
        &self,
        ddt: Option<&Tensor>,
        dlog_decay: Option<&Tensor>,
        inputs: &TimeStepInputs<'_>,
    ) -> Result<(Tensor, Tensor)>;

    /// Queries, keys and log decays of HGRN2.
    fn hgrn_gates_fwd(&self, inputs: &HgrnInputs<'_>) -> Result<HgrnGates>;
    /// Gradients of `hgrn_gates_fwd` from those of its outputs.
    fn hgrn_gates_bwd(&self, d_out: &HgrnGates, inputs: &HgrnInputs<'_>) -> Result<HgrnGrads>;

    /// The lower bounds `[C]` of layer `layer`: `sum_{1 <= m <= layer} softmax_m(table[L, C])`.
    fn lower_bound_fwd(&self, table: &Tensor, layer: usize) -> Result<Tensor>;
    /// `dtable[L, C]`.
    fn lower_bound_bwd(&self, dy: &Tensor, table: &Tensor, layer: usize) -> Result<Tensor>;
}
