//! Plain text files.

use std::io::Read;

use super::decompress::{Contents, read_error};
use super::files::{Compression, CorpusFile};
use super::{Document, DocumentsOfFile};
use crate::error::{Error, Result};

/// Longest decompressed text file. A few kilobytes of compressed data can hold gigabytes.
const MAX_DECOMPRESSED_BYTES: u64 = 1 << 30;

/// The documents of a text file: all of it, or the texts between separators.
///
/// The file is read whole: a text file is meant to be one document.
pub(super) fn documents(
    file: &CorpusFile,
    mut contents: Contents,
    separator: Option<&str>,
) -> Result<DocumentsOfFile> {
    let mut bytes = Vec::new();
    let limit = match file.compression {
        Compression::None => file.bytes,
        Compression::Zstd | Compression::Gzip => MAX_DECOMPRESSED_BYTES,
    };
    // Without compression the reader itself fails where a file grows.
    (&mut contents.reader)
        .take(limit.saturating_add(1))
        .read_to_end(&mut bytes)
        .map_err(|error| read_error(file, error))?;
    if bytes.len() as u64 > limit {
        return Err(Error::DocumentTooLarge {
            path: file.path.clone(),
            place: String::new(),
            limit,
        });
    }
    let text = String::from_utf8(bytes).map_err(|error| Error::NotUtf8 {
        path: file.path.clone(),
        offset: contents.skipped + error.utf8_error().valid_up_to() as u64,
    })?;
    let texts = match separator {
        None => vec![text],
        Some(separator) => text.split(separator).map(str::to_owned).collect(),
    };
    Ok(Box::new(texts.into_iter().map(|text| Ok(Document { text }))))
}
