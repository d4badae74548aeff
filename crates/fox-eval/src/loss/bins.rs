//! Positions in bins of equal ratio.

/// Bins per doubling of the position.
const PER_OCTAVE: u32 = 8;

/// Cuts positions `0..length` into bins whose edges are the rounded powers of `2^(1/8)`, one by one at
/// the start. Every power of two below `length` is an edge, and `length` is the last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bins {
    edges: Vec<usize>,
}

impl Bins {
    /// The bins of documents of this length; it must be above 0.
    pub fn new(length: usize) -> Self {
        let mut edges = vec![0];
        for k in 0.. {
            let edge = (f64::from(k) / f64::from(PER_OCTAVE)).exp2().round() as usize;
            if edge >= length {
                break;
            }
            if edges.last() != Some(&edge) {
                edges.push(edge);
            }
        }
        edges.push(length);
        Bins { edges }
    }

    /// Number of bins.
    pub fn len(&self) -> usize {
        self.edges.len() - 1
    }

    /// Whether there are none; there never are.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The positions of a bin.
    pub fn range(&self, bin: usize) -> std::ops::Range<usize> {
        self.edges[bin]..self.edges[bin + 1]
    }

    /// The coordinate of a bin on an axis, with positions counted from 1: the geometric middle.
    pub fn center(&self, bin: usize) -> f64 {
        let range = self.range(bin);
        ((range.start + 1) as f64 * range.end as f64).sqrt()
    }

    /// How many bins lie before position `end`, if it is an edge.
    pub fn before(&self, end: usize) -> Option<usize> {
        self.edges.binary_search(&end).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_partition_positions_at_powers_of_two() {
        for length in [1, 2, 3, 70, 512, 1000, 65536] {
            let bins = Bins::new(length);
            let covered: Vec<usize> = (0..bins.len()).flat_map(|b| bins.range(b)).collect();
            assert!(covered.into_iter().eq(0..length), "{length}");
            for power in (0..17).map(|k| 1 << k).filter(|p| *p <= length) {
                assert!(bins.before(power).is_some(), "{power} of {length}");
            }
        }
        // Eight bins per octave from 16 tokens on; before that, one per position.
        assert_eq!(Bins::new(65536).len() - Bins::new(32).len(), 11 * 8);
        assert_eq!(Bins::new(100).before(65), None);
    }

    #[test]
    fn bin_center_is_geometric_mean() {
        let bins = Bins::new(1000);
        // One position per bin at first: its center is the position itself, counted from 1.
        assert_eq!([0, 1, 2, 7].map(|bin| bins.center(bin)), [1.0, 2.0, 3.0, 8.0]);
        let bin = bins.before(512).unwrap();
        let range = bins.range(bin);
        assert_eq!(range.start, 512);
        let center = (513.0 * range.end as f64).sqrt();
        assert!((bins.center(bin) - center).abs() < 1e-12);
        assert!((0..bins.len()).all(|b| {
            let range = bins.range(b);
            (range.start as f64 + 1.0..=range.end as f64).contains(&bins.center(b))
        }));
    }
}
