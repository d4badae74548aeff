//! A folder that appears in full or not at all, and what is done to folders otherwise.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::{PARTIAL, Result, call, parent, sync_folder, temporary_path};
use crate::FileError;

/// A folder under a temporary name. Dropped without [`NewFolder::publish`], it is removed.
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
        let temporary = temporary_path(destination);
        remove_if_there(&temporary)?;
        call("create", &temporary, || fs::create_dir(&temporary))?;
        Ok(NewFolder { destination: destination.to_path_buf(), temporary, published: false })
    }

    /// Where its files are to be written until it is published.
    pub fn path(&self) -> &Path {
        &self.temporary
    }

    /// Puts the folder in its place, which must be [vacant](is_vacant). Every file in it must have been
    /// written durably.
    pub fn publish(mut self) -> Result<()> {
        let (temporary, destination) = (&self.temporary, &self.destination);
        sync_folder(temporary)?;
        if cfg!(windows) && destination.exists() {
            // Elsewhere a rename replaces an empty folder.
            call("remove", destination, || fs::remove_dir(destination))?;
        }
        call("rename", temporary, || fs::rename(temporary, destination))?;
        self.published = true;
        sync_folder(parent(&self.destination))
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        if !self.published {
            // The error that led here is the one to report; the next writer removes what stays.
            let _ = fs::remove_dir_all(&self.temporary);
        }
    }
}

/// Creates a folder and those above it, and makes their names last.
pub fn create_folder(path: &Path) -> Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let above = parent(path);
    create_folder(above)?;
    match call("create", path, || fs::create_dir(path)) {
        // Another process was faster.
        Err(e) if e.source.kind() == ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        Err(e) => Err(e),
        Ok(()) => sync_folder(above),
    }
}

/// Removes a folder with all it holds. It loses its name first, so that it is never there in part.
pub fn remove_folder(path: &Path) -> Result<()> {
    let temporary = temporary_path(path);
    remove_if_there(&temporary)?;
    call("rename", path, || fs::rename(path, &temporary))?;
    call("remove", &temporary, || fs::remove_dir_all(&temporary))
}

/// Removes what killed writers left in a folder.
pub fn remove_leftovers(folder: &Path) -> Result<()> {
    for path in entries(folder)? {
        if path.to_string_lossy().ends_with(PARTIAL) {
            remove_if_there(&path)?;
        }
    }
    Ok(())
}

/// Paths of the files and folders in a folder, sorted; none when it does not exist.
pub fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let found = match fs::read_dir(folder) {
        Ok(found) => found,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(FileError::at("read", folder)(e)),
    };
    let mut paths = Vec::new();
    for entry in found {
        paths.push(entry.map_err(FileError::at("read", folder))?.path());
    }
    paths.sort();
    Ok(paths)
}

/// Whether nothing stands at a path, or only an empty folder.
pub fn is_vacant(path: &Path) -> Result<bool> {
    match fs::read_dir(path) {
        Ok(mut found) => Ok(found.next().is_none()),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(true),
        Err(e) if e.kind() == ErrorKind::NotADirectory => Ok(false),
        Err(e) => Err(FileError::at("read", path)(e)),
    }
}

fn remove_if_there(path: &Path) -> Result<()> {
    let Ok(found) = fs::symlink_metadata(path) else { return Ok(()) };
    call("remove", path, || match found.is_dir() {
        true => fs::remove_dir_all(path),
        false => fs::remove_file(path),
    })
}

#[cfg(test)]
mod tests {
    use super::super::{probe, write};
    use super::*;

    #[test]
    fn a_folder_appears_in_full() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        // A killed writer's pieces must not appear in it.
        fs::create_dir(temporary_path(&path)).unwrap();
        fs::write(temporary_path(&path).join("piece"), "old").unwrap();
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

    #[test]
    fn a_failure_leaves_what_was_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        fs::create_dir(&path).unwrap();
        for action in ["sync", "rename"] {
            let new = NewFolder::create(&path).unwrap();
            let error = probe::failing(action, || new.publish()).unwrap_err();
            assert_eq!((error.action, &error.path), (action, &temporary_path(&path)));
            assert_eq!(entries(dir.path()).unwrap(), [path.as_path()]);
        }
        // A folder that holds something is never replaced.
        fs::write(path.join("file"), "precious").unwrap();
        let new = NewFolder::create(&path).unwrap();
        write(&new.path().join("other"), b"text").unwrap();
        assert_eq!(new.publish().unwrap_err().action, "rename");
        assert_eq!(fs::read(path.join("file")).unwrap(), b"precious");
        assert_eq!(entries(dir.path()).unwrap(), [path]);
    }

    #[test]
    fn new_folders_are_synced_in_those_above() {
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
    fn a_removed_folder_loses_its_name_first() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("file"), "text").unwrap();
        probe::failing("remove", || remove_folder(&path)).unwrap_err();
        assert_eq!(entries(dir.path()).unwrap(), [temporary_path(&path)]);
        // The next one removes the pieces as well.
        fs::create_dir(&path).unwrap();
        remove_folder(&path).unwrap();
        assert!(entries(dir.path()).unwrap().is_empty());
    }

    #[test]
    fn leftovers_are_removed_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let (file, folder) = (dir.path().join("a"), dir.path().join("b"));
        write(&file, b"text").unwrap();
        NewFolder::create(&folder).unwrap().publish().unwrap();
        fs::write(temporary_path(&file), "torn").unwrap();
        fs::create_dir(temporary_path(&folder)).unwrap();
        fs::write(temporary_path(&folder).join("piece"), "torn").unwrap();
        remove_leftovers(dir.path()).unwrap();
        assert_eq!(entries(dir.path()).unwrap(), [file, folder]);
        remove_leftovers(&dir.path().join("absent")).unwrap();
    }

    #[test]
    fn vacant_places_are_absent_or_empty() {
        let dir = tempfile::tempdir().unwrap();
        assert!(is_vacant(dir.path()).unwrap() && is_vacant(&dir.path().join("absent")).unwrap());
        fs::write(dir.path().join("file"), "").unwrap();
        assert!(!is_vacant(dir.path()).unwrap());
        assert!(!is_vacant(&dir.path().join("file")).unwrap());
    }
}
