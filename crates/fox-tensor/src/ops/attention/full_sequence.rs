//! Segments that are the ends of longer sequences.

/// What is known of the whole sequences when the keys at hand are only their ends: a call that is told computes, for
/// its queries, what a call with all keys would. Without it a segment is a sequence of its own.
///
/// Keys that are not at hand must have been forgotten by all queries, by the rule of [`Acp`](crate::Acp) or to the
/// point where their weight is 0 in f32. Blocks of keys keep their borders when the first key at hand has a position
/// that is a multiple of 64. Decays do not depend on `gate_sums` but for their rounding, so a device may leave it
/// aside, and then prunes by the keys at hand.
#[derive(Clone, Debug, PartialEq)]
pub struct FullSequence {
    /// Sum of the log gates of all keys before a segment's first one, `[segments, H]`, row by row; empty without gates.
    pub gate_sums: Vec<f64>,
    /// Keys of each whole sequence, those after the last query included: `N` of the pruning rule.
    pub keys: Vec<usize>,
    /// The bound [`LogitBound::Norms`](crate::LogitBound::Norms) over each whole sequence, `[segments, H]`; empty
    /// where the bound comes from elsewhere.
    pub bounds: Vec<f64>,
}
