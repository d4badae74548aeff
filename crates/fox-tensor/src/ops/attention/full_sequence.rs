//! Segments that are the ends of longer sequences (context parallelism).

/// Facts about the full sequences of a call whose keys are only their last part. The call then returns, for its queries,
/// what a call with all keys would. Without it a segment is a full sequence.
///
/// Missing keys must be forgotten by all queries, by the rule of [`Acp`](crate::Acp) or because their weight is 0 in
/// f32. Key blocks keep their borders when the position of the first key is a multiple of 64. `gate_sums` affects
/// decays by rounding only, so a device may ignore it and prune by the keys of the call.
#[derive(Clone, Debug, PartialEq)]
pub struct FullSequence {
    /// Sum of the log gates of all keys before a segment's first one, `[segments, H]`, row by row; empty without gates.
    pub gate_sums: Vec<f64>,
    /// Keys of each full sequence, those after the last query included: `N` of the pruning rule.
    pub keys: Vec<usize>,
    /// The bound [`LogitBound::Norms`](crate::LogitBound::Norms) over each full sequence, `[segments, H]`; empty
    /// for other bounds.
    pub bounds: Vec<f64>,
}
