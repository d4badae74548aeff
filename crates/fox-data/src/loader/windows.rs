//! Which tokens are in which sequence.

use super::config::Layout;
use crate::dataset::DocumentLengths;
use crate::error::{Error, Result};

/// Consecutive tokens of one document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sequence {
    pub(super) document: u64,
    pub(super) start: u64,
    pub(super) len: usize,
}

/// The numbering of all windows of a data set.
#[derive(Debug)]
pub(super) struct Windows {
    window: u64,
    layout: Layout,
    /// Windows of each document, laid end to end; for packed documents the tokens themselves count.
    lengths: Option<DocumentLengths>,
    count: u64,
}

impl Windows {
    pub(super) fn new(lengths: &DocumentLengths, window: usize, layout: Layout) -> Result<Self> {
        let window_len = window as u64;
        let per_document = |len: u64| match layout {
            Layout::PaddedWindows => len.div_ceil(window_len),
            Layout::Windows | Layout::Packed => len / window_len,
        };
        let (numbering, count) = match layout {
            Layout::Packed => (None, lengths.tokens() / window_len),
            Layout::Windows | Layout::PaddedWindows => {
                let numbering = match lengths {
                    DocumentLengths::Uniform { documents, len } => {
                        DocumentLengths::Uniform { documents: *documents, len: per_document(*len) }
                    }
                    DocumentLengths::Varied { .. } => DocumentLengths::from_lens(
                        (0..lengths.documents())
                            .map(|d| per_document(lengths.len_of(d).unwrap_or(0))),
                    ),
                };
                let count = numbering.tokens();
                (Some(numbering), count)
            }
        };
        if count == 0 {
            return Err(Error::WindowTooLong { window, longest: lengths.longest() });
        }
        Ok(Self { window: window_len, layout, lengths: numbering, count })
    }

    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// An error unless the documents form columns of windows, as the LongCrawl64 order needs.
    pub(super) fn check_columns(
        &self,
        lengths: &DocumentLengths,
        window: usize,
        layout: Layout,
    ) -> Result<()> {
        let bad = |detail: String| Err(Error::BadOption { option: "order longcrawl64", detail });
        if layout != Layout::Windows {
            return bad("it goes with windows per document, not with packed or padded ones".into());
        }
        match lengths.uniform_len() {
            None => bad("the documents have different lengths; use a shuffled order".into()),
            Some(len) if len % window as u64 != 0 => {
                bad(format!("sequences of {window} tokens do not divide documents of {len}"))
            }
            Some(_) => Ok(()),
        }
    }

    /// The token ranges of a window, in order; `window` must be below [`Self::count`].
    pub(super) fn sequences(&self, lengths: &DocumentLengths, window: u64) -> Vec<Sequence> {
        match &self.lengths {
            Some(numbering) => self.single(lengths, numbering, window).into_iter().collect(),
            None => self.packed(lengths, window),
        }
    }

    fn single(
        &self,
        lengths: &DocumentLengths,
        numbering: &DocumentLengths,
        window: u64,
    ) -> Option<Sequence> {
        let (document, number) = numbering.locate(window)?;
        let start = number * self.window;
        let len = self.window.min(lengths.len_of(document)? - start);
        debug_assert!(self.layout == Layout::PaddedWindows || len == self.window);
        Some(Sequence { document, start, len: len as usize })
    }

    fn packed(&self, lengths: &DocumentLengths, window: u64) -> Vec<Sequence> {
        let mut sequences = Vec::new();
        let mut at = window * self.window;
        let end = at + self.window;
        while let Some((document, start)) = lengths.locate(at).filter(|_| at < end) {
            let left = lengths.len_of(document).unwrap_or(0) - start;
            let len = left.min(end - at);
            sequences.push(Sequence { document, start, len: len as usize });
            at += len;
        }
        sequences
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(lens: &[u64], window: usize, layout: Layout) -> Vec<Vec<(u64, u64, usize)>> {
        let lengths = DocumentLengths::from_lens(lens.iter().copied());
        let windows = Windows::new(&lengths, window, layout).unwrap();
        (0..windows.count())
            .map(|w| {
                let sequences = windows.sequences(&lengths, w);
                sequences.iter().map(|s| (s.document, s.start, s.len)).collect()
            })
            .collect()
    }

    #[test]
    fn windows_stay_inside_documents() {
        assert_eq!(
            all(&[5, 1, 4], 2, Layout::Windows),
            [[(0, 0, 2)], [(0, 2, 2)], [(2, 0, 2)], [(2, 2, 2)]]
        );
        assert_eq!(
            all(&[5, 1], 2, Layout::PaddedWindows),
            [[(0, 0, 2)], [(0, 2, 2)], [(0, 4, 1)], [(1, 0, 1)]]
        );
    }

    #[test]
    fn packed_windows_cross_documents() {
        assert_eq!(
            all(&[3, 0, 1, 5], 4, Layout::Packed),
            [vec![(0, 0, 3), (2, 0, 1)], vec![(3, 0, 4)]]
        );
    }

    #[test]
    fn rejects_windows_longer_than_documents() {
        let lengths = DocumentLengths::from_lens([5, 9]);
        let error = Windows::new(&lengths, 10, Layout::Windows).unwrap_err();
        assert_eq!(
            error.to_string(),
            "a sequence of 10 tokens is longer than any document (the longest has 9); use shorter sequences or pack documents"
        );
        assert!(Windows::new(&lengths, 10, Layout::Packed).is_ok());
    }
}
