//! Earlier keys, values and gates for forgetting attention.

use std::sync::Arc;

use fox_tensor::{
    Acp, AttentionSpec, ExtendedKeys, FullSequence, LocalKeys, Result, Segment, Segments, Tape, Var,
};

use super::Part;
use super::agree::{Bounds, agree};
use super::fetch::{Fetch, OP};
use super::plan::{Need, Reach, needs};

/// Without pruning a key stays where it is when its weight is provably below `e^-104`, which is 0 in f32: the smallest
/// number above is `2^-149 = e^-103.3`.
const VANISHED: f64 = -104.0;

/// Bounds from norm weights are those of exact arithmetic; rounding to bf16 adds at most `2^-7`.
const ROUNDING: f64 = 1.01;

/// See [`PrecedingRows::prepend_keys`](fox_tensor::PrecedingRows::prepend_keys).
pub(super) fn prepend_keys(
    part: &Part,
    tape: &mut Tape<'_>,
    own: &LocalKeys<'_>,
) -> Result<ExtendedKeys> {
    let inner = &*part.0;
    let (split, context, spec) = (&inner.split, &inner.context, own.spec);
    let gates = own.log_gates.map(|gates| gates.value().to_f32()).transpose()?;
    let (sums, bounds) = match &gates {
        None => (None, Bounds::default()),
        Some(gates) => {
            let (sums, bounds) = agree(part, own, gates)?;
            (Some(sums), bounds)
        }
    };
    let tolerance = match spec.acp {
        Acp::On { log_tolerance, .. } => f64::from(log_tolerance),
        Acp::Off => VANISHED,
    };
    let threshold = |sequence: usize, head: usize| {
        let bound = ROUNDING * bounds.of(sequence, head, spec.heads);
        tolerance - 2.0 * bound - (split.length(sequence) as f64).ln()
    };
    let reach = Reach { heads: spec.heads, kv_heads: spec.kv_heads, window: spec.window };
    let needs: Vec<Vec<Need>> = (0..context.size())
        .map(|rank| needs(split, rank, reach, sums.as_ref(), threshold))
        .collect();
    let mine = &needs[context.index()];
    let segments = mine.iter().map(|need| Segment {
        q_start: need.piece.row,
        q_len: need.piece.len,
        k_start: need.key_row,
        k_len: need.piece.position + need.piece.len - need.first,
    });
    let segments = Segments::new(segments.collect())?;
    let gate_sums = sums.iter().flat_map(|sums| {
        let before = |need: &Need, h| sums.before(need.piece.sequence, need.first, h);
        mine.iter().flat_map(move |need| (0..spec.heads).map(move |h| before(need, h)))
    });
    let full = FullSequence {
        gate_sums: gate_sums.collect(),
        keys: mine.iter().map(|need| split.length(need.piece.sequence)).collect(),
        bounds: match bounds.by_sequence.is_empty() {
            true => Vec::new(),
            false => {
                let of = |need: &Need, h| bounds.of(need.piece.sequence, h, spec.heads);
                let all = mine.iter().flat_map(|need| (0..spec.heads).map(move |h| of(need, h)));
                all.collect()
            }
        },
    };
    let fetch = Fetch::new(part, needs, own);
    part.note_traffic(fetch.traffic());
    let inputs: Vec<&Var> = [own.k, own.v].into_iter().chain(own.log_gates).collect();
    let mut outputs = tape.custom(fetch, &inputs)?.into_iter();
    let spec = AttentionSpec { segments, full_sequence: Some(Arc::new(full)), ..spec.clone() };
    match (outputs.next(), outputs.next(), outputs.next()) {
        (Some(k), Some(v), log_gates) => Ok(ExtendedKeys { k, v, log_gates, spec }),
        _ => Err(fox_tensor::Error::Argument { op: OP, detail: "the op gave no keys".into() }),
    }
}
