//! A minimal PNG encoder: 8-bit palette images.

use std::io::{self, Write as _};

use flate2::write::ZlibEncoder;
use flate2::{Compression, Crc};

use super::color::Rgb;

/// Encodes `[pixels.len() / width, width]` pixels, each an index into `palette` (at most 256 entries, the first of which
/// is transparent).
pub(super) fn encode(width: usize, pixels: &[u8], palette: &[Rgb]) -> io::Result<Vec<u8>> {
    let height = pixels.len().checked_div(width).unwrap_or(0);
    let mut file = b"\x89PNG\r\n\x1a\n".to_vec();
    let mut header = Vec::new();
    for side in [width, height] {
        header.extend_from_slice(&(side as u32).to_be_bytes());
    }
    // Eight bits, palette, deflate, the standard filters, not interlaced.
    header.extend_from_slice(&[8, 3, 0, 0, 0]);
    chunk(&mut file, b"IHDR", &header);
    chunk(&mut file, b"PLTE", palette.as_flattened());
    // Alpha of the first entry; the others are opaque.
    chunk(&mut file, b"tRNS", &[0]);
    let mut compressor = ZlibEncoder::new(Vec::new(), Compression::best());
    for row in pixels.chunks_exact(width.max(1)) {
        compressor.write_all(&[0])?;
        compressor.write_all(row)?;
    }
    chunk(&mut file, b"IDAT", &compressor.finish()?);
    chunk(&mut file, b"IEND", &[]);
    Ok(file)
}

fn chunk(file: &mut Vec<u8>, kind: &[u8; 4], data: &[u8]) {
    file.extend_from_slice(&(data.len() as u32).to_be_bytes());
    let mut crc = Crc::new();
    crc.update(kind);
    crc.update(data);
    file.extend_from_slice(kind);
    file.extend_from_slice(data);
    file.extend_from_slice(&crc.sum().to_be_bytes());
}

/// Base 64 with padding.
pub(super) fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let bits = group.iter().fold(0_u32, |bits, b| bits << 8 | u32::from(*b))
            << (8 * (3 - group.len()));
        for digit in 0..4 {
            if digit <= group.len() {
                text.push(char::from(DIGITS[(bits >> (18 - 6 * digit) & 63) as usize]));
            } else {
                text.push('=');
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_matches_known_values() {
        let of = |text: &str| base64(text.as_bytes());
        assert_eq!(
            [of(""), of("f"), of("fo"), of("foo"), of("foobar")],
            ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYmFy"]
        );
    }

    #[test]
    fn png_has_valid_chunks() {
        let file = encode(2, &[0, 1, 1, 0], &[[0, 0, 0], [255, 255, 255]]).unwrap();
        assert_eq!(&file[..8], b"\x89PNG\r\n\x1a\n");
        assert_eq!(&file[12..29], b"IHDR\0\0\0\x02\0\0\0\x02\x08\x03\0\0\0");
        // The checksum of an empty IEND chunk is the same in every PNG.
        assert_eq!(&file[file.len() - 4..], &[0xae, 0x42, 0x60, 0x82]);
    }
}
