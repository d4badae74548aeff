//! Which documents are held out.

use std::path::PathBuf;

use fox_base::random::mix;

use crate::dataset::Split;
use crate::error::{Error, Result};

/// Which documents are kept for evaluation.
#[derive(Debug, Clone, PartialEq)]
pub enum HeldOut {
    /// None.
    None,
    /// A fraction of the documents, selected by the hash of their text and a seed: independent of their order and
    /// number, and copies of a document are on the same side.
    Fraction {
        /// Fraction of the documents, 0 to 1.
        fraction: f64,
        /// Seed of the selection.
        seed: u64,
    },
    /// The end of every document, for a corpus of few documents: this fraction of its text, split at the end of a line
    /// or else before a space.
    Ends {
        /// Fraction of each text, 0 to 1.
        fraction: f64,
    },
    /// All documents of another corpus.
    Path(PathBuf),
}

/// The rule behind [`HeldOut::Fraction`].
#[derive(Debug, Clone, Copy)]
pub(super) struct SplitRule {
    /// Mixed hashes below this are held out.
    threshold: u128,
    seed: u64,
}

/// An error unless 0 <= `fraction` <= 1.
pub(super) fn check_fraction(fraction: f64) -> Result<()> {
    if (0.0..=1.0).contains(&fraction) {
        return Ok(());
    }
    Err(Error::BadOption {
        option: "held-out fraction",
        detail: format!("{fraction} is not between 0 and 1"),
    })
}

/// Splits off the end of a text, at most this fraction of it; either half may be empty.
pub(super) fn cut_end(text: &str, fraction: f64) -> (&str, &str) {
    let target = ((1.0 - fraction) * text.len() as f64).ceil() as usize;
    let start = (target..text.len()).find(|&at| text.is_char_boundary(at)).unwrap_or(text.len());
    let rest = &text[start..];
    let at = match (rest.find('\n'), rest.find(' ')) {
        _ if start == 0 => 0,
        (Some(line), _) if line + 1 < rest.len() => line + 1,
        (_, Some(space)) => space,
        _ => 0,
    };
    text.split_at(start + at)
}

impl SplitRule {
    pub(super) fn new(fraction: f64, seed: u64) -> Result<Self> {
        check_fraction(fraction)?;
        // Exact: a power of two times the fraction.
        let threshold = (fraction * 2_f64.powi(64)) as u128;
        Ok(Self { threshold, seed })
    }

    pub(super) fn split_of(&self, text_hash: u64) -> Split {
        if u128::from(mix(text_hash ^ mix(self.seed))) < self.threshold {
            Split::HeldOut
        } else {
            Split::Train
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_ends_at_lines_or_words() {
        let lines = "one two\nthree four\nfive six\nseven";
        assert_eq!(cut_end(lines, 0.5), ("one two\nthree four\n", "five six\nseven"));
        // The last line ends with the text, so the split is before a space.
        assert_eq!(cut_end("one two three\n", 0.5), ("one two", " three\n"));
        assert_eq!(cut_end("oneword", 0.5), ("onew", "ord"));
        assert_eq!(cut_end("ééé", 0.5), ("éé", "é"));
        assert_eq!(cut_end("some text", 0.0), ("some text", ""));
        assert_eq!(cut_end("some text", 1.0), ("", "some text"));
        assert_eq!(cut_end("", 0.5), ("", ""));
    }

    #[test]
    fn fraction_and_seed_select_documents() {
        let count = |fraction, seed| {
            let rule = SplitRule::new(fraction, seed).unwrap();
            (0..10_000_u64).filter(|&h| rule.split_of(mix(h)) == Split::HeldOut).count()
        };
        assert_eq!(count(0.0, 1), 0);
        assert_eq!(count(1.0, 1), 10_000);
        assert!((900..1100).contains(&count(0.1, 1)));
        let held = |seed| {
            let rule = SplitRule::new(0.5, seed).unwrap();
            (0..64).map(|h| rule.split_of(h) == Split::HeldOut).collect::<Vec<_>>()
        };
        assert_ne!(held(1), held(2));
        assert_eq!(held(1), held(1));
        assert!(SplitRule::new(1.5, 0).is_err());
        assert!(SplitRule::new(f64::NAN, 0).is_err());
    }
}
