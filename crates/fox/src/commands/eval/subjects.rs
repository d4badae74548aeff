//! The models of an evaluation, and the text they are evaluated on.

use std::io::{IsTerminal, stderr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use fox_data::{
    Corpus, CorpusOptions, Dataset, MemoryDataset, Split, SyntheticConfig, SyntheticDataset,
    Tokenizer, Verify, open_dataset,
};
use fox_eval::Subject;
use fox_model::Model;
use fox_tensor::Device;
use indicatif::{ProgressBar, ProgressStyle};

/// A checkpoint that was opened.
pub struct Opened {
    /// What reports call it.
    pub name: String,
    /// The checkpoint's folder.
    pub folder: PathBuf,
    /// The model.
    pub model: Model,
    training_length: usize,
}

impl Opened {
    /// Opens `PATH` or `NAME=PATH`: a checkpoint folder, or a run folder with an export in it.
    pub fn new(argument: &str, device: &Device) -> Result<Opened> {
        let (name, folder) = locate(argument);
        let model = Model::from_checkpoint(&folder, device)?;
        let training_length = model.config().max_position_embeddings;
        Ok(Opened { name, folder, model, training_length })
    }

    /// For the evaluation; `training_length` overrules what the checkpoint says.
    pub fn subject(&self, training_length: Option<usize>) -> Subject<'_> {
        Subject {
            name: &self.name,
            model: &self.model,
            training_length: Some(training_length.unwrap_or(self.training_length)),
        }
    }

    /// The tokenizer that was asked for, or the checkpoint's own.
    pub fn tokenizer(&self, asked: Option<&str>) -> Result<Tokenizer> {
        match asked {
            Some(name) => Ok(Tokenizer::from_name(name)?),
            None => {
                Tokenizer::load(&self.folder).context("name the model's tokenizer with --tokenizer")
            }
        }
    }
}

/// Name and checkpoint folder of `PATH` or `NAME=PATH`.
pub fn locate(argument: &str) -> (String, PathBuf) {
    let (name, path) = match argument.split_once('=') {
        Some((name, path)) if !name.is_empty() => (Some(name.to_string()), Path::new(path)),
        _ => (None, Path::new(argument)),
    };
    let export = path.join("export");
    let is_run = !path.join("config.json").exists() && export.join("config.json").exists();
    let folder = if is_run { export } else { path.to_path_buf() };
    (name.unwrap_or_else(|| folder_name(&folder)), folder)
}

/// The last part of a path that says something.
fn folder_name(folder: &Path) -> String {
    let full = folder.canonicalize().unwrap_or_else(|_| folder.to_path_buf());
    let told = full.iter().rev().filter_map(|part| part.to_str());
    let mut told = told.filter(|part| !["export", "model", "checkpoint"].contains(part));
    told.next().unwrap_or("model").to_string()
}

/// The documents at `path`: prepared data, a Zarr array or text; without a path, held-out documents of
/// the embedded corpus.
pub fn documents(
    path: Option<&Path>,
    tokenizer: Result<Tokenizer>,
    length: usize,
    count: u64,
) -> Result<Arc<dyn Dataset>> {
    let Some(path) = path else {
        let config = SyntheticConfig { document_len: length as u64, ..SyntheticConfig::default() };
        let data = SyntheticDataset::new(config.held_out());
        if let Ok(own) = tokenizer
            && own.identity().to_string() != data.tokenizer_identity()
        {
            bail!(
                "the model has a tokenizer of its own; give it text or prepared data with --data"
            );
        }
        return Ok(Arc::new(data));
    };
    let as_tokens = open_dataset(path, Split::HeldOut, tokenizer.as_ref().ok(), Verify::Structure);
    match as_tokens {
        Err(fox_data::Error::NotADataset { .. }) => {}
        other => return Ok(other?),
    }
    let tokenizer = tokenizer?;
    let mut documents = Vec::new();
    for document in Corpus::open(path, CorpusOptions::default())?.documents() {
        let ids = tokenizer.encode(&document?.text)?;
        // Only what will be looked at stays in memory.
        if ids.len() >= length {
            documents.push(ids[..length].to_vec());
        } else {
            documents.push(ids);
        }
        if documents.iter().filter(|d| d.len() >= length).count() as u64 >= count {
            break;
        }
    }
    let (vocab, bos, identity) =
        (tokenizer.vocab_size(), tokenizer.bos(), tokenizer.identity().to_string());
    Ok(Arc::new(MemoryDataset::new(documents, vocab, bos, identity)))
}

/// All text at `path`, document after document.
pub fn text(path: &Path) -> Result<String> {
    let mut text = String::new();
    for document in Corpus::open(path, CorpusOptions::default())?.documents() {
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(&document?.text);
    }
    Ok(text)
}

/// A bar on a terminal, nothing elsewhere.
pub fn bar(name: &str, total: u64) -> ProgressBar {
    if !stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:24} {pos}/{len}  {msg}  ETA {eta}");
    let bar = ProgressBar::new(total);
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_message(name.to_string());
    bar
}
