//! Sequences whose first part is somewhere else.

use std::sync::Arc;

use super::{Tape, Var};
use crate::{AttentionSpec, LogitBound, Result, Tensor};

/// Where the rows are that come before those of a tape, when its segments continue sequences that begin elsewhere: with
/// another process, say. Gradients of what it hands out go back to where it came from.
///
/// All holders of a sequence run the same ops in the same order.
pub trait PrecedingRows: Send + Sync {
    /// The row of `u: [R, W]` before the first one of each segment, `[segments, W]`; zeros where a sequence begins.
    fn preceding_row(&self, tape: &mut Tape<'_>, u: &Var) -> Result<Var>;

    /// Keys, values and gates with those in front that are not forgotten, for [`Tape::attention`].
    fn prepend_keys(&self, tape: &mut Tape<'_>, own: &LocalKeys<'_>) -> Result<ExtendedKeys>;
}

/// The operands of attention as far as they are at hand. The segments of `spec` hold the queries' rows, and as many
/// keys as there are up to their last query.
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

/// The operands of attention that [`PrecedingRows::prepend_keys`] makes of [`LocalKeys`].
#[derive(Debug)]
pub struct ExtendedKeys {
    /// Keys `[R_k, H_kv * d]`.
    pub k: Var,
    /// Values `[R_k, H_kv * d]`.
    pub v: Var,
    /// Log forget gates `[R_k, H]`.
    pub log_gates: Option<Var>,
    /// The options with segments that fit these keys, and what is known of the whole sequences.
    pub spec: AttentionSpec,
}

impl Tape<'_> {
    /// The same tape for sequences that `earlier` holds the beginnings of.
    #[must_use]
    pub fn with_preceding_rows(mut self, rows: Arc<dyn PrecedingRows>) -> Self {
        self.preceding = Some(rows);
        self
    }

    /// Where the beginnings of its sequences are; `None` when they are on the tape.
    pub fn preceding_rows(&self) -> Option<Arc<dyn PrecedingRows>> {
        self.preceding.clone()
    }
}
