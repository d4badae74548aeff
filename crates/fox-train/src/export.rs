//! A model for others: a Hugging Face folder with its tokenizer.

use std::fs;
use std::path::Path;

use fox_data::Tokenizer;
use fox_model::{Model, WriteOptions};
use fox_tensor::Device;

use crate::checkpoint::CheckpointStore;
use crate::data::RunData;
use crate::run_folder::RunFolder;
use crate::{Error, Result, files};

/// Writes a Hugging Face folder, aside first, so that it is there in full or not at all. A folder
/// that holds something already is refused.
pub fn export(model: &Model, tokenizer: Option<&Tokenizer>, folder: &Path) -> Result<()> {
    if !files::names(folder)?.is_empty() {
        return Err(fox_model::Error::Occupied { path: folder.to_path_buf() }.into());
    }
    let mut name = folder.file_name().unwrap_or_default().to_owned();
    name.push(".partial");
    let partial = folder.with_file_name(name);
    if partial.exists() {
        fs::remove_dir_all(&partial).map_err(Error::io("remove", &partial))?;
    }
    model.save(&partial, &WriteOptions::for_model(model.config()))?;
    if let Some(tokenizer) = tokenizer {
        tokenizer.save(&partial)?;
    }
    files::sync_folder(&partial)?;
    if folder.exists() {
        fs::remove_dir(folder).map_err(Error::io("remove", folder))?;
    }
    fs::rename(&partial, folder).map_err(Error::io("rename", &partial))?;
    files::sync_folder(files::parent(folder))
}

/// Writes the newest whole checkpoint of a run as a Hugging Face folder with its tokenizer and returns its
/// step. The run may be under way: nothing in its folder is changed.
pub fn export_run(run: &Path, to: &Path, device: &Device) -> Result<u64> {
    let recipe = RunFolder::recipe(run)?;
    let store = CheckpointStore::new(run.join("checkpoints"), recipe.checkpoints);
    let step = store.newest_whole()?;
    let model = Model::from_checkpoint(&store.model_path(step), device)?;
    // Data that were moved away since cost the export only its tokenizer files.
    let tokenizer = RunData::open(&recipe).ok().and_then(|data| data.tokenizer);
    export(&model, tokenizer.as_ref(), to)?;
    Ok(step)
}
