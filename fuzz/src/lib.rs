//! Helpers of the fuzz targets: folders in memory, and the check of error messages.

use std::path::PathBuf;

use tempfile::TempDir;

/// A folder for the files of a target, in memory where the system supports it. It lives as long as the
/// process: files are overwritten for every input.
pub fn folder() -> TempDir {
    let memory = PathBuf::from("/dev/shm");
    match memory.is_dir() {
        true => TempDir::new_in(memory).expect("a folder in memory"),
        false => TempDir::new().expect("a temporary folder"),
    }
}

/// An error message must not be empty.
pub fn check_sentence(error: &dyn std::error::Error) {
    let message = error.to_string();
    assert!(!message.trim().is_empty(), "an empty error message");
}
