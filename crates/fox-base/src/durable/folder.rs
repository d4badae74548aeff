//! Folders that appear in full or not at all, and the other folder operations of this crate.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::{PARTIAL, Result, call, create_aside, parent, sync_folder};
use crate::FileError;

/// A folder under a temporary name. Dropped without [`NewFolder::publish`], it is removed.
///
/// Any number of threads and processes may write to one destination: each has a temporary folder that it created
/// itself, and exactly one of them publishes. Nothing that another writer or a user made is deleted or replaced.
#[derive(Debug)]
pub struct NewFolder {
    destination: PathBuf,
    temporary: PathBuf,
    published: bool,
}

impl NewFolder {
    /// Starts the folder that will stand at `destination`; creates the folders above it.
    pub fn create(destination: &Path) -> Result<NewFolder> {
        create_folder(parent(destination))?;
        let (temporary, ()) = create_aside(destination, |temporary| fs::create_dir(temporary))?;
        Ok(NewFolder { destination: destination.to_path_buf(), temporary, published: false })
    }

    /// Where to write the files until the folder is published.
    pub fn path(&self) -> &Path {
        &self.temporary
    }

    /// Renames the folder to its destination, which must be [vacant](is_vacant). Every file in it must have been
    /// written durably.
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`] at the destination when it is not vacant, for example because another writer
    /// published first.
    pub fn publish(mut self) -> Result<()> {
        let (temporary, destination) = (&self.temporary, &self.destination);
        sync_folder(temporary)?;
        match call("rename", temporary, || rename_onto_vacant(temporary, destination)) {
            Err(_) if !is_vacant(destination)? => {
                let exists = io::Error::new(ErrorKind::AlreadyExists, "it exists and is not empty");
                return Err(FileError::at("create", destination)(exists));
            }
            result => result?,
        }
        self.published = true;
        sync_folder(parent(&self.destination))
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        if !self.published {
            // The error that led here is the one to report.
            let _ = fs::remove_dir_all(&self.temporary);
        }
    }
}

/// Renames a folder. A destination that is not vacant makes the rename fail, in one step on Unix, where the system
/// replaces an empty folder and no other.
fn rename_onto_vacant(from: &Path, to: &Path) -> io::Result<()> {
    if cfg!(windows) && to.exists() {
        fs::remove_dir(to)?;
    }
    fs::rename(from, to)
}

/// Creates a folder and those above it, and syncs their names.
pub fn create_folder(path: &Path) -> Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let above = parent(path);
    create_folder(above)?;
    match call("create", path, || fs::create_dir(path)) {
        // Another process created it in the meantime.
        Err(e) if e.source.kind() == ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        Err(e) => Err(e),
        Ok(()) => sync_folder(above),
    }
}

/// Removes a folder with its contents. It is renamed first, so that its name never stands for a part of them.
pub fn remove_folder(path: &Path) -> Result<()> {
    let (temporary, ()) = create_aside(path, |temporary| fs::create_dir(temporary))?;
    if let Err(error) = call("rename", path, || rename_onto_vacant(path, &temporary)) {
        let _ = fs::remove_dir(&temporary);
        return Err(error);
    }
    call("remove", &temporary, || fs::remove_dir_all(&temporary))
}

/// Removes everything in a folder that has a temporary name. Only for folders that the caller alone writes to.
pub fn remove_leftovers(folder: &Path) -> Result<()> {
    for path in entries(folder)? {
        if path.to_string_lossy().ends_with(PARTIAL) {
            let is_folder = fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.is_dir());
            call("remove", &path, || match is_folder {
                true => fs::remove_dir_all(&path),
                false => fs::remove_file(&path),
            })?;
        }
    }
    Ok(())
}

/// Sorted paths of the files and folders in a folder; empty when it does not exist.
pub fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let listing = match fs::read_dir(folder) {
        Ok(listing) => listing,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(FileError::at("read", folder)(e)),
    };
    let mut paths = Vec::new();
    for entry in listing {
        paths.push(entry.map_err(FileError::at("read", folder))?.path());
    }
    paths.sort();
    Ok(paths)
}

/// Whether a path does not exist or is an empty folder.
pub fn is_vacant(path: &Path) -> Result<bool> {
    match fs::read_dir(path) {
        Ok(mut listing) => Ok(listing.next().is_none()),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(true),
        Err(e) if e.kind() == ErrorKind::NotADirectory => Ok(false),
        Err(e) => Err(FileError::at("read", path)(e)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{probe, temporary_path, write};
    use super::*;

    #[test]
    fn publishes_a_folder_in_one_rename() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let new = NewFolder::create(&path).unwrap();
        write(&new.path().join("file"), b"text").unwrap();
        assert!(!path.exists());
        probe::take();
        new.publish().unwrap();
        if cfg!(unix) {
            let above = dir.path().file_name().unwrap().to_str().unwrap();
            let wanted = ["sync a.partial", "rename a.partial", &format!("sync {above}")];
            assert_eq!(probe::take(), wanted);
        }
        assert_eq!(entries(dir.path()).unwrap(), [path.as_path()]);
        assert_eq!(entries(&path).unwrap(), [path.join("file")]);
    }

    /// Also the leftover of a killed writer: its files must not appear in the new folder.
    #[test]
    fn keeps_a_folder_called_partial() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let theirs = temporary_path(&path).join("file");
        fs::create_dir(temporary_path(&path)).unwrap();
        fs::write(&theirs, "precious").unwrap();
        drop(NewFolder::create(&path).unwrap());
        let new = NewFolder::create(&path).unwrap();
        write(&new.path().join("file"), b"text").unwrap();
        new.publish().unwrap();
        assert_eq!(fs::read(path.join("file")).unwrap(), b"text");
        remove_folder(&path).unwrap();
        assert_eq!(fs::read(&theirs).unwrap(), b"precious");
        assert_eq!(entries(dir.path()).unwrap(), [temporary_path(&path)]);
    }

    #[test]
    fn concurrent_writers_never_mix() {
        let dir = tempfile::tempdir().unwrap();
        let barrier = std::sync::Barrier::new(8);
        for round in 0..20 {
            let path = dir.path().join(format!("out{round}"));
            let writer = |n: usize| {
                barrier.wait();
                let new = NewFolder::create(&path)?;
                for file in 0..4 {
                    write(&new.path().join(file.to_string()), &[n as u8])?;
                }
                new.publish()
            };
            let results: Vec<Result<()>> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..8).map(|n| scope.spawn(move || writer(n))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let winners: Vec<usize> = (0..8).filter(|&n| results[n].is_ok()).collect();
            assert_eq!(winners.len(), 1, "{results:?}");
            for error in results.into_iter().filter_map(Result::err) {
                let kind = error.source.kind();
                assert_eq!((kind, &error.path), (ErrorKind::AlreadyExists, &path));
            }
            let files: Vec<Vec<u8>> =
                entries(&path).unwrap().iter().map(|file| fs::read(file).unwrap()).collect();
            assert_eq!(files, vec![vec![winners[0] as u8]; 4]);
        }
        assert_eq!(entries(dir.path()).unwrap().len(), 20, "temporary folders are removed");
    }

    #[test]
    fn failed_publish_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        fs::create_dir(&path).unwrap();
        for action in ["sync", "rename"] {
            let new = NewFolder::create(&path).unwrap();
            let error = probe::failing(action, || new.publish()).unwrap_err();
            assert_eq!((error.action, &error.path), (action, &temporary_path(&path)));
            assert_eq!(entries(dir.path()).unwrap(), [path.as_path()]);
        }
        // A folder that is not empty is never replaced.
        fs::write(path.join("file"), "precious").unwrap();
        let new = NewFolder::create(&path).unwrap();
        write(&new.path().join("other"), b"text").unwrap();
        assert_eq!(new.publish().unwrap_err().source.kind(), ErrorKind::AlreadyExists);
        assert_eq!(fs::read(path.join("file")).unwrap(), b"precious");
        assert_eq!(entries(dir.path()).unwrap(), [path]);
    }

    #[test]
    fn created_folders_are_synced() {
        let dir = tempfile::tempdir().unwrap();
        probe::take();
        create_folder(&dir.path().join("a/b")).unwrap();
        create_folder(&dir.path().join("a/b")).unwrap();
        if cfg!(unix) {
            let above = dir.path().file_name().unwrap().to_str().unwrap();
            let wanted = ["create a", &format!("sync {above}"), "create b", "sync a"];
            assert_eq!(probe::take(), wanted);
        }
        fs::write(dir.path().join("file"), "").unwrap();
        assert_eq!(create_folder(&dir.path().join("file")).unwrap_err().action, "create");
    }

    #[test]
    fn removing_a_folder_renames_it_first() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("file"), "text").unwrap();
        probe::failing("rename", || remove_folder(&path)).unwrap_err();
        assert_eq!(entries(dir.path()).unwrap(), [path.as_path()]);
        probe::failing("remove", || remove_folder(&path)).unwrap_err();
        assert_eq!(entries(dir.path()).unwrap(), [temporary_path(&path)]);
        fs::create_dir(&path).unwrap();
        remove_folder(&path).unwrap();
        assert_eq!(entries(dir.path()).unwrap(), [temporary_path(&path)]);
    }

    #[test]
    fn removes_leftovers_only() {
        let dir = tempfile::tempdir().unwrap();
        let (file, folder) = (dir.path().join("a"), dir.path().join("b"));
        write(&file, b"text").unwrap();
        NewFolder::create(&folder).unwrap().publish().unwrap();
        fs::write(temporary_path(&file), "torn").unwrap();
        fs::create_dir(temporary_path(&folder)).unwrap();
        fs::write(temporary_path(&folder).join("file"), "torn").unwrap();
        remove_leftovers(dir.path()).unwrap();
        assert_eq!(entries(dir.path()).unwrap(), [file, folder]);
        remove_leftovers(&dir.path().join("absent")).unwrap();
    }

    #[test]
    fn vacant_means_missing_or_empty() {
        let dir = tempfile::tempdir().unwrap();
        assert!(is_vacant(dir.path()).unwrap() && is_vacant(&dir.path().join("absent")).unwrap());
        fs::write(dir.path().join("file"), "").unwrap();
        assert!(!is_vacant(dir.path()).unwrap());
        assert!(!is_vacant(&dir.path().join("file")).unwrap());
    }
}
