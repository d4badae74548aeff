//! What the fuzz targets share: folders in memory, and the one sentence that every error must be.

use std::path::PathBuf;

use tempfile::TempDir;

/// A folder for the files of a target, in memory where the system has such a place. It lives as long as
/// the process: files are overwritten for every input.
pub fn folder() -> TempDir {
    let memory = PathBuf::from("/dev/shm");
    match memory.is_dir() {
        true => TempDir::new_in(memory).expect("a folder in memory"),
        false => TempDir::new().expect("a temporary folder"),
    }
}

/// An error must be a sentence: something is said, and the input is not repeated at length in it.
pub fn check_sentence(error: &dyn std::error::Error) {
    let said = error.to_string();
    assert!(!said.trim().is_empty(), "an error without words");
}
