//! Running sums of an evaluation; their size does not depend on the number of documents.

use serde::{Deserialize, Serialize};

use super::Bins;

/// Documents are dealt to this many groups; up to as many documents, each is a separate group. The
/// bootstrap draws groups, so that chunks of one document never count as independent.
pub const GROUPS: usize = 256;

/// Sums of losses by position, and by bin for every group of documents.
///
/// Stored as bit patterns, so that resuming an evaluation is bit-exact.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossSums {
    length: usize,
    /// Chunks of documents added so far.
    #[serde(rename = "pieces")]
    pub chunks: u64,
    /// Different documents among them.
    pub documents: u64,
    /// Documents passed over because they were too short.
    pub skipped: u64,
    position_bits: Vec<u64>,
    group_bits: Vec<Vec<u64>>,
    #[serde(rename = "group_pieces")]
    group_chunks: Vec<u64>,
}

impl LossSums {
    /// Empty sums for chunks of `length` tokens.
    pub fn new(length: usize) -> Self {
        LossSums {
            length,
            chunks: 0,
            documents: 0,
            skipped: 0,
            position_bits: vec![0; length],
            group_bits: Vec::new(),
            group_chunks: Vec::new(),
        }
    }

    /// Tokens of a chunk.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Whether sums read from a file fit together and are numbers.
    pub(super) fn is_consistent(&self) -> bool {
        let bins = Bins::new(self.length.max(1)).len();
        self.length > 0
            && self.position_bits.len() == self.length
            && self.group_bits.len() == self.group_chunks.len()
            && self.group_bits.len() <= GROUPS
            && self.group_bits.iter().all(|g| g.len() == bins)
            && self.group_chunks.iter().sum::<u64>() == self.chunks
            && self.documents <= self.chunks
            && (self.position_bits.iter().chain(self.group_bits.iter().flatten()))
                .all(|bits| f64::from_bits(*bits).is_finite())
    }

    /// Adds the losses of a chunk; `losses` has [`Self::length`] entries. Chunks that are not independent, those of one
    /// document, have the same `unit`.
    pub fn add(&mut self, unit: u64, losses: &[f32], bins: &Bins) {
        let group = (unit % GROUPS as u64) as usize;
        if group >= self.group_bits.len() {
            self.group_bits.resize(group + 1, vec![0; bins.len()]);
            self.group_chunks.resize(group + 1, 0);
        }
        for (bits, loss) in self.position_bits.iter_mut().zip(losses) {
            add(bits, f64::from(*loss));
        }
        for bin in 0..bins.len() {
            let sum = losses[bins.range(bin)].iter().map(|l| f64::from(*l)).sum();
            add(&mut self.group_bits[group][bin], sum);
        }
        self.group_chunks[group] += 1;
        self.chunks += 1;
    }

    /// L(i): the mean loss at every position.
    pub fn mean(&self) -> Vec<f64> {
        let n = self.chunks as f64;
        self.position_bits.iter().map(|b| f64::from_bits(*b) / n).collect()
    }

    /// Number of groups that have documents.
    pub fn groups(&self) -> usize {
        self.group_bits.len()
    }

    /// Mean loss of every bin, with the groups weighted.
    pub fn bin_means(&self, weights: Option<&[u32]>, bins: &Bins) -> Vec<f64> {
        let weight = |g: usize| weights.map_or(1.0, |w| f64::from(w[g]));
        let chunks: f64 =
            self.group_chunks.iter().enumerate().map(|(g, n)| weight(g) * *n as f64).sum();
        (0..bins.len())
            .map(|bin| {
                let sums = self.group_bits.iter().enumerate();
                let sum: f64 = sums.map(|(g, s)| weight(g) * f64::from_bits(s[bin])).sum();
                sum / (chunks * bins.range(bin).len() as f64)
            })
            .collect()
    }
}

fn add(bits: &mut u64, term: f64) {
    *bits = (f64::from_bits(*bits) + term).to_bits();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_two_documents_by_hand() {
        let bins = Bins::new(4);
        let mut sums = LossSums::new(4);
        sums.add(0, &[4.0, 2.0, 1.0, 3.0], &bins);
        sums.add(1, &[2.0, 2.0, 3.0, 3.0], &bins);
        assert_eq!(sums.mean(), [3.0, 2.0, 2.0, 3.0]);
        assert_eq!(sums.bin_means(None, &bins), [3.0, 2.0, 2.0, 3.0]);
        assert_eq!(sums.bin_means(Some(&[0, 1]), &bins), [2.0, 2.0, 3.0, 3.0]);
        assert!(sums.is_consistent());
    }

    #[test]
    fn chunks_of_a_document_are_one_group() {
        let bins = Bins::new(1);
        let mut sums = LossSums::new(1);
        for (document, loss) in [(0, 1.0), (1, 2.0), (0, 3.0)] {
            sums.add(document, &[loss], &bins);
        }
        assert_eq!((sums.chunks, sums.groups()), (3, 2));
        assert_eq!(sums.bin_means(Some(&[2, 0]), &bins), [2.0]);
        assert_eq!(sums.mean(), [2.0]);
    }

    #[test]
    fn rejects_sums_that_are_not_finite() {
        for loss in [f32::NAN, f32::INFINITY] {
            let mut sums = LossSums::new(2);
            sums.add(0, &[1.0, loss], &Bins::new(2));
            assert!(!sums.is_consistent(), "{loss}");
        }
    }

    #[test]
    fn memory_does_not_grow_with_documents() {
        let bins = Bins::new(8);
        let mut sums = LossSums::new(8);
        for document in 0..1000 {
            sums.add(document, &[1.0; 8], &bins);
        }
        assert_eq!(sums.groups(), GROUPS);
        assert!(sums.mean().iter().all(|m| *m == 1.0));
    }

    #[test]
    fn sums_survive_a_file_bit_by_bit() {
        let bins = Bins::new(3);
        let mut sums = LossSums::new(3);
        sums.add(0, &[0.1, 1.0 / 3.0, 2e-7], &bins);
        let text = serde_json::to_string(&sums).unwrap();
        assert_eq!(serde_json::from_str::<LossSums>(&text).unwrap(), sums);
    }
}
