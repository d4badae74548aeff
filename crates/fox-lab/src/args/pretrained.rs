//! The pretrained model that commands use when no model is named.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

/// Folder of the model below the repository's root, and below `share/fox` beside an installed binary's folder.
const FOLDER: &str = "models/books-16m";
/// Text of the model's folder that `fox inspect` reads by default.
const SAMPLE: &str = "sample.txt";

/// The model that was named, or the pretrained one.
pub fn or_pretrained(model: Option<&str>) -> Result<String> {
    match model {
        Some(model) => Ok(model.to_string()),
        None => find(&candidates()),
    }
}

/// The sample text of a checkpoint folder, if it has one.
pub fn sample(folder: &Path) -> Option<PathBuf> {
    Some(folder.join(SAMPLE)).filter(|path| path.is_file())
}

/// Places of the model: the sources the binary was built from, then the files installed with it.
fn candidates() -> Vec<PathBuf> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(FOLDER);
    let binary = std::env::current_exe().ok();
    let prefix = binary.as_deref().and_then(Path::parent).and_then(Path::parent);
    let installed = prefix.map(|prefix| prefix.join("share/fox").join(FOLDER));
    [Some(sources), installed].into_iter().flatten().collect()
}

fn find(candidates: &[PathBuf]) -> Result<String> {
    let there = candidates.iter().find(|path| path.join("config.json").is_file());
    let Some(path) = there.and_then(|path| path.canonicalize().ok()) else {
        bail!(
            "no model was given, and the pretrained {FOLDER} of the repository is not installed; name a checkpoint or \
             run folder"
        );
    };
    Ok(path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_models_take_precedence() {
        assert_eq!(or_pretrained(Some("runs/a")).unwrap(), "runs/a");
        assert!(or_pretrained(None).unwrap().ends_with(FOLDER));
    }

    #[test]
    fn missing_pretrained_model_is_one_sentence() {
        let error = find(&[PathBuf::from("/does/not/exist")]).unwrap_err().to_string();
        assert!(
            error.starts_with("no model was given") && error.contains("name a checkpoint"),
            "{error}"
        );
    }
}
