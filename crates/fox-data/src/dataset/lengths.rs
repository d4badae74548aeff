//! Lengths of documents, and the document at a global token position.

/// The lengths of all documents of a data set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DocumentLengths {
    /// All documents are equally long.
    Uniform {
        /// Number of documents.
        documents: u64,
        /// Tokens in each.
        len: u64,
    },
    /// `ends[d]` is the number of tokens in documents `0..=d`.
    Varied {
        /// Running sums of the lengths.
        ends: Vec<u64>,
    },
}

impl DocumentLengths {
    /// From the length of each document.
    pub(crate) fn from_lens(lens: impl IntoIterator<Item = u64>) -> Self {
        let mut total = 0;
        let ends = lens
            .into_iter()
            .map(|len| {
                total += len;
                total
            })
            .collect();
        Self::Varied { ends }
    }

    /// Number of documents.
    pub fn documents(&self) -> u64 {
        match self {
            Self::Uniform { documents, .. } => *documents,
            Self::Varied { ends } => ends.len() as u64,
        }
    }

    /// Tokens in all documents together.
    pub fn tokens(&self) -> u64 {
        match self {
            Self::Uniform { documents, len } => documents.saturating_mul(*len),
            Self::Varied { ends } => ends.last().copied().unwrap_or(0),
        }
    }

    /// Length of one document.
    pub fn len_of(&self, document: u64) -> Option<u64> {
        match self {
            Self::Uniform { documents, len } => (document < *documents).then_some(*len),
            Self::Varied { ends } => {
                let document = usize::try_from(document).ok()?;
                let end = *ends.get(document)?;
                Some(end - self.start_of_varied(ends, document))
            }
        }
    }

    /// Length of the longest document; 0 without documents.
    pub fn longest(&self) -> u64 {
        match self {
            Self::Uniform { documents: 0, .. } => 0,
            Self::Uniform { len, .. } => *len,
            Self::Varied { ends } => {
                (0..ends.len()).map(|d| ends[d] - self.start_of_varied(ends, d)).max().unwrap_or(0)
            }
        }
    }

    /// The length that all documents have, if they have one.
    pub fn uniform_len(&self) -> Option<u64> {
        match self {
            Self::Uniform { len, .. } => Some(*len),
            Self::Varied { .. } => {
                let len = self.len_of(0)?;
                (0..self.documents()).all(|d| self.len_of(d) == Some(len)).then_some(len)
            }
        }
    }

    /// Tokens in complete windows of `window` tokens inside of documents, as a float for ratios.
    pub fn in_windows(&self, window: u64) -> f64 {
        let full = |len: u64| (len / window.max(1) * window) as f64;
        match self {
            Self::Uniform { documents, len } => *documents as f64 * full(*len),
            Self::Varied { .. } => {
                (0..self.documents()).filter_map(|d| self.len_of(d)).map(full).sum()
            }
        }
    }

    /// Document and offset of token number `position` of the concatenated documents.
    pub fn locate(&self, position: u64) -> Option<(u64, u64)> {
        match self {
            Self::Uniform { len, .. } => {
                (position < self.tokens()).then(|| (position / len, position % len))
            }
            Self::Varied { ends } => {
                let document = ends.partition_point(|&end| end <= position);
                (document < ends.len())
                    .then(|| (document as u64, position - self.start_of_varied(ends, document)))
            }
        }
    }

    fn start_of_varied(&self, ends: &[u64], document: usize) -> u64 {
        if document == 0 { 0 } else { ends[document - 1] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locates_positions_across_empty_documents() {
        let lengths = DocumentLengths::from_lens([3, 0, 2]);
        assert_eq!(lengths.documents(), 3);
        assert_eq!(lengths.tokens(), 5);
        assert_eq!(lengths.longest(), 3);
        assert_eq!(lengths.len_of(1), Some(0));
        assert_eq!(lengths.len_of(3), None);
        let found: Vec<_> = (0..6).map(|p| lengths.locate(p)).collect();
        assert_eq!(
            found,
            [Some((0, 0)), Some((0, 1)), Some((0, 2)), Some((2, 0)), Some((2, 1)), None]
        );
        assert_eq!(lengths.uniform_len(), None);
    }

    #[test]
    fn uniform_and_varied_lengths_agree() {
        let uniform = DocumentLengths::Uniform { documents: 4, len: 3 };
        let varied = DocumentLengths::from_lens([3; 4]);
        assert_eq!(varied.uniform_len(), Some(3));
        assert_eq!(uniform.longest(), varied.longest());
        for position in 0..13 {
            assert_eq!(uniform.locate(position), varied.locate(position));
        }
    }
}
