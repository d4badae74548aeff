//! A file of a corpus while it is read.

use std::fs::File;
use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts the bytes read, and fails when the size of the file changed since it was found: a file that is still being
/// written, or was truncated, would give another corpus.
pub(super) struct SourceReader {
    file: File,
    expected: u64,
    read: u64,
    /// Bytes of all files read so far.
    count: Arc<AtomicU64>,
}

impl SourceReader {
    pub(super) fn new(file: File, expected: u64, count: Arc<AtomicU64>) -> Self {
        Self { file, expected, read: 0, count }
    }
}

impl Read for SourceReader {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read(buf)?;
        self.read += n as u64;
        self.count.fetch_add(n as u64, Ordering::Relaxed);
        let ended = n == 0 && !buf.is_empty();
        if self.read > self.expected || (ended && self.read < self.expected) {
            let (read, expected) = (self.read, self.expected);
            return Err(io::Error::other(format!("{read} bytes instead of {expected}")));
        }
        Ok(n)
    }
}
