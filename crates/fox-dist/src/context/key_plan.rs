//! Which earlier keys a rank needs.

use std::ops::Range;

use super::split::{SequenceChunk, SequenceSplit};

/// Keys in a block: the unit in which attention prunes, and in which keys travel. First keys at multiples of it keep
/// the borders of blocks where a single rank has them.
pub(super) const BLOCK: usize = 64;

/// Gate sums are rounded and thresholds computed elsewhere too: blocks this close to the threshold, in nats, travel.
const MARGIN: f64 = 1e-3;

/// What all ranks know about the sequences of a layer.
#[derive(Debug)]
pub(super) struct GateSums {
    /// Query heads.
    heads: usize,
    /// Per sequence, `c` at the last key of each block `[blocks, H]`.
    ends: Vec<Vec<f64>>,
    /// Per rank and chunk, `c` at the first position `[H]`.
    firsts: Vec<Vec<Vec<f64>>>,
}

impl GateSums {
    /// Blocks of a sequence that end within a chunk.
    pub fn ends_in(chunk: &SequenceChunk) -> Range<usize> {
        chunk.position / BLOCK..(chunk.position + chunk.len) / BLOCK
    }

    /// From what each rank says about its chunks: `c` at the first position, then at the ends of blocks, `[H]` each.
    pub fn new(split: &SequenceSplit, heads: usize, reported: &[&[f64]]) -> GateSums {
        let blocks = |length: &usize| vec![f64::NEG_INFINITY; length / BLOCK * heads];
        let mut sums = GateSums {
            heads,
            ends: split.lengths().iter().map(blocks).collect(),
            firsts: vec![Vec::new(); reported.len()],
        };
        for (rank, reported) in reported.iter().enumerate() {
            let mut reported = reported.chunks_exact(heads);
            for chunk in split.chunks(rank) {
                sums.firsts[rank].push(reported.next().unwrap_or_default().to_vec());
                for block in GateSums::ends_in(chunk) {
                    let end = reported.next().unwrap_or_default();
                    sums.ends[chunk.sequence][block * heads..][..heads].copy_from_slice(end);
                }
            }
        }
        sums
    }

    /// `c` before a position that is a multiple of [`BLOCK`].
    pub fn before(&self, sequence: usize, position: usize, head: usize) -> f64 {
        match position / BLOCK {
            0 => 0.0,
            block => self.ends[sequence][(block - 1) * self.heads + head],
        }
    }

    /// The first key that a head of the `i`-th chunk of a rank needs, of those before the chunk: keys across which the
    /// decay is below `threshold` are forgotten.
    fn start(
        &self,
        rank: usize,
        i: usize,
        chunk: &SequenceChunk,
        head: usize,
        threshold: f64,
    ) -> usize {
        let first = self.firsts[rank][i][head];
        let forgotten = |block: &usize| {
            let end = self.ends[chunk.sequence][block * self.heads + head];
            first - end < threshold - MARGIN
        };
        let blocks = chunk.position / BLOCK;
        // GateSums never rise, so that the forgotten blocks come first.
        let kept = (0..blocks).find(|block| !forgotten(block)).unwrap_or(blocks);
        kept * BLOCK
    }
}

/// The earlier keys that a chunk needs, as positions of its sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KeyRange {
    /// The chunk.
    pub chunk: SequenceChunk,
    /// First key that any head needs, a multiple of [`BLOCK`]; gates are needed from here on.
    pub first: usize,
    /// First key that each key head needs.
    pub starts: Vec<usize>,
    /// Row of the key at position `first` among the rank's keys.
    pub key_row: usize,
}

/// How a layer looks back.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttentionReach {
    pub heads: usize,
    pub kv_heads: usize,
    pub window: Option<usize>,
}

/// What a rank needs. `threshold(sequence, head)` is the decay below which a key is forgotten; without `sums` nothing
/// is.
pub(super) fn key_ranges(
    split: &SequenceSplit,
    rank: usize,
    reach: AttentionReach,
    sums: Option<&GateSums>,
    threshold: impl Fn(usize, usize) -> f64,
) -> Vec<KeyRange> {
    let mut key_row = 0;
    let range = |(i, chunk): (usize, &SequenceChunk)| {
        let seen = reach.window.map_or(0, |window| (chunk.position + 1).saturating_sub(window));
        let start = |head: usize| {
            let kept = sums.map_or(0, |sums| {
                sums.start(rank, i, chunk, head, threshold(chunk.sequence, head))
            });
            kept.max(seen / BLOCK * BLOCK)
        };
        let group = reach.heads / reach.kv_heads;
        let of_key_head = |kv: usize| (kv * group..(kv + 1) * group).map(start).min().unwrap_or(0);
        let starts: Vec<usize> = (0..reach.kv_heads).map(of_key_head).collect();
        let first = starts.iter().copied().min().unwrap_or(0);
        let range = KeyRange { chunk: *chunk, first, starts, key_row };
        key_row += chunk.position + chunk.len - first;
        range
    };
    split.chunks(rank).iter().enumerate().map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use fox_tensor::Segments;

    /// One sequence of 512 tokens over two ranks; head 0 forgets 1 nat a token, head 1 a tenth, head 2 nothing.
    #[test]
    fn heads_fetch_only_remembered_keys() {
        let split = SequenceSplit::new(&Segments::uniform(1, 512), 512, 2).unwrap();
        let gates = [-1.0, -0.1, 0.0];
        let c = |position: usize| gates.map(|gate| gate * (position + 1) as f64);
        let reported = |from: usize| -> Vec<f64> {
            let ends = (0..4).map(|block| from + block * BLOCK + BLOCK - 1);
            std::iter::once(from).chain(ends).flat_map(c).collect()
        };
        let (left, right) = (reported(0), reported(256));
        let sums = GateSums::new(&split, 3, &[&left, &right]);
        let reach = AttentionReach { heads: 3, kv_heads: 3, window: None };
        let range = &key_ranges(&split, 1, reach, Some(&sums), |_, _| -15.0)[0];
        // Decay from the query at 256 to the end of a block at 64 b + 63: 193 - 64 b tokens.
        assert_eq!(range.starts, [192, 64, 0]);
        assert_eq!((range.first, range.key_row), (0, 0));
        assert_eq!(sums.before(0, 64, 1), c(63)[1]);
        let strict = &key_ranges(&split, 1, reach, Some(&sums), |_, _| -0.5)[0];
        assert_eq!(strict.starts, [256, 192, 0], "the first head key_ranges nothing at all");
        let windowed = AttentionReach { window: Some(100), ..reach };
        let range = &key_ranges(&split, 1, windowed, Some(&sums), |_, _| -15.0)[0];
        assert_eq!((range.first, &range.starts[..]), (128, &[192, 128, 128][..]));
        // The window of the query at 256 begins with the first key of a block.
        let exact = AttentionReach { window: Some(129), ..reach };
        assert_eq!(key_ranges(&split, 1, exact, None, |_, _| 0.0)[0].starts, [128; 3]);
        let shared = AttentionReach { kv_heads: 1, ..reach };
        assert_eq!(key_ranges(&split, 1, shared, Some(&sums), |_, _| -15.0)[0].starts, [0]);
        assert_eq!(key_ranges(&split, 0, reach, Some(&sums), |_, _| -15.0)[0].starts, [0, 0, 0]);
    }
}
