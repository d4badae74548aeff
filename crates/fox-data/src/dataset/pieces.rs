//! The sequences that held-out losses are measured on.

use super::DocumentLengths;

/// A run of tokens inside one document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// The document.
    pub document: u64,
    /// Its first token that belongs to the piece.
    pub start: u64,
    /// The document's number among those that are long enough.
    pub ordinal: u64,
}

/// All pieces of a length: the first piece of every document, then the second of every document that has one, and so
/// on.
///
/// Where there are many documents, the first pieces are starts of different documents, which are independent; a few
/// long documents still give many pieces. Documents shorter than the length have none.
#[derive(Debug, Clone)]
pub struct Pieces<'a> {
    lengths: &'a DocumentLengths,
    length: u64,
    /// Which piece of a document comes next.
    column: u64,
    document: u64,
    ordinal: u64,
    passed_over: u64,
}

impl<'a> Pieces<'a> {
    /// Pieces of `length` tokens, which must be above 0.
    pub fn new(lengths: &'a DocumentLengths, length: usize) -> Self {
        let length = length.max(1) as u64;
        Pieces { lengths, length, column: 0, document: 0, ordinal: 0, passed_over: 0 }
    }

    /// Documents met so far that are too short.
    pub fn passed_over(&self) -> u64 {
        self.passed_over
    }
}

impl Iterator for Pieces<'_> {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        loop {
            let Some(len) = self.lengths.len_of(self.document) else {
                self.column += 1;
                if self.lengths.longest() / self.length <= self.column {
                    return None;
                }
                (self.document, self.ordinal) = (0, 0);
                continue;
            };
            let (document, ordinal) = (self.document, self.ordinal);
            let count = len / self.length;
            self.document += 1;
            self.ordinal += u64::from(count > 0);
            self.passed_over += u64::from(count == 0 && self.column == 0);
            if count > self.column {
                return Some(Piece { document, start: self.column * self.length, ordinal });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(lens: &[u64], length: usize) -> Vec<(u64, u64, u64)> {
        let lengths = DocumentLengths::from_lens(lens.iter().copied());
        let piece = |p: Piece| (p.document, p.start, p.ordinal);
        Pieces::new(&lengths, length).map(piece).collect()
    }

    #[test]
    fn first_pieces_of_all_documents_come_before_any_second_one() {
        let found = all(&[3, 9, 0, 4, 12], 4);
        let expected = [(1, 0, 0), (3, 0, 1), (4, 0, 2), (1, 4, 0), (4, 4, 2), (4, 8, 2)];
        assert_eq!(found, expected);
        assert_eq!(all(&[3, 2], 4), []);
        assert_eq!(all(&[], 4), []);
    }

    #[test]
    fn short_documents_are_counted_once() {
        let lengths = DocumentLengths::from_lens([3, 9, 0, 4]);
        let mut pieces = Pieces::new(&lengths, 4);
        let counts: Vec<u64> =
            std::iter::from_fn(|| pieces.next().map(|_| pieces.passed_over())).collect();
        assert_eq!(counts, [1, 2, 2]);
    }

    #[test]
    fn endless_documents_cost_nothing() {
        let lengths = DocumentLengths::Uniform { documents: 1 << 40, len: 100 };
        let third = Pieces::new(&lengths, 64).nth(2);
        assert_eq!(third, Some(Piece { document: 2, start: 0, ordinal: 2 }));
    }
}
