//! Export of a model and its tokenizer as a Hugging Face folder.

use std::path::Path;

use fox_base::durable::{self, NewFolder};
use fox_data::Tokenizer;
use fox_model::{Model, WriteOptions};
use fox_tensor::Device;

use crate::Result;
use crate::data::RunData;
use crate::recipe::Weights;
use crate::run_folder::RunFolder;

/// Writes a Hugging Face folder, aside first, so that it is there in full or not at all. A folder
/// that holds something already is refused.
pub fn export(model: &Model, tokenizer: Option<&Tokenizer>, folder: &Path) -> Result<()> {
    if !durable::is_vacant(folder)? {
        return Err(fox_model::Error::Occupied { path: folder.to_path_buf() }.into());
    }
    let new = NewFolder::create(folder)?;
    model.save(new.path(), &WriteOptions::for_model(model.config()))?;
    if let Some(tokenizer) = tokenizer {
        tokenizer.save(new.path())?;
    }
    Ok(new.publish()?)
}

/// Writes the newest whole checkpoint of a run as a Hugging Face folder with its tokenizer and returns its
/// step. The weights are those that `weights` or else the recipe's `evaluation.weights` names. The run may be
/// under way: nothing in its folder is changed.
pub fn export_run(run: &Path, to: &Path, weights: Option<Weights>, device: &Device) -> Result<u64> {
    let newest = RunFolder::newest_model(run, weights, device)?;
    // Data that were moved away since cost the export only its tokenizer files.
    let tokenizer = RunData::open(&RunFolder::recipe(run)?).ok().and_then(|data| data.tokenizer);
    export(&newest.model, tokenizer.as_ref(), to)?;
    Ok(newest.step)
}
