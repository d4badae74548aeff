//! The sequences that held-out losses are measured on.

use super::DocumentLengths;

/// A chunk of consecutive tokens of one document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DocumentChunk {
    /// The document.
    pub document: u64,
    /// Offset of its first token in the document.
    pub start: u64,
    /// The document's number among those that are long enough.
    pub ordinal: u64,
}

/// All chunks of a length: the first of every document, then the second of every document that has one, and so on.
///
/// With many documents the first chunks are independent, since each starts another document; a few long documents still
/// give many chunks. Documents shorter than the length have none.
#[derive(Debug, Clone)]
pub struct DocumentChunks<'a> {
    lengths: &'a DocumentLengths,
    length: u64,
    /// Number of the chunk within its document.
    column: u64,
    document: u64,
    ordinal: u64,
    too_short: u64,
}

impl<'a> DocumentChunks<'a> {
    /// Chunks of `length` tokens, which must be above 0.
    pub fn new(lengths: &'a DocumentLengths, length: usize) -> Self {
        let length = length.max(1) as u64;
        DocumentChunks { lengths, length, column: 0, document: 0, ordinal: 0, too_short: 0 }
    }

    /// Documents so far that are shorter than a chunk.
    pub fn too_short(&self) -> u64 {
        self.too_short
    }
}

impl Iterator for DocumentChunks<'_> {
    type Item = DocumentChunk;

    fn next(&mut self) -> Option<DocumentChunk> {
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
            self.too_short += u64::from(count == 0 && self.column == 0);
            if count > self.column {
                return Some(DocumentChunk { document, start: self.column * self.length, ordinal });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(lens: &[u64], length: usize) -> Vec<(u64, u64, u64)> {
        let lengths = DocumentLengths::from_lens(lens.iter().copied());
        let chunk = |p: DocumentChunk| (p.document, p.start, p.ordinal);
        DocumentChunks::new(&lengths, length).map(chunk).collect()
    }

    #[test]
    fn first_chunks_of_all_documents_precede_second_ones() {
        let found = all(&[3, 9, 0, 4, 12], 4);
        let expected = [(1, 0, 0), (3, 0, 1), (4, 0, 2), (1, 4, 0), (4, 4, 2), (4, 8, 2)];
        assert_eq!(found, expected);
        assert_eq!(all(&[3, 2], 4), []);
        assert_eq!(all(&[], 4), []);
    }

    #[test]
    fn short_documents_are_counted_once() {
        let lengths = DocumentLengths::from_lens([3, 9, 0, 4]);
        let mut chunks = DocumentChunks::new(&lengths, 4);
        let counts: Vec<u64> =
            std::iter::from_fn(|| chunks.next().map(|_| chunks.too_short())).collect();
        assert_eq!(counts, [1, 2, 2]);
    }

    #[test]
    fn endless_documents_are_not_enumerated() {
        let lengths = DocumentLengths::Uniform { documents: 1 << 40, len: 100 };
        let third = DocumentChunks::new(&lengths, 64).nth(2);
        assert_eq!(third, Some(DocumentChunk { document: 2, start: 0, ordinal: 2 }));
    }
}
