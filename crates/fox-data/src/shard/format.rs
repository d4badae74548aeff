//! The layout of a shard, for reader and writer.

use twox_hash::XxHash3_128;

pub(super) const HEAD_MARK: [u8; 8] = *b"FOXTOKEN";
pub(super) const END_MARK: [u8; 8] = *b"FOXSHEND";
pub(super) const VERSION: u32 = 1;
pub(super) const HEAD_BYTES: usize = 16;
pub(super) const FOOT_BYTES: usize = 8 + 8 + 16 + 16 + 16 + 8;
/// End and text hash of one document.
pub(super) const ENTRY_BYTES: usize = 16;

/// Bytes of a stored id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenWidth {
    Two,
    Four,
}

impl TokenWidth {
    /// The narrowest that holds every id of a vocabulary.
    pub(crate) fn for_vocabulary(vocab_size: usize) -> Self {
        if vocab_size <= 1 << 16 { Self::Two } else { Self::Four }
    }

    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::Two => 2,
            Self::Four => 4,
        }
    }

    pub(crate) fn from_bytes(bytes: usize) -> Option<Self> {
        match bytes {
            2 => Some(Self::Two),
            4 => Some(Self::Four),
            _ => None,
        }
    }

    /// Appends ids in their stored form. Ids of a tokenizer fit its width by construction.
    pub(super) fn encode(self, ids: &[u32], out: &mut Vec<u8>) {
        match self {
            Self::Two => out.extend(ids.iter().flat_map(|&id| (id as u16).to_le_bytes())),
            Self::Four => out.extend(ids.iter().flat_map(|&id| id.to_le_bytes())),
        }
    }

    pub(super) fn decode(self, bytes: &[u8], out: &mut [u32]) {
        match self {
            Self::Two => {
                for (id, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *id = u32::from(u16::from_le_bytes([b[0], b[1]]));
                }
            }
            Self::Four => {
                for (id, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                    *id = u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                }
            }
        }
    }

    /// Zeros after this many ids, so that the table starts at a multiple of 8 bytes.
    pub(super) fn padding(self, tokens: u64) -> usize {
        let bytes = tokens * self.bytes() as u64;
        ((8 - bytes % 8) % 8) as usize
    }
}

/// One document of a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Ids of the shard up to the end of this document.
    pub(crate) end: u64,
    /// Hash of the document's text.
    pub(crate) text_hash: u64,
}

/// The footer of a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Foot {
    pub(super) documents: u64,
    pub(super) tokens: u64,
    pub(super) tokenizer: u128,
    pub(super) tokens_checksum: u128,
    pub(super) table_checksum: u128,
}

impl Foot {
    pub(super) fn to_bytes(self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(FOOT_BYTES);
        bytes.extend(self.documents.to_le_bytes());
        bytes.extend(self.tokens.to_le_bytes());
        bytes.extend(self.tokenizer.to_le_bytes());
        bytes.extend(self.tokens_checksum.to_le_bytes());
        bytes.extend(self.table_checksum.to_le_bytes());
        bytes.extend(END_MARK);
        bytes
    }

    /// `None` if the end mark is missing.
    pub(super) fn parse(bytes: &[u8; FOOT_BYTES]) -> Option<Self> {
        let (numbers, mark) = bytes.split_at(FOOT_BYTES - 8);
        let short = |at: usize| {
            let mut n = [0; 8];
            n.copy_from_slice(&numbers[at..at + 8]);
            u64::from_le_bytes(n)
        };
        let long = |at: usize| u128::from(short(at)) | u128::from(short(at + 8)) << 64;
        (mark == END_MARK).then(|| Self {
            documents: short(0),
            tokens: short(8),
            tokenizer: long(16),
            tokens_checksum: long(32),
            table_checksum: long(48),
        })
    }
}

pub(super) fn head(width: TokenWidth) -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    head[..8].copy_from_slice(&HEAD_MARK);
    head[8..12].copy_from_slice(&VERSION.to_le_bytes());
    head[12..].copy_from_slice(&(width.bytes() as u32).to_le_bytes());
    head
}

/// Checksum of everything that is not ids: head, table, counts and tokenizer.
pub(super) fn table_checksum(
    width: TokenWidth,
    table: &[u8],
    tokens: u64,
    tokenizer: u128,
) -> u128 {
    let mut hasher = XxHash3_128::new();
    hasher.write(&head(width));
    hasher.write(table);
    hasher.write(&tokens.to_le_bytes());
    hasher.write(&tokenizer.to_le_bytes());
    hasher.finish_128()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_starts_at_a_multiple_of_eight_bytes() {
        let paddings = |width: TokenWidth| (0..5).map(|n| width.padding(n)).collect::<Vec<_>>();
        assert_eq!(paddings(TokenWidth::Two), [0, 6, 4, 2, 0]);
        assert_eq!(paddings(TokenWidth::Four), [0, 4, 0, 4, 0]);
    }
}
