//! Segments: which rows form a sequence.
//!
//! Every op along the time axis (shift, RoPE, gates, attention, scans) takes [`Segments`]. One description covers
//! uniform batches, left padding, packed documents and decoding against a KV cache. The output of rows outside every
//! segment (padding) is zero.

use std::sync::Arc;

use crate::{Error, Result};

/// The query rows and key rows of one sequence.
///
/// The last query is aligned with the last key: query `t` of the segment has position
/// `k_len - q_len + t`. In training both ranges coincide; in decoding `q_len` is the new tokens and
/// `k_len` the length of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First row of the queries.
    pub q_start: usize,
    /// Number of queries.
    pub q_len: usize,
    /// First row of the keys.
    pub k_start: usize,
    /// Number of keys, at least `q_len`.
    pub k_len: usize,
}

impl Segment {
    /// Position of the segment's first query: the number of keys before it.
    pub fn offset(&self) -> usize {
        self.k_len - self.q_len
    }
}

/// The sequences of a batch: disjoint in query rows and disjoint in key rows, in ascending order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segments(Arc<[Segment]>);

impl Segments {
    /// Checks that the segments are ascending and disjoint on both sides, and that every query has
    /// a key. Kernels write rows in parallel and rely on this.
    pub fn new(segments: Vec<Segment>) -> Result<Self> {
        let (mut q_end, mut k_end) = (0, 0);
        for (i, s) in segments.iter().enumerate() {
            let ends = (s.q_start.checked_add(s.q_len), s.k_start.checked_add(s.k_len));
            let (Some(q_stop), Some(k_stop)) = ends else {
                return Err(Error::argument("segments", format!("segment {i} is too long: {s:?}")));
            };
            if s.q_start < q_end || s.k_start < k_end || s.q_len > s.k_len {
                return Err(Error::argument(
                    "segments",
                    format!(
                        "segment {i} overlaps its predecessor or has fewer keys than queries: {s:?}"
                    ),
                ));
            }
            (q_end, k_end) = (q_stop, k_stop);
        }
        Ok(Segments(segments.into()))
    }

    /// `batch` sequences of `time` tokens each, one after the other.
    pub fn uniform(batch: usize, time: usize) -> Self {
        Self::padded(&vec![0; batch], time)
    }

    /// Sequences of `time` rows, the first `pads[b]` of which are padding.
    pub fn left_padded(time: usize, pads: &[usize]) -> Result<Self> {
        if let Some(p) = pads.iter().find(|&&p| p > time) {
            return Err(Error::argument(
                "segments",
                format!("{p} pads in a sequence of {time} rows"),
            ));
        }
        Ok(Self::padded(pads, time))
    }

    fn padded(pads: &[usize], time: usize) -> Self {
        let segment = |(b, &pad): (usize, &usize)| {
            // Segments beyond `usize` saturate, and fit no tensor.
            let (start, len) = (b.saturating_mul(time).saturating_add(pad), time - pad);
            Segment { q_start: start, q_len: len, k_start: start, k_len: len }
        };
        Segments(pads.iter().enumerate().map(segment).collect())
    }

    /// Documents packed one after the other: document `n` has rows `cu_seqlens[n]..cu_seqlens[n+1]`.
    pub fn packed(cu_seqlens: &[usize]) -> Result<Self> {
        if cu_seqlens.first() != Some(&0) || cu_seqlens.windows(2).any(|w| w[0] > w[1]) {
            return Err(Error::argument(
                "segments",
                format!("cu_seqlens must start at 0 and never decrease: {cu_seqlens:?}"),
            ));
        }
        let segment = |w: &[usize]| {
            let (start, len) = (w[0], w[1] - w[0]);
            Segment { q_start: start, q_len: len, k_start: start, k_len: len }
        };
        Ok(Segments(cu_seqlens.windows(2).map(segment).collect()))
    }

    /// The segments.
    pub fn as_slice(&self) -> &[Segment] {
        &self.0
    }

    /// Number of sequences.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Fails unless the segments fit tensors of this many query and key rows.
    pub(crate) fn check(&self, op: &'static str, q_rows: usize, k_rows: usize) -> Result<()> {
        match self.0.last() {
            Some(s)
                if !inside(s.q_start, s.q_len, q_rows) || !inside(s.k_start, s.k_len, k_rows) =>
            {
                Err(Error::argument(
                    op,
                    format!(
                        "segment {s:?} reaches beyond {q_rows} query rows or {k_rows} key rows"
                    ),
                ))
            }
            _ => Ok(()),
        }
    }
}

/// Whether rows `start .. start + len` are among the first `rows`.
fn inside(start: usize, len: usize, rows: usize) -> bool {
    start <= rows && len <= rows - start
}
