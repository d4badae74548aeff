//! Readers that undo compression, in Rust alone.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use super::encoding;
use super::files::{Compression, CorpusFile};
use super::source::SourceReader;
use crate::error::{Error, Result};

/// Size of the read buffers.
const BUFFER: usize = 256 * 1024;

pub(super) type Reader = BufReader<Box<dyn Read + Send>>;

/// The decompressed bytes of a file, its byte order mark left out.
pub(super) struct Contents {
    pub(super) reader: Reader,
    /// Bytes of the mark.
    pub(super) skipped: u64,
}

/// Opens a file for reading its decompressed bytes; `count` counts the compressed ones.
pub(super) fn open(file: &CorpusFile, count: Arc<AtomicU64>) -> Result<Contents> {
    let opened = File::open(&file.path).map_err(Error::io("open", &file.path))?;
    let source = SourceReader::new(opened, file.bytes, count);
    let mut reader: Box<dyn Read + Send> = match file.compression {
        Compression::None => Box::new(source),
        Compression::Zstd => Box::new(ZstdReader::new(BufReader::with_capacity(BUFFER, source))),
        Compression::Gzip => {
            Box::new(flate2::bufread::MultiGzDecoder::new(BufReader::with_capacity(BUFFER, source)))
        }
    };
    let mut head = Vec::new();
    let first = reader.by_ref().take(encoding::HEAD_BYTES).read_to_end(&mut head);
    first.map_err(|error| read_error(file, error))?;
    let skipped = encoding::mark_len(&file.path, &head)?;
    let mut head = Cursor::new(head);
    head.set_position(skipped);
    let reader = BufReader::with_capacity(BUFFER, Box::new(head.chain(reader)) as _);
    Ok(Contents { reader, skipped })
}

/// The error for a failed read of this file.
pub(super) fn read_error(file: &CorpusFile, error: io::Error) -> Error {
    let now = fs::metadata(&file.path).map_or(file.bytes, |metadata| metadata.len());
    if now != file.bytes {
        let (path, expected) = (file.path.clone(), file.bytes);
        return Error::ChangedWhileRead { path, expected, found: now };
    }
    let format = match file.compression {
        Compression::None => return Error::io("read", &file.path)(error),
        Compression::Zstd => "zstd",
        Compression::Gzip => "gzip",
    };
    Error::Decompress { path: file.path.clone(), format, detail: error.to_string() }
}

/// All frames of a zstd file one after the other, their checksums compared.
struct ZstdReader<R> {
    source: R,
    decoder: FrameDecoder,
    in_frame: bool,
    frames: u64,
}

impl<R: BufRead> ZstdReader<R> {
    fn new(source: R) -> Self {
        Self { source, decoder: FrameDecoder::new(), in_frame: false, frames: 0 }
    }

    /// Starts the next frame; false at the end of the file.
    fn next_frame(&mut self) -> io::Result<bool> {
        if self.source.fill_buf()?.is_empty() {
            if self.frames == 0 {
                return Err(io::Error::other("the file is empty"));
            }
            return Ok(false);
        }
        self.frames += 1;
        match self.decoder.reset(&mut self.source) {
            Ok(()) => self.in_frame = true,
            Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                length,
                ..
            })) => {
                let skipped =
                    io::copy(&mut self.source.by_ref().take(u64::from(length)), &mut io::sink())?;
                if skipped < u64::from(length) {
                    return Err(io::Error::other("the last frame is cut short"));
                }
            }
            Err(error) => return Err(io::Error::other(error)),
        }
        Ok(true)
    }

    fn end_frame(&mut self) -> io::Result<()> {
        self.in_frame = false;
        let stored = self.decoder.get_checksum_from_data();
        if stored.is_some() && stored != self.decoder.get_calculated_checksum() {
            return Err(io::Error::other("the checksum of a frame differs"));
        }
        Ok(())
    }
}

impl<R: BufRead> Read for ZstdReader<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if buf.is_empty() {
            return Ok(0);
        }
        loop {
            if !self.in_frame {
                if !self.next_frame()? {
                    return Ok(0);
                }
            } else if self.decoder.can_collect() > 0 {
                return self.decoder.read(buf);
            } else if self.decoder.is_finished() {
                self.end_frame()?;
            } else {
                self.decoder
                    .decode_blocks(&mut self.source, BlockDecodingStrategy::UptoBlocks(1))
                    .map_err(io::Error::other)?;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    fn decompress(bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        ZstdReader::new(bytes).read_to_end(&mut out)?;
        Ok(out)
    }

    #[test]
    fn concatenated_and_skippable_frames_decode() {
        let mut file = compress_to_vec(&b"first "[..], CompressionLevel::Fastest);
        file.extend_from_slice(&0x184d_2a50_u32.to_le_bytes());
        file.extend_from_slice(&3_u32.to_le_bytes());
        file.extend_from_slice(b"xyz");
        file.extend(compress_to_vec(&b"second"[..], CompressionLevel::Fastest));
        assert_eq!(decompress(&file).unwrap(), b"first second");
    }

    #[test]
    fn every_truncation_is_an_error() {
        let text: Vec<u8> = (0..3000_u32).flat_map(|i| (i * i).to_le_bytes()).collect();
        let file = compress_to_vec(&text[..], CompressionLevel::Fastest);
        assert_eq!(decompress(&file).unwrap(), text);
        for keep in (0..file.len()).step_by(97).chain([file.len() - 1]) {
            assert!(decompress(&file[..keep]).is_err(), "{keep}");
        }
    }
}
