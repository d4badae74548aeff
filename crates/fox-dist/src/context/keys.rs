//! Earlier keys, values and gates for forgetting attention.

use std::sync::Arc;

use fox_tensor::{
    Acp, AttentionSpec, ExtendedKeys, FullSequence, LocalKeys, PendingKeys, Result, Segment,
    Segments, Tape, Var,
};

use super::SequenceShard;
use super::fetch::{KeyTransfer, OP, PlaceKeys, SendKeys};
use super::gate_sums::{Bounds, share_gate_sums};
use super::key_plan::{AttentionReach, KeyRange, key_ranges};

/// Without pruning a key stays where it is when its weight is provably below `e^-104`, which is 0 in f32: the smallest
/// number above is `2^-149 = e^-103.3`.
const VANISHED: f64 = -104.0;

/// Bounds from norm weights are those of exact arithmetic; rounding to bf16 adds at most `2^-7`.
const ROUNDING: f64 = 1.01;

/// See [`PrecedingRows::begin_keys`](fox_tensor::PrecedingRows::begin_keys).
pub(super) fn begin_keys(
    part: &SequenceShard,
    tape: &mut Tape<'_>,
    own: &LocalKeys<'_>,
) -> Result<PendingKeys> {
    let inner = &*part.0;
    let (split, context, spec) = (&inner.split, &inner.context, own.spec);
    let gates = own.log_gates.map(|gates| gates.value().to_f32()).transpose()?;
    let (sums, bounds) = match &gates {
        None => (None, Bounds::default()),
        Some(gates) => {
            let (sums, bounds) = share_gate_sums(part, own, gates)?;
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
    let reach = AttentionReach { heads: spec.heads, kv_heads: spec.kv_heads, window: spec.window };
    let key_ranges: Vec<Vec<KeyRange>> = (0..context.size())
        .map(|rank| key_ranges(split, rank, reach, sums.as_ref(), threshold))
        .collect();
    let mine = &key_ranges[context.index()];
    let segments = mine.iter().map(|range| Segment {
        q_start: range.chunk.row,
        q_len: range.chunk.len,
        k_start: range.key_row,
        k_len: range.chunk.position + range.chunk.len - range.first,
    });
    let segments = Segments::new(segments.collect())?;
    let gate_sums = sums.iter().flat_map(|sums| {
        let before = |range: &KeyRange, h| sums.before(range.chunk.sequence, range.first, h);
        mine.iter().flat_map(move |range| (0..spec.heads).map(move |h| before(range, h)))
    });
    let full = FullSequence {
        gate_sums: gate_sums.collect(),
        keys: mine.iter().map(|range| split.length(range.chunk.sequence)).collect(),
        bounds: match bounds.by_sequence.is_empty() {
            true => Vec::new(),
            false => {
                let of = |range: &KeyRange, h| bounds.of(range.chunk.sequence, h, spec.heads);
                let all = mine.iter().flat_map(|range| (0..spec.heads).map(move |h| of(range, h)));
                all.collect()
            }
        },
    };
    let keys = Arc::new(KeyTransfer::new(part, key_ranges, own));
    part.note_traffic(keys.traffic());
    let inputs: Vec<&Var> = [own.k, own.v].into_iter().chain(own.log_gates).collect();
    let sent = tape.custom(SendKeys(keys.clone()), &inputs)?;
    let spec = AttentionSpec { segments, full_sequence: Some(Arc::new(full)), ..spec.clone() };
    Ok(Box::new(move |tape| {
        let sent: Vec<&Var> = sent.iter().collect();
        let mut outputs = tape.custom(PlaceKeys(keys), &sent)?.into_iter();
        match (outputs.next(), outputs.next(), outputs.next()) {
            (Some(k), Some(v), log_gates) => Ok(ExtendedKeys { k, v, log_gates, spec }),
            _ => Err(fox_tensor::Error::argument(OP, "the op gave no keys")),
        }
    }))
}
