//! The error of file operations.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// A failed file operation: action, path and system error.
#[derive(Debug)]
pub struct FileError {
    /// The action, e.g. `read`.
    pub action: &'static str,
    /// The file or folder.
    pub path: PathBuf,
    /// Why it failed.
    pub source: io::Error,
}

impl FileError {
    /// For `map_err`: attaches action and path.
    pub fn at(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FileError {
        let path = path.to_path_buf();
        move |source| FileError { action, path, source }
    }
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot {} {}: {}", self.action, self.path.display(), self.source)
    }
}

impl Error for FileError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_names_action_path_and_reason() {
        let error = FileError::at("sync", Path::new("a/b"))(io::Error::other("the disk is full"));
        assert_eq!(error.to_string(), "cannot sync a/b: the disk is full");
        assert_eq!(error.source().map(ToString::to_string).as_deref(), Some("the disk is full"));
    }
}
