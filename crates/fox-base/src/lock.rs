//! One writer per folder.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::path::Path;

use crate::FileError;

/// An exclusive lock on a folder, by a lock on a file in it.
///
/// It is a lock of the operating system, which releases it when the process ends: a file left by a killed process locks
/// nothing. The file contains the process id, for the error message of other processes.
#[derive(Debug)]
pub struct FolderLock {
    file: File,
}

/// The process that holds a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockHolder {
    /// The process id, when it can be read.
    pub pid: Option<u32>,
}

impl FolderLock {
    /// Locks the file at `path`, which is created if missing; returns the holder when it is locked.
    pub fn take(path: &Path) -> Result<Result<FolderLock, LockHolder>, FileError> {
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(FileError::at("open", path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Ok(Err(LockHolder { pid: read_pid(&mut file) }));
            }
            Err(TryLockError::Error(error)) => return Err(FileError::at("lock", path)(error)),
        }
        file.set_len(0).map_err(FileError::at("write", path))?;
        write!(file, "{}", std::process::id()).map_err(FileError::at("write", path))?;
        Ok(Ok(FolderLock { file }))
    }
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        // The file stays: another process may be about to lock it.
        let _ = self.file.set_len(0);
    }
}

/// The process id in the file, if it is written and readable.
fn read_pid(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_exclusively_and_ignores_stale_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        for left_behind in ["", "1", "no number"] {
            std::fs::write(&path, left_behind).unwrap();
            let held = FolderLock::take(&path).unwrap().unwrap();
            let pid = Some(std::process::id());
            assert_eq!(FolderLock::take(&path).unwrap().unwrap_err(), LockHolder { pid });
            drop(held);
            assert_eq!(std::fs::read(&path).unwrap(), b"");
        }
        drop(FolderLock::take(&path).unwrap().unwrap());
        let error = FolderLock::take(&dir.path().join("missing/lock")).unwrap_err();
        assert_eq!(error.action, "open");
    }
}
