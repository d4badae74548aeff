//! A Zarr array as a data set.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::blosc::{HEADER, Header};
use super::cache::BlockCache;
use super::metadata::ZarrMetadata;
use crate::dataset::{Dataset, DocumentLengths, check_range};
use crate::error::{Error, Result};
use crate::positioned::read_exact_at;
use crate::tokenizer::Tokenizer;

/// Decoded blocks kept in memory: enough for one row of chunks of LongCrawl64 at windows of 16,384 tokens.
const CACHE_BYTES: usize = 256 << 20;

/// A two-dimensional Zarr array of token ids, one document per row, read where it lies.
#[derive(Debug)]
pub struct ZarrDataset {
    path: PathBuf,
    metadata: ZarrMetadata,
    lengths: DocumentLengths,
    tokenizer: Tokenizer,
    cache: BlockCache,
}

impl ZarrDataset {
    /// Opens an array. Arrays do not say which tokenizer made them; LongCrawl64's is
    /// [`Tokenizer::JsonGpt2`].
    ///
    /// # Errors
    /// Metadata that are missing or of another layout. Chunks are looked at when they are read.
    pub fn open(path: &Path, tokenizer: Tokenizer) -> Result<Self> {
        let metadata = ZarrMetadata::read(path)?;
        let lengths =
            DocumentLengths::Uniform { documents: metadata.shape[0], len: metadata.shape[1] };
        Ok(Self {
            path: path.to_path_buf(),
            metadata,
            lengths,
            tokenizer,
            cache: BlockCache::new(CACHE_BYTES),
        })
    }

    fn chunk_path(&self, row: u64, column: u64) -> PathBuf {
        let separator = self.metadata.separator;
        self.path.join(format!("{row}{separator}{column}"))
    }

    /// Reads decoded bytes `start..start + out.len()` of a chunk.
    fn read_chunk(&self, row: u64, column: u64, start: usize, out: &mut [u8]) -> Result<()> {
        let chunk = OpenChunk::new(self.chunk_path(row, column));
        if !self.metadata.blosc {
            chunk.check_len(self.metadata.chunk_bytes())?;
            return chunk.read_at(out, start as u64);
        }
        // Blocks of unknown size: the header is read first and lists the blocks.
        let header = chunk.header(self.metadata.chunk_bytes())?;
        if header.plain() {
            return chunk.read_at(out, (HEADER + start) as u64);
        }
        let end = start + out.len();
        let first = header.block_of(start);
        let last = header.block_of(end - 1);
        for index in first..=last {
            let key = (row, column, index);
            let block = match self.cache.get(key) {
                Some(block) => block,
                None => {
                    let block = Arc::new(chunk.decode_block(&header, index)?);
                    self.cache.insert(key, Arc::clone(&block));
                    block
                }
            };
            let range = header.block_range(index);
            let from = start.max(range.start);
            let to = end.min(range.end);
            out[from - start..to - start]
                .copy_from_slice(&block[from - range.start..to - range.start]);
        }
        Ok(())
    }
}

impl Dataset for ZarrDataset {
    fn lengths(&self) -> &DocumentLengths {
        &self.lengths
    }

    fn read(&self, document: u64, start: u64, out: &mut [u32]) -> Result<()> {
        check_range(&self.lengths, document, start, out.len())?;
        let [chunk_rows, chunk_columns] = self.metadata.chunks;
        let width = self.metadata.token_type.bytes();
        let row = document / chunk_rows;
        let row_inside = document % chunk_rows;
        let mut at = start;
        let mut rest = out;
        let mut bytes = Vec::new();
        while !rest.is_empty() {
            let column = at / chunk_columns;
            let inside = at % chunk_columns;
            let n = ((chunk_columns - inside) as usize).min(rest.len());
            let (part, others) = rest.split_at_mut(n);
            bytes.resize(n * width, 0);
            // Below the chunk's bytes, which fit in 31 bits.
            let offset = (row_inside * chunk_columns + inside) as usize * width;
            self.read_chunk(row, column, offset, &mut bytes)?;
            self.metadata.token_type.decode(&bytes, part);
            rest = others;
            at += n as u64;
        }
        Ok(())
    }

    fn vocab_size(&self) -> usize {
        self.tokenizer.vocab_size()
    }

    fn bos(&self) -> u32 {
        self.tokenizer.bos()
    }

    fn identity(&self) -> String {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let [documents, len] = self.metadata.shape;
        format!("zarr {name} {documents} x {len}")
    }

    fn tokenizer_identity(&self) -> String {
        self.tokenizer.identity().to_string()
    }
}

/// A chunk's file, opened when first needed.
struct OpenChunk {
    path: PathBuf,
    file: std::cell::OnceCell<File>,
}

impl OpenChunk {
    fn new(path: PathBuf) -> Self {
        Self { path, file: std::cell::OnceCell::new() }
    }

    fn file(&self) -> Result<&File> {
        if let Some(file) = self.file.get() {
            return Ok(file);
        }
        let file = File::open(&self.path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Error::MissingChunk { path: self.path.clone() },
            _ => Error::io("open", &self.path)(error),
        })?;
        Ok(self.file.get_or_init(|| file))
    }

    fn bad(&self, detail: String) -> Error {
        Error::BadChunk { path: self.path.clone(), detail }
    }

    fn read_at(&self, out: &mut [u8], offset: u64) -> Result<()> {
        read_exact_at(self.file()?, out, offset).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => self.bad("the file is truncated".into()),
            _ => Error::io("read", &self.path)(error),
        })
    }

    /// There are no checksums in an array, but a chunk that is not the one written may at least have another size.
    fn check_len(&self, expected: usize) -> Result<()> {
        let len = self.file()?.metadata().map_err(Error::io("look at", &self.path))?.len();
        match len == expected as u64 {
            true => Ok(()),
            false => Err(self.bad(format!("the file has {len} bytes instead of {expected}"))),
        }
    }

    fn header(&self, expected: usize) -> Result<Header> {
        let mut bytes = [0; HEADER];
        self.read_at(&mut bytes, 0)?;
        let header = Header::parse(&bytes).map_err(|problem| self.bad(problem))?;
        if header.nbytes != expected {
            return Err(self.bad(format!("{} decoded bytes instead of {expected}", header.nbytes)));
        }
        self.check_len(header.cbytes)?;
        if header.plain() {
            self.check_len(HEADER + header.nbytes)?;
        }
        Ok(header)
    }

    fn decode_block(&self, header: &Header, index: usize) -> Result<Vec<u8>> {
        // Blocks may lie in any order (several threads may have written them), so a block ends at the next
        // larger start or at the end of the frame.
        let mut table = vec![0; header.blocks() * 4];
        self.read_at(&mut table, HEADER as u64)?;
        let starts: Vec<usize> = table
            .chunks_exact(4)
            .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]) as usize)
            .collect();
        let start = starts[index];
        let end =
            starts.iter().copied().filter(|&other| other > start).min().unwrap_or(header.cbytes);
        if start < HEADER + table.len() || end > header.cbytes || end <= start {
            return Err(self.bad(format!("block {index} starts at an impossible place")));
        }
        let mut stored = vec![0; end - start];
        self.read_at(&mut stored, start as u64)?;
        header.decode_block(index, &stored).map_err(|problem| self.bad(problem))
    }
}
