//! Plain text files.

use std::io::Read;

use super::decompress::{Contents, read_error};
use super::files::CorpusFile;
use super::{Document, DocumentsOfFile};
use crate::error::{Error, Result};

/// The documents of a text file: the whole, or the parts between separators.
///
/// The file is read whole: a text file is meant to be one document.
pub(super) fn documents(
    file: &CorpusFile,
    mut contents: Contents,
    separator: Option<&str>,
) -> Result<DocumentsOfFile> {
    let mut bytes = Vec::new();
    contents.reader.read_to_end(&mut bytes).map_err(|error| read_error(file, error))?;
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
