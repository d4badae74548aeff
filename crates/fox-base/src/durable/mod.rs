//! Files and folders that are complete or absent, also after a crash.
//!
//! Each is written under a temporary name beside its destination, synced, renamed, and the folder above is synced so
//! that the name survives a power failure. A writer that fails removes its temporary file or folder.
//!
//! Several writers of one destination never share a temporary name: see [`NewFile`] and [`NewFolder`]. What a killed
//! writer left keeps its name, which [`final_path`] recognizes.

mod file;
mod folder;
#[cfg(test)]
mod probe;

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

pub use file::{NewFile, write};
pub use folder::{NewFolder, create_folder, entries, is_vacant, remove_folder, remove_leftovers};

use crate::FileError;

/// Suffix of a temporary name.
const PARTIAL: &str = ".partial";

type Result<T> = std::result::Result<T, FileError>;

/// The first choice for the temporary name of a file or folder.
fn temporary_path(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(PARTIAL);
    path.with_file_name(name)
}

/// Creates a file or folder beside `path` that did not exist: `NAME.partial`, or `NAME.PID-N.partial` where that exists.
fn create_aside<T>(path: &Path, create: impl Fn(&Path) -> io::Result<T>) -> Result<(PathBuf, T)> {
    let (mut temporary, mut n) = (temporary_path(path), 0);
    loop {
        match call("create", &temporary, || create(&temporary)) {
            Err(e) if e.source.kind() == ErrorKind::AlreadyExists => {}
            result => return result.map(|created| (temporary, created)),
        }
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}-{n}{PARTIAL}", std::process::id()));
        (temporary, n) = (path.with_file_name(name), n + 1);
    }
}

/// The destination of a file or folder with a temporary name; `None` for other names.
pub fn final_path(temporary: &Path) -> Option<PathBuf> {
    let name = temporary.file_name()?.to_str()?.strip_suffix(PARTIAL)?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let unique = |end: &str| end.split_once('-').is_some_and(|(pid, n)| digits(pid) && digits(n));
    let name = match name.rsplit_once('.') {
        Some((name, end)) if unique(end) => name,
        _ => name,
    };
    Some(temporary.with_file_name(name))
}

/// The folder of a path; the current one for a bare name.
fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// One call to the file system. Tests record these and let them fail.
fn call<T>(action: &'static str, path: &Path, call: impl FnOnce() -> io::Result<T>) -> Result<T> {
    #[cfg(test)]
    probe::before(action, path).map_err(FileError::at(action, path))?;
    call().map_err(FileError::at(action, path))
}

/// Syncs the names in a folder. Only Unix can open a folder for that; elsewhere the file system's journal must do.
fn sync_folder(path: &Path) -> Result<()> {
    if cfg!(unix) {
        call("sync", path, || std::fs::File::open(path)?.sync_all())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temporary_names_lead_to_their_destination() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        let mut found = Vec::new();
        for _ in 0..3 {
            let (temporary, ()) = create_aside(&path, |path| std::fs::create_dir(path)).unwrap();
            assert_eq!(final_path(&temporary).as_ref(), Some(&path));
            found.push(temporary);
        }
        found.dedup();
        assert_eq!(found.len(), 3);
        let named = |name: &str| final_path(Path::new(name));
        assert_eq!(named("a.1-x.partial"), Some("a.1-x".into()));
        assert_eq!(named("a.-1.partial"), Some("a.-1".into()));
        assert_eq!(named("a.partial.json"), None);
    }
}
