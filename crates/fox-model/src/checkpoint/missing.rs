//! The message for a path without a checkpoint.

use std::fs;
use std::path::{Path, PathBuf};

use fox_base::nearest::nearest;

const HOLDS: &str = "a checkpoint folder holds config.json and model.safetensors or its shards";

/// The message for a missing configuration file, with the nearest existing path.
pub(crate) fn sentence(file: &Path) -> String {
    let folder = file.parent().unwrap_or(Path::new("."));
    let shown = folder.display();
    if folder.is_file() {
        return format!("{shown} is a file; {HOLDS}");
    }
    if folder.is_dir() {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let inner = subfolders(folder).into_iter().find(|inner| inner.join(&*name).is_file());
        return match inner {
            Some(inner) => format!("{shown} has no {name}; did you mean {}?", inner.display()),
            None => format!("{shown} has no {name}; {HOLDS}"),
        };
    }
    // The first component that does not exist is the wrong one.
    let (mut wrong, mut above) = (folder, folder.parent());
    while let Some(parent) = above.filter(|p| !p.as_os_str().is_empty() && !p.is_dir()) {
        (wrong, above) = (parent, parent.parent());
    }
    let above = above.filter(|p| !p.as_os_str().is_empty());
    let names: Vec<String> = subfolders(above.unwrap_or(Path::new(".")))
        .iter()
        .filter_map(|path| Some(path.file_name()?.to_str()?.to_string()))
        .collect();
    let name = wrong.file_name().unwrap_or_default().to_string_lossy();
    match nearest(&name, names.iter().map(String::as_str)) {
        Some(near) => {
            let meant = above.map_or(PathBuf::from(&near), |above| above.join(&near));
            format!("folder {shown} does not exist; did you mean {}?", meant.display())
        }
        None => format!("folder {shown} does not exist; {HOLDS}"),
    }
}

/// Folders in a folder, in order.
fn subfolders(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> =
        entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suggests_the_nearest_existing_folder() {
        let dir = tempfile::tempdir().unwrap();
        let (run, top) = (dir.path().join("runs/first"), dir.path().display().to_string());
        fs::create_dir_all(run.join("export")).unwrap();
        fs::write(run.join("export/config.json"), "{}").unwrap();
        fs::write(run.join("export/model.safetensors"), "").unwrap();
        let said =
            |path: &str| sentence(&dir.path().join(path).join("config.json")).replace(&top, "T");
        assert_eq!(
            said("runs/frist"),
            "folder T/runs/frist does not exist; did you mean T/runs/first?"
        );
        assert_eq!(
            said("rusn/first/export"),
            "folder T/rusn/first/export does not exist; did you mean T/runs?"
        );
        assert_eq!(
            said("runs/first"),
            "T/runs/first has no config.json; did you mean T/runs/first/export?"
        );
        let file = said("runs/first/export/model.safetensors");
        assert!(file.starts_with("T/runs/first/export/model.safetensors is a file; "), "{file}");
        let other = said("wavelength");
        assert_eq!(other, format!("folder T/wavelength does not exist; {HOLDS}"));
    }
}
