//! Which rank holds which positions of which sequence.

use std::ops::Range;

use fox_tensor::{Segment, Segments};

use crate::{Error, Result};

/// How the sequences of some rows of tokens are divided: every rank has as many successive columns of each row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceSplit {
    /// Tokens of each sequence.
    lengths: Vec<usize>,
    /// For each rank, in the order of its rows.
    chunks: Vec<Vec<SequenceChunk>>,
}

/// The part of a sequence that one rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SequenceChunk {
    /// Number of the sequence.
    pub sequence: usize,
    /// Position of its first token in the sequence.
    pub position: usize,
    /// Tokens.
    pub len: usize,
    /// Row of its first token at the rank.
    pub row: usize,
}

impl SequenceChunk {
    /// The positions.
    pub fn positions(&self) -> Range<usize> {
        self.position..self.position + self.len
    }
}

impl SequenceSplit {
    /// Divides `sequences`, whose rows of `time` tokens are whole, among `ranks` ranks.
    ///
    /// # Errors
    /// A `time` that is not a multiple of `ranks`.
    pub fn new(sequences: &Segments, time: usize, ranks: usize) -> Result<SequenceSplit> {
        if ranks == 0 || !time.is_multiple_of(ranks) {
            return Err(Error::Refused(format!(
                "{ranks} ranks cannot share sequences of {time} tokens; choose a multiple of their number"
            )));
        }
        let width = time / ranks;
        let mut split = SequenceSplit { lengths: Vec::new(), chunks: vec![Vec::new(); ranks] };
        for segment in sequences.as_slice().iter().filter(|s| s.q_len > 0) {
            let (line, start) = (segment.q_start / time, segment.q_start % time);
            for (rank, chunks) in split.chunks.iter_mut().enumerate() {
                let from = start.max(rank * width);
                let to = (start + segment.q_len).min((rank + 1) * width);
                if from < to {
                    chunks.push(SequenceChunk {
                        sequence: split.lengths.len(),
                        position: from - start,
                        len: to - from,
                        row: line * width + from - rank * width,
                    });
                }
            }
            split.lengths.push(segment.q_len);
        }
        Ok(split)
    }

    /// The columns of a row of `time` tokens that a rank holds.
    pub fn columns(time: usize, rank: usize, ranks: usize) -> Range<usize> {
        rank * (time / ranks)..(rank + 1) * (time / ranks)
    }

    pub(super) fn length(&self, sequence: usize) -> usize {
        self.lengths[sequence]
    }

    pub(super) fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    pub(super) fn chunks(&self, rank: usize) -> &[SequenceChunk] {
        &self.chunks[rank]
    }

    /// The chunk of a sequence at a rank, if it has one.
    pub(super) fn chunk(&self, rank: usize, sequence: usize) -> Option<&SequenceChunk> {
        let chunks = self.chunks.get(rank)?;
        let found = chunks.binary_search_by_key(&sequence, |chunk| chunk.sequence);
        found.ok().map(|at| &chunks[at])
    }

    /// Chunks at a rank whose sequences continue at the next one: their index.
    pub(super) fn crossing(&self, rank: usize) -> Vec<usize> {
        let (own, next) = (&self.chunks[rank], rank + 1);
        let goes_on = |p: &SequenceChunk| self.chunk(next, p.sequence).is_some();
        own.iter().enumerate().filter(|(_, p)| goes_on(p)).map(|(i, _)| i).collect()
    }

    /// Chunks at a rank whose sequences start at an earlier one.
    pub(super) fn continued(&self, rank: usize) -> Vec<usize> {
        let own = self.chunks[rank].iter().enumerate();
        own.filter(|(_, chunk)| chunk.position > 0).map(|(i, _)| i).collect()
    }

    /// The rows of a rank: queries are its own, keys all up to them.
    pub(super) fn segments(&self, rank: usize) -> fox_tensor::Result<Segments> {
        let mut k_start = 0;
        let segment = |chunk: &SequenceChunk| {
            let k_len = chunk.position + chunk.len;
            k_start += k_len;
            Segment { q_start: chunk.row, q_len: chunk.len, k_start: k_start - k_len, k_len }
        };
        Segments::new(self.chunks[rank].iter().map(segment).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_divided_by_columns() {
        // Two rows of 8 tokens: one sequence of 8, then two of 3 and 5.
        let sequences = Segments::packed(&[0, 8, 11, 16]).unwrap();
        let split = SequenceSplit::new(&sequences, 8, 2).unwrap();
        let chunk = |sequence, position, len, row| SequenceChunk { sequence, position, len, row };
        assert_eq!(split.chunks[0], [chunk(0, 0, 4, 0), chunk(1, 0, 3, 4), chunk(2, 0, 1, 7)]);
        assert_eq!(split.chunks[1], [chunk(0, 4, 4, 0), chunk(2, 1, 4, 4)]);
        assert_eq!((split.crossing(0), split.continued(1)), (vec![0, 2], vec![0, 1]));
        assert_eq!((split.crossing(1), split.continued(0)), (vec![], vec![]));
        let keys: Vec<usize> =
            split.segments(1).unwrap().as_slice().iter().map(|s| s.k_len).collect();
        assert_eq!(keys, [8, 5]);
        assert_eq!(SequenceSplit::columns(8, 1, 2), 4..8);
        assert!(SequenceSplit::new(&sequences, 8, 3).is_err());
    }
}
