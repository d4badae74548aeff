//! Files that appear only when they are complete.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use super::{Result, call, create_aside, parent, sync_folder};

/// A file under a temporary name. Dropped without [`NewFile::finish`], it is removed, and an existing file at its path
/// stays.
///
/// Any number of threads and processes may write to one path: each has a temporary file that it created itself, and the
/// last one to finish wins.
#[derive(Debug)]
pub struct NewFile {
    path: PathBuf,
    temporary: PathBuf,
    out: BufWriter<File>,
    renamed: bool,
}

impl NewFile {
    /// Starts the file at `path`, in a folder that exists.
    pub fn create(path: &Path) -> Result<NewFile> {
        let (temporary, file) = create_aside(path, |temporary| File::create_new(temporary))?;
        let out = BufWriter::with_capacity(1 << 20, file);
        Ok(NewFile { path: path.to_path_buf(), temporary, out, renamed: false })
    }

    /// Final path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends bytes.
    pub fn write_all(&mut self, bytes: &[u8]) -> Result<()> {
        call("write", &self.temporary, || self.out.write_all(bytes))
    }

    /// Syncs the file, renames it to its path, replacing an existing file, and syncs the folder.
    pub fn finish(mut self) -> Result<()> {
        let temporary = &self.temporary;
        call("write", temporary, || self.out.flush())?;
        call("sync", temporary, || self.out.get_ref().sync_all())?;
        call("rename", temporary, || fs::rename(temporary, &self.path))?;
        self.renamed = true;
        sync_folder(parent(&self.path))
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.renamed {
            // The error that led here is the one to report.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// Writes a file atomically, in a folder that exists.
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = NewFile::create(path)?;
    file.write_all(bytes)?;
    file.finish()
}

#[cfg(test)]
mod tests {
    use super::super::{entries, probe, temporary_path};
    use super::*;

    #[test]
    fn writes_sync_and_rename_in_crash_safe_order() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().file_name().unwrap().to_str().unwrap().to_string();
        probe::take();
        write(&dir.path().join("a"), b"one").unwrap();
        let mut wanted = vec![
            "create a.partial".to_string(),
            "write a.partial".into(),
            // The flush of the buffer.
            "write a.partial".into(),
            "sync a.partial".into(),
            "rename a.partial".into(),
        ];
        if cfg!(unix) {
            wanted.push(format!("sync {folder}"));
        }
        assert_eq!(probe::take(), wanted);
    }

    #[test]
    fn replaces_a_file_atomically() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        for text in [&b"one and more"[..], b"two"] {
            write(&path, text).unwrap();
            assert_eq!(fs::read(&path).unwrap(), text);
            assert_eq!(entries(dir.path()).unwrap(), [path.as_path()]);
        }
    }

    #[test]
    fn failed_write_keeps_the_old_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        write(&path, b"old").unwrap();
        for action in ["create", "write", "sync", "rename"] {
            let error = probe::failing(action, || write(&path, b"new")).unwrap_err();
            assert_eq!((error.action, &error.path), (action, &temporary_path(&path)));
            assert_eq!(fs::read(&path).unwrap(), b"old", "{action}");
            assert_eq!(entries(dir.path()).unwrap(), [path.as_path()], "{action}");
        }
        // Also when it is dropped without an error.
        NewFile::create(&path).unwrap().write_all(b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(entries(dir.path()).unwrap(), [path]);
    }

    /// A file of the user, or the leftover of a killed writer.
    #[test]
    fn keeps_a_file_called_partial() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        fs::write(temporary_path(&path), b"precious").unwrap();
        drop(NewFile::create(&path).unwrap());
        write(&path, b"whole").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"whole");
        assert_eq!(fs::read(temporary_path(&path)).unwrap(), b"precious");
        assert_eq!(entries(dir.path()).unwrap(), [path.clone(), temporary_path(&path)]);
    }

    #[test]
    fn concurrent_writers_never_mix() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let barrier = std::sync::Barrier::new(4);
        let writer = &|n: u8| {
            for _ in 0..20 {
                let mut file = NewFile::create(&path).unwrap();
                barrier.wait();
                (0..8).for_each(|_| file.write_all(&vec![n; 1 << 17]).unwrap());
                file.finish().unwrap();
                let found = fs::read(&path).unwrap();
                assert_eq!(found, vec![found[0]; 1 << 20], "a mixed file");
            }
        };
        std::thread::scope(|scope| (0..4).for_each(|n| drop(scope.spawn(move || writer(n)))));
        assert_eq!(entries(dir.path()).unwrap(), [path]);
    }

    #[test]
    fn file_appears_only_when_finished() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let mut file = NewFile::create(&path).unwrap();
        file.write_all(&vec![7; 3 << 20]).unwrap();
        assert!(!path.exists());
        file.finish().unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), 3 << 20);
    }
}
