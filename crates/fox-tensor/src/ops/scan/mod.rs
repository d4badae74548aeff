//! Linear recurrences with a matrix as their state.

pub(crate) mod cases;
mod naive;
mod tape;

use crate::check::Operands;
use crate::{Backend, Result, Segments, Shape, Tensor};
pub(crate) use cases::cases;
pub use tape::ScanVars;

/// Update rule of the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateUpdate {
    /// Adds: `S_t = a_t S_{t-1} + k_t (b_t v_t)^T`.
    Add,
    /// Delta rule, replaces part of the value stored for the key: `S_t = a_t S_{t-1} + k_t (b_t e_t)^T` with
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
    /// The state before each segment `[segments, H * dk * dv]`; zeros when absent.
    pub state: Option<&'a Tensor>,
}

/// Options of a scan: `o_t = scale * S_t^T q_t + skip * v_t`. Rows outside every segment are zero.
#[derive(Clone, Debug)]
pub struct ScanSpec {
    /// Heads `H`, each with a separate state.
    pub heads: usize,
    /// Heads `G` of queries and keys; head `h` reads `h / (H / G)`.
    pub key_heads: usize,
    /// Width of a query and of a key.
    pub key_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
    /// Factor on the values read from the state.
    pub scale: f32,
    /// Update rule of the state.
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

/// Additional outputs of the forward scan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScanExtras {
    /// The state after each segment.
    pub state: bool,
    /// Saved states that make the backward pass cheaper.
    pub backward: bool,
}

/// Result of the forward scan.
#[derive(Clone, Debug)]
pub struct ScanOut {
    /// `[R, H * dv]`.
    pub o: Tensor,
    /// The state after each segment `[segments, H * dk * dv]`, if requested.
    pub state: Option<Tensor>,
    /// Saved states for the backward pass, in a layout of the backend.
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
    /// Of the state before each segment `[segments, H * dk * dv]`, if there is one.
    pub dstate: Option<Tensor>,
}

/// Linear recurrences on a device.
pub trait ScanOps {
    /// The linear recurrence; see [`ScanSpec`].
    fn scan_fwd(
        &self,
        inputs: &ScanInputs<'_>,
        spec: &ScanSpec,
        keep: ScanExtras,
    ) -> Result<ScanOut>;
    /// Gradients of `scan_fwd`. `d_state` is the gradient of [`ScanOut::state`], zeros when absent; `saved` is
    /// [`ScanOut::saved`].
    fn scan_bwd(
        &self,
        d_out: &Tensor,
        d_state: Option<&Tensor>,
        inputs: &ScanInputs<'_>,
        saved: Option<&Tensor>,
        spec: &ScanSpec,
    ) -> Result<ScanGrads>;
}

/// Validates the operands of [`ScanOps::scan_fwd`].
pub fn check_scan_fwd(
    backend: &dyn Backend,
    inputs: &ScanInputs<'_>,
    spec: &ScanSpec,
) -> Result<()> {
    let operands = Operands::new("scan", backend);
    let (heads, groups, dk, dv) = (spec.heads, spec.key_heads, spec.key_dim, spec.value_dim);
    operands.require(heads > 0 && groups > 0 && heads.is_multiple_of(groups), || {
        format!("{heads} heads are not a multiple of {groups} key heads")
    })?;
    operands.require(dk > 0 && dv > 0, || "a state without rows or columns".into())?;
    let (rows, key_width) = (inputs.q.rows(), groups.saturating_mul(dk));
    operands.real("q", inputs.q, &[rows, key_width])?;
    operands.real("k", inputs.k, &[rows, key_width])?;
    operands.real("v", inputs.v, &[rows, heads.saturating_mul(dv)])?;
    if let Some(decay) = inputs.log_decay {
        let width = if decay.cols() != heads { heads.saturating_mul(dk) } else { heads };
        operands.real("log_decay", decay, &[rows, width])?;
    }
    operands.maybe("write", inputs.write, &[rows, heads])?;
    operands.maybe("skip", inputs.skip, &[heads])?;
    let state = heads.saturating_mul(dk).saturating_mul(dv);
    operands.require(Shape::checked_len(&[spec.segments.len(), state]).is_some(), || {
        format!("states of {heads} heads of {dk} x {dv} are too large")
    })?;
    operands.maybe("state", inputs.state, &[spec.segments.len(), state])?;
    operands.segments(&spec.segments, rows, usize::MAX)
}

/// Validates the operands of [`ScanOps::scan_bwd`]. The shape of `saved` is up to the backend.
pub fn check_scan_bwd(
    backend: &dyn Backend,
    d_out: &Tensor,
    d_state: Option<&Tensor>,
    inputs: &ScanInputs<'_>,
    saved: Option<&Tensor>,
    spec: &ScanSpec,
) -> Result<()> {
    check_scan_fwd(backend, inputs, spec)?;
    let operands = Operands::new("scan_bwd", backend);
    operands.real("d_out", d_out, inputs.v.dims())?;
    operands.maybe("d_state", d_state, &[spec.segments.len(), spec.state_len()])?;
    saved.map_or(Ok(()), |saved| operands.plain("saved", saved))
}
