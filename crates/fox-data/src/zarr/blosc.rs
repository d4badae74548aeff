//! Blosc 1 frames with LZ4 inside.
//!
//! A frame is a header of 16 bytes, one 32-bit offset per block, and the blocks. A block of a shuffled frame may be cut
//! into one stream per byte of the element; every stream has its length in front and is LZ4, or plain when that
//! would not have been shorter. All numbers are little endian.

/// Bytes of the header.
pub(super) const HEADER: usize = 16;

const SHUFFLE: u8 = 0x01;
const PLAIN: u8 = 0x02;
const BIT_SHUFFLE: u8 = 0x04;
const NOT_SPLIT: u8 = 0x10;

/// More streams than this are never made of one block.
const MAX_SPLITS: usize = 16;
/// Blocks are not cut into streams of fewer elements than this.
const MIN_SPLIT_ELEMENTS: usize = 128;

/// What is wrong with a frame.
pub(super) type Problem = String;

/// The header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    flags: u8,
    typesize: usize,
    /// Bytes of the decoded frame.
    pub(super) nbytes: usize,
    blocksize: usize,
    /// Bytes of the frame, the header included.
    pub(super) cbytes: usize,
}

impl Header {
    pub(super) fn parse(bytes: &[u8; HEADER]) -> Result<Self, Problem> {
        let number = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]) as usize
        };
        let header = Self {
            flags: bytes[2],
            typesize: usize::from(bytes[3]),
            nbytes: number(4),
            blocksize: number(8),
            cbytes: number(12),
        };
        if !(1..=2).contains(&bytes[0]) {
            return Err(format!("Blosc format {} instead of 1 or 2", bytes[0]));
        }
        if header.typesize == 0 || header.blocksize == 0 || header.cbytes < HEADER {
            return Err("a Blosc header with impossible sizes".into());
        }
        if header.plain() {
            return Ok(header);
        }
        let codec = header.flags >> 5;
        if codec != 1 {
            let name = ["blosclz", "lz4", "snappy", "zlib", "zstd"]
                .get(usize::from(codec))
                .unwrap_or(&"unknown");
            return Err(format!("Blosc codec {name}, and only lz4 is supported"));
        }
        if header.flags & BIT_SHUFFLE != 0 {
            return Err("Blosc bit shuffle, and only byte shuffle or none is supported".into());
        }
        Ok(header)
    }

    /// Whether the bytes follow the header as they are.
    pub(super) fn plain(&self) -> bool {
        self.flags & PLAIN != 0
    }

    pub(super) fn blocks(&self) -> usize {
        self.nbytes.div_ceil(self.blocksize)
    }

    pub(super) fn block_of(&self, byte: usize) -> usize {
        byte / self.blocksize
    }

    /// The decoded bytes that a block holds.
    pub(super) fn block_range(&self, block: usize) -> std::ops::Range<usize> {
        let start = block * self.blocksize;
        start..(start + self.blocksize).min(self.nbytes)
    }

    fn streams(&self, block_bytes: usize) -> usize {
        let split = self.flags & NOT_SPLIT == 0
            && self.typesize <= MAX_SPLITS
            && self.blocksize / self.typesize >= MIN_SPLIT_ELEMENTS
            && block_bytes == self.blocksize;
        if split { self.typesize } else { 1 }
    }

    /// Decodes a block from its bytes in the frame; bytes after its end are ignored.
    pub(super) fn decode_block(&self, block: usize, stored: &[u8]) -> Result<Vec<u8>, Problem> {
        let range = self.block_range(block);
        let len = range.len();
        let streams = self.streams(len);
        if !len.is_multiple_of(streams) {
            return Err("a Blosc block that its streams do not divide".into());
        }
        let stream_len = len / streams;
        let mut decoded = vec![0; len];
        let mut rest = stored;
        for out in decoded.chunks_exact_mut(stream_len) {
            let (head, tail) = rest.split_first_chunk::<4>().ok_or("a truncated block")?;
            let stored_len = u32::from_le_bytes(*head) as usize;
            let stream = tail.get(..stored_len).ok_or("a truncated stream")?;
            rest = &tail[stored_len..];
            if stored_len == stream_len {
                out.copy_from_slice(stream);
                continue;
            }
            let n = lz4_flex::block::decompress_into(stream, out)
                .map_err(|error| format!("LZ4: {error}"))?;
            if n != stream_len {
                return Err(format!("a stream of {n} bytes instead of {stream_len}"));
            }
        }
        if self.flags & SHUFFLE != 0 && self.typesize > 1 {
            decoded = unshuffle(&decoded, self.typesize);
        }
        Ok(decoded)
    }
}

/// Puts the bytes of each element together again: shuffled data hold all first bytes, then all second bytes.
fn unshuffle(shuffled: &[u8], typesize: usize) -> Vec<u8> {
    let elements = shuffled.len() / typesize;
    let mut out = vec![0; shuffled.len()];
    for byte in 0..typesize {
        let plane = &shuffled[byte * elements..(byte + 1) * elements];
        for (element, &value) in out.chunks_exact_mut(typesize).zip(plane) {
            element[byte] = value;
        }
    }
    let whole = elements * typesize;
    out[whole..].copy_from_slice(&shuffled[whole..]);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decodes a whole frame.
    fn decode(frame: &[u8]) -> Result<Vec<u8>, Problem> {
        let header = Header::parse(frame[..HEADER].try_into().unwrap())?;
        if header.plain() {
            return Ok(frame[HEADER..].to_vec());
        }
        let mut out = Vec::new();
        for block in 0..header.blocks() {
            let at = HEADER + 4 * block;
            let start = u32::from_le_bytes(frame[at..at + 4].try_into().unwrap()) as usize;
            out.extend(header.decode_block(block, &frame[start..])?);
        }
        Ok(out)
    }

    /// The ids that the frames in `tests/data` hold. They were written by c-blosc (numcodecs 0.16).
    fn expected() -> Vec<u8> {
        (0..50_000_u32)
            .map(|i| match i % 97 {
                0 => (i * 31 % 50_000) as u16,
                _ => ((i / 50) * 7 % 50_000) as u16,
            })
            .flat_map(u16::to_le_bytes)
            .collect()
    }

    #[test]
    fn reads_frames_of_c_blosc() {
        for frame in [
            &include_bytes!("../../tests/data/shuffled.blosc")[..],
            include_bytes!("../../tests/data/unshuffled.blosc"),
            include_bytes!("../../tests/data/one_block.blosc"),
        ] {
            assert!(decode(frame).unwrap() == expected());
        }
    }

    #[test]
    fn reads_uncompressed_blocks() {
        let frame = include_bytes!("../../tests/data/plain.blosc");
        let decoded = decode(frame).unwrap();
        assert_eq!(decoded.len(), 80);
        assert_eq!(decoded[..4], [172, 10, 47, 170]);
    }

    #[test]
    fn rejects_truncated_blocks() {
        let frame = include_bytes!("../../tests/data/shuffled.blosc");
        let header = Header::parse(frame[..HEADER].try_into().unwrap()).unwrap();
        assert_eq!(header.blocks(), 2);
        let start = u32::from_le_bytes(frame[16..20].try_into().unwrap()) as usize;
        for keep in 0..60 {
            assert!(header.decode_block(0, &frame[start..start + keep]).is_err());
        }
    }

    #[test]
    fn rejects_unsupported_frames() {
        let mut header = [2, 1, 0x21, 2, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0];
        assert!(Header::parse(&header).is_ok());
        header[2] = 0x81;
        assert!(Header::parse(&header).unwrap_err().contains("zstd"));
        header[2] = 0x24;
        assert!(Header::parse(&header).unwrap_err().contains("bit shuffle"));
        header[0] = 5;
        assert!(Header::parse(&header).unwrap_err().contains("format 5"));
    }

    #[test]
    fn trailing_bytes_are_not_shuffled() {
        assert_eq!(unshuffle(&[1, 3, 2, 4, 9], 2), [1, 2, 3, 4, 9]);
    }
}
