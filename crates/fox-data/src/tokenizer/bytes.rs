//! One token per byte.

use crate::error::{Error, Result};

/// One token per UTF-8 byte: 256 ids.
///
/// The start marker is 255, a byte that never occurs in UTF-8 text, so the vocabulary needs no extra entry.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ByteTokenizer;

impl ByteTokenizer {
    /// Number of ids.
    pub const VOCAB_SIZE: usize = 256;
    /// The id in front of every sequence.
    pub const BOS: u32 = 255;

    /// The bytes of `text`.
    pub fn encode(self, text: &str) -> Vec<u32> {
        text.bytes().map(u32::from).collect()
    }

    /// The text of `ids`; start markers are left out and invalid UTF-8 is replaced.
    ///
    /// # Errors
    /// An id above 255.
    pub fn decode(self, ids: &[u32]) -> Result<String> {
        let mut bytes = Vec::with_capacity(ids.len());
        for &id in ids {
            let byte = u8::try_from(id)
                .map_err(|_| Error::UnknownToken { id, vocab_size: Self::VOCAB_SIZE })?;
            if id != Self::BOS {
                bytes.push(byte);
            }
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips_text_and_rejects_bad_ids() {
        let text = "naïve ≤ 𝔸\0\n";
        let ids = ByteTokenizer.encode(text);
        assert_eq!(ids.len(), text.len());
        assert_eq!(ByteTokenizer.decode(&ids).unwrap(), text);
        assert_eq!(ByteTokenizer.decode(&[255, 104, 105]).unwrap(), "hi");
        assert_eq!(ByteTokenizer.decode(&[0xe2, 0x89]).unwrap(), "\u{fffd}");
        assert!(matches!(ByteTokenizer.decode(&[256]), Err(Error::UnknownToken { id: 256, .. })));
    }
}
