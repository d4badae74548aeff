//! Sequences whose first rows are on another rank (context parallelism).

use std::sync::Arc;

use super::{Tape, Var};
use crate::{AttentionSpec, ConvSpec, LogitBound, Result, ScanSpec, ScanVars, Tensor};

/// Access to the rows before those of a tape, when its segments continue sequences that start on another rank. Gradients
/// of these rows are sent back to their rank.
///
/// All ranks of a sequence run the same ops in the same order.
pub trait PrecedingRows: Send + Sync {
    /// The row of each `u: [R, W]` before the first one of each segment, `[segments, W]`; zeros at the start of a
    /// sequence.
    fn preceding_rows(&self, tape: &mut Tape<'_>, u: &[&Var]) -> Result<Vec<Var>>;

    /// Starts to send keys, values and gates that are not forgotten to later ranks. What is computed before
    /// [`PendingKeys`] are asked for runs meanwhile, and so does its backward pass while their gradients return.
    fn begin_keys(&self, tape: &mut Tape<'_>, local: &LocalKeys<'_>) -> Result<PendingKeys>;

    /// [`Tape::scan`] from the states after the preceding rows: `[R, H * dv]`.
    fn scan(&self, tape: &mut Tape<'_>, vars: &ScanVars<'_>, spec: &ScanSpec) -> Result<Var>;

    /// [`Tape::short_conv`] over the preceding rows of `x: [R, C]` too: `[R, C]`.
    fn short_conv(
        &self,
        tape: &mut Tape<'_>,
        x: &Var,
        weight: &Var,
        bias: Option<&Var>,
        spec: &ConvSpec,
    ) -> Result<Var>;
}

/// The operands of attention on this rank. The segments of `spec` have the query rows, and the number of all keys up to
/// their last query.
pub struct LocalKeys<'a> {
    /// Queries `[R, H * d]`.
    pub q: &'a Tensor,
    /// Keys `[R, H_kv * d]`.
    pub k: &'a Var,
    /// Values `[R, H_kv * d]`.
    pub v: &'a Var,
    /// Log forget gates `[R, H]`.
    pub log_gates: Option<&'a Var>,
    /// The options of the call.
    pub spec: &'a AttentionSpec,
    /// A bound on the logits, whether or not the call prunes.
    pub bound: &'a LogitBound,
}

/// Keys, values and gates preceded by those of earlier ranks that are not forgotten, once they have arrived.
pub type PendingKeys = Box<dyn FnOnce(&mut Tape<'_>) -> Result<ExtendedKeys>>;

/// The operands of attention over [`LocalKeys`] and the [`PendingKeys`] before them.
#[derive(Debug)]
pub struct ExtendedKeys {
    /// Keys `[R_k, H_kv * d]`.
    pub k: Var,
    /// Values `[R_k, H_kv * d]`.
    pub v: Var,
    /// Log forget gates `[R_k, H]`.
    pub log_gates: Option<Var>,
    /// The options with segments that fit these keys, and facts about the full sequences.
    pub spec: AttentionSpec,
}

impl Tape<'_> {
    /// The same tape for sequences whose preceding rows are in `rows`.
    #[must_use]
    pub fn with_preceding_rows(mut self, rows: Arc<dyn PrecedingRows>) -> Self {
        self.preceding = Some(rows);
        self
    }

    /// Access to the preceding rows; `None` when sequences start on this tape.
    pub fn preceding_rows(&self) -> Option<Arc<dyn PrecedingRows>> {
        self.preceding.clone()
    }
}
