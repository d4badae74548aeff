//! Error messages for wrong paths and names, with suggestions.

use std::path::{Path, PathBuf};

use fox_base::nearest::nearest;
use fox_model::Preset;
use fox_train::{RunFolder, recipe};

use super::hub::HubModel;

/// The message for a path without a model, with the most similar one.
pub(crate) fn no_model(path: &Path) -> String {
    let shown = path.display();
    if path.as_os_str().is_empty() {
        return "the name of the model is empty; give the folder of a checkpoint, or of a run of `fox train`".into();
    }
    if path.join("model/config.json").is_file() {
        return format!("{shown} has no config.json; its model is {shown}/model");
    }
    if path.exists() {
        return format!(
            "{shown} has no config.json; give the folder of a checkpoint, or of a run of `fox train`"
        );
    }
    if let Some(near) = nearest_model(path, |_| true) {
        return format!("{shown} does not exist; did you mean {}?", near.display());
    }
    if path.to_str().and_then(HubModel::parse).is_some() {
        return format!(
            "{shown} does not exist, and the Hugging Face cache has no model of that name; `fox generate {shown} \
             --download` fetches it"
        );
    }
    format!("{shown} does not exist; give the folder of a checkpoint, or of a run of `fox train`")
}

/// The message for a path without a run, with the most similar one.
pub fn no_run(path: &Path) -> String {
    let shown = path.display();
    if let Some(run) = RunFolder::around(path) {
        return format!("{shown} is part of the run {}; name that folder", run.display());
    }
    match nearest_model(path, RunFolder::is_run) {
        Some(run) => format!("{shown} holds no run of fox; did you mean {}?", run.display()),
        None => format!("{shown} holds no run of fox; give the --out folder of `fox train`"),
    }
}

/// Refuses a file where a command writes a folder.
///
/// # Errors
/// A path of a file.
pub fn results_folder(path: &Path) -> anyhow::Result<()> {
    match path.is_file() {
        true => anyhow::bail!("{} is a file; name a folder with --out", path.display()),
        false => Ok(()),
    }
}

/// The message for an unknown model name, with the most similar one.
pub fn no_description(name: &str) -> String {
    let presets = Preset::all();
    let recipes = recipe::builtin_names().unwrap_or_default();
    let known = presets.iter().map(|preset| preset.name).chain(recipes.iter().map(String::as_str));
    let folder = nearest_model(Path::new(name), |_| true);
    let hint = match (nearest(name, known), folder) {
        (Some(known), _) => format!("did you mean `{known}`?"),
        (None, Some(path)) => format!("did you mean {}?", path.display()),
        (None, None) => "`fox train --list` shows the recipes".to_owned(),
    };
    format!("`{name}` is neither a folder nor a config.json nor a recipe; {hint}")
}

/// Endings of text files, which are data and not recipes.
const TEXTS: [&str; 6] = [".txt", ".md", ".jsonl", ".json", ".zst", ".gz"];

/// The message for a run, a checkpoint or data that were given as a recipe.
pub fn folder_as_recipe(name: &str) -> Option<String> {
    let path = Path::new(name);
    if RunFolder::is_run(path) {
        return Some(format!(
            "{name} is a run, not a recipe; to resume it, give its recipe and --out {name}; to start from its weights, a recipe and --init {name}"
        ));
    }
    if path.join("config.json").is_file() {
        return Some(format!(
            "{name} is a checkpoint, not a recipe; to start from it, give a recipe and --init {name}"
        ));
    }
    let is_builtin =
        || recipe::builtin_names().is_ok_and(|all| all.iter().any(|known| known == name));
    if path.exists() && !name.ends_with(".toml") && !is_builtin() {
        return Some(format!("{name} is data, not a recipe; train on it with --data {name}"));
    }
    let is_text = TEXTS.iter().any(|ending| name.ends_with(ending));
    is_text
        .then(|| format!("{name} does not exist; a text to train on is given with --data {name}"))
}

/// The message for a run or checkpoint that was given as data.
pub fn folder_as_data(path: &Path) -> Option<String> {
    let name = path.display();
    if RunFolder::is_run(path) {
        return Some(format!(
            "{name} is a run, not data; give the text or the prepared data, and --init {name} to start from its weights"
        ));
    }
    let has = |file: &str| path.join(file).is_file();
    let is_model =
        has("config.json") && (has("model.safetensors") || has("model.safetensors.index.json"));
    is_model
        .then(|| format!("{name} is a checkpoint, not data; to start from it, use --init {name}"))
}

/// The model or run with the most similar name, in the same folder or in `runs`.
fn nearest_model(path: &Path, kind: impl Fn(&Path) -> bool) -> Option<PathBuf> {
    let beside = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut models = Vec::new();
    for folder in [beside, Path::new("runs")] {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let folders = entries.map(|entry| entry.path());
        models.extend(folders.filter(|p| p.join("config.json").exists() || RunFolder::is_run(p)));
    }
    models.retain(|path| kind(path));
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let names: Vec<String> = models.iter().map(|path| name(path)).collect();
    let closest = nearest(&name(path), names.iter().map(String::as_str))?;
    let found = models.into_iter().find(|path| name(path) == closest)?;
    Some(found.strip_prefix(".").unwrap_or(&found).to_path_buf())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_an_empty_model_as_empty() {
        assert!(no_model(Path::new("")).starts_with("the name of the model is empty;"));
    }
}
