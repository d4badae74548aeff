//! Linear recurrences with a matrix as their state.

pub(crate) mod cases;
mod naive;
mod tape;

use crate::{Result, Segments, Tensor};
pub use tape::ScanVars;

/// How a token changes the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateUpdate {
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
    pub update: StateUpdate,
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
pub struct ScanExtras {
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

/// A device's linear recurrences.
pub trait ScanOps {
    /// The linear recurrence; see [`ScanSpec`].
    fn scan_fwd(
        &self,
        inputs: &ScanInputs<'_>,
        spec: &ScanSpec,
        keep: ScanExtras,
    ) -> Result<ScanOut>;
    /// Gradients of `scan_fwd`; `saved` is what it saved.
    fn scan_bwd(
        &self,
        d_out: &Tensor,
        inputs: &ScanInputs<'_>,
        saved: Option<&Tensor>,
        spec: &ScanSpec,
    ) -> Result<ScanGrads>;
}
