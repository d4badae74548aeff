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
/// that holds something already is refused, also when another process wrote it in the meantime.
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

#[cfg(test)]
mod tests {
    use fox_model::ModelConfig;

    use super::*;

    #[test]
    fn concurrent_exports_leave_one_model() {
        let folder = tempfile::tempdir().unwrap();
        let mut config = ModelConfig::fox_llama(16, 1, 1);
        config.vocab_size = 256;
        let tokenizer = Tokenizer::from_name("bytes").unwrap();
        let models: Vec<Model> =
            (0..4).map(|seed| Model::init(&config, seed, &Device::naive()).unwrap()).collect();
        for round in 0..5 {
            let out = folder.path().join(round.to_string());
            // A folder of the user with a name that a writer might use.
            let notes = folder.path().join(format!("{round}.partial/notes"));
            durable::create_folder(notes.parent().unwrap()).unwrap();
            durable::write(&notes, b"mine").unwrap();
            let write = |model| export(model, Some(&tokenizer), &out);
            let done: Vec<Result<()>> = std::thread::scope(|scope| {
                let threads: Vec<_> =
                    models.iter().map(|m| scope.spawn(move || write(m))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let winners: Vec<usize> = (0..4).filter(|&i| done[i].is_ok()).collect();
            assert_eq!(winners.len(), 1, "{done:?}");
            let alone = folder.path().join(format!("{round}-alone"));
            export(&models[winners[0]], None, &alone).unwrap();
            let file = |folder: &Path| std::fs::read(folder.join("model.safetensors")).unwrap();
            assert!(file(&out) == file(&alone), "the folder has another model");
            assert_eq!(std::fs::read(&notes).unwrap(), b"mine");
        }
    }
}
