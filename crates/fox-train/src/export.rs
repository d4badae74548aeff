//! Export of a model as a Hugging Face folder, with tokenizer, chat template and generation settings.

use std::path::{Path, PathBuf};

use fox_base::durable::{self, NewFolder};
use fox_data::{ChatTemplate, Tokenizer};
use fox_model::{Model, WriteOptions, copy_tokenizer_files};
use fox_tensor::Device;
use serde_json::json;

use crate::data::RunData;
use crate::recipe::Weights;
use crate::run_folder::RunFolder;
use crate::sharded_save::Values;
use crate::{Recipe, Result, files};

const GENERATION: &str = "generation_config.json";

/// What an export has besides the model.
#[derive(Clone, Debug, Default)]
pub struct Companions {
    /// The tokenizer, when it is known.
    pub tokenizer: Option<Tokenizer>,
    /// The template of the conversations that the model was trained on.
    pub chat: Option<ChatTemplate>,
    /// The checkpoint that the model was initialized from: its tokenizer files, chat template and generation settings
    /// are copied where its tokenizer is the same.
    pub init: Option<PathBuf>,
}

impl Companions {
    /// Those of a run. Data or an initial checkpoint that were moved away since are left out.
    pub fn of_run(recipe: &Recipe) -> Companions {
        let data = RunData::open(recipe).ok();
        let (tokenizer, chat) = data.map(|data| (data.tokenizer, data.chat)).unwrap_or_default();
        Companions { tokenizer, chat, init: recipe.init_folder().ok().flatten() }
    }

    /// Writes the files into a folder that exists.
    fn write(&self, model: &Model, folder: &Path) -> Result<()> {
        let is_same = |init: &&PathBuf| match (Tokenizer::load(init), &self.tokenizer) {
            (Ok(theirs), Some(ours)) => theirs.identity() == ours.identity(),
            (Ok(_), None) => true,
            (Err(_), _) => false,
        };
        match (self.init.as_ref().filter(is_same), &self.tokenizer) {
            (Some(init), _) => copy_tokenizer_files(init, folder)?,
            (None, Some(tokenizer)) => tokenizer.save(folder)?,
            (None, None) => {}
        }
        let (Some(chat), Some(tokenizer)) = (&self.chat, &self.tokenizer) else { return Ok(()) };
        chat.save(folder)?;
        let path = folder.join(GENERATION);
        if path.exists() {
            return Ok(());
        }
        // Other software ends an answer at these ids only.
        let mut ends: Vec<usize> = model.config().tokens.eos.clone();
        if let [id] = tokenizer.encode_marked(&chat.eos_token)?[..] {
            ends.push(id as usize);
        }
        ends.sort_unstable();
        ends.dedup();
        files::write_json(&path, &json!({ "bos_token_id": tokenizer.bos(), "eos_token_id": ends }))
    }
}

/// Writes a Hugging Face folder, aside first, so that it is there in full or not at all. A folder
/// that holds something already is refused, also when another process wrote it in the meantime.
pub fn export(model: &Model, companions: &Companions, folder: &Path) -> Result<()> {
    let mut values = |id| Ok(model.params().value(id).to_f32()?);
    export_from(model, &mut values, companions, folder)
}

/// [`export`] of a model whose values come from elsewhere.
pub(crate) fn export_from(
    model: &Model,
    values: &mut Values<'_>,
    companions: &Companions,
    folder: &Path,
) -> Result<()> {
    if !durable::is_vacant(folder)? {
        return Err(fox_model::Error::Occupied { path: folder.to_path_buf() }.into());
    }
    let new = NewFolder::create(folder)?;
    model.save_from(new.path(), &WriteOptions::for_model(model.config()), values)?;
    companions.write(model, new.path())?;
    Ok(new.publish()?)
}

/// Writes the newest whole checkpoint of a run as a Hugging Face folder with its tokenizer and returns its
/// step. The weights are those that `weights` or else the recipe's `evaluation.weights` names. The run may be
/// under way: nothing in its folder is changed.
pub fn export_run(run: &Path, to: &Path, weights: Option<Weights>, device: &Device) -> Result<u64> {
    let newest = RunFolder::newest_model(run, weights, device)?;
    export(&newest.model, &Companions::of_run(&RunFolder::recipe(run)?), to)?;
    Ok(newest.step)
}

#[cfg(test)]
mod tests {
    use fox_model::ModelConfig;

    use super::*;

    #[test]
    fn concurrent_exports_leave_one_model() {
        let folder = tempfile::tempdir().unwrap();
        let config = ModelConfig::fox_llama(16, 1, 1).with_vocab(256);
        let tokenizer = Some(Tokenizer::from_name("bytes").unwrap());
        let companions = &Companions { tokenizer, ..Companions::default() };
        let models: Vec<Model> =
            (0..4).map(|seed| Model::init(&config, seed, &Device::naive()).unwrap()).collect();
        for round in 0..5 {
            let out = folder.path().join(round.to_string());
            // A folder of the user with a name that a writer might use.
            let notes = folder.path().join(format!("{round}.partial/notes"));
            durable::create_folder(notes.parent().unwrap()).unwrap();
            durable::write(&notes, b"mine").unwrap();
            let write = |model| export(model, companions, &out);
            let done: Vec<Result<()>> = std::thread::scope(|scope| {
                let threads: Vec<_> =
                    models.iter().map(|m| scope.spawn(move || write(m))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let winners: Vec<usize> = (0..4).filter(|&i| done[i].is_ok()).collect();
            assert_eq!(winners.len(), 1, "{done:?}");
            let alone = folder.path().join(format!("{round}-alone"));
            export(&models[winners[0]], companions, &alone).unwrap();
            let file = |folder: &Path| std::fs::read(folder.join("model.safetensors")).unwrap();
            assert!(file(&out) == file(&alone), "the folder has another model");
            assert_eq!(std::fs::read(&notes).unwrap(), b"mine");
        }
    }
}
