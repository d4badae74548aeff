//! Evaluation data: the held-out documents of a run, or data that the user names.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, anyhow, bail};
use fox_data::{
    Corpus, CorpusOptions, Dataset, DocumentChunk, DocumentChunks, MemoryDataset, Split,
    SyntheticConfig, SyntheticDataset, Tokenizer, Verify, open_dataset,
};
use fox_train::data::RunData;
use fox_train::{Recipe, RunFolder};

use super::subjects::Opened;

/// Held-out documents for a model: those at `path`, or those of its run; without either, documents of the embedded
/// corpus. `path` is prepared data, a Zarr array, text, or a run folder, whose data are used.
pub fn documents(
    path: Option<&Path>,
    opened: &Opened,
    tokenizer: Result<Tokenizer>,
    length: usize,
    count: u64,
) -> Result<Arc<dyn Dataset>> {
    documents_of(Split::HeldOut, path, opened, tokenizer, length, count)
}

/// The same for either split.
pub fn documents_of(
    split: Split,
    path: Option<&Path>,
    opened: &Opened,
    tokenizer: Result<Tokenizer>,
    length: usize,
    count: u64,
) -> Result<Arc<dyn Dataset>> {
    match (path, &opened.run) {
        (Some(path), _) if RunFolder::is_run(path) => {
            of_run(split, &RunFolder::recipe(path)?, path, length)
        }
        (Some(path), _) => at(split, path, tokenizer, length, count),
        (None, Some(run)) => of_run(split, &run.recipe, &run.folder, length),
        (None, None) => {
            let data = synthetic(split, SyntheticConfig::default(), length);
            if tokenizer.is_ok_and(|t| t.identity().to_string() != data.tokenizer_identity()) {
                bail!(
                    "the model has another tokenizer than the embedded corpus; give text or prepared data with --data"
                );
            }
            Ok(Arc::new(data))
        }
    }
}

/// The configuration of the embedded corpus that a model was trained on, if it was.
pub fn synthetic_config(opened: &Opened, tokenizer: &Tokenizer) -> Option<SyntheticConfig> {
    match &opened.run {
        Some(run) => run.recipe.data.is_synthetic().then_some(run.recipe.data.synthetic),
        None => matches!(tokenizer, Tokenizer::Synthetic(_)).then(SyntheticConfig::default),
    }
}

/// Whether a model has default evaluation data: that of its run, or the embedded corpus.
pub fn has_own(opened: &Opened, tokenizer: &Tokenizer) -> bool {
    opened.run.is_some() || matches!(tokenizer, Tokenizer::Synthetic(_))
}

/// The first `length` tokens of the first held-out document that has them, else all of the longest.
pub fn first_tokens(data: &dyn Dataset, length: usize) -> Result<Vec<u32>> {
    let length = length.min(data.lengths().longest() as usize);
    let Some(DocumentChunk { document, .. }) = DocumentChunks::new(data.lengths(), length).next()
    else {
        bail!("the held-out data are empty; name other data");
    };
    let mut ids = vec![0; length];
    data.read(document, 0, &mut ids)?;
    Ok(ids)
}

/// About `tokens` tokens of held-out documents as text.
pub fn text_of(data: &dyn Dataset, tokenizer: &Tokenizer, tokens: u64) -> Result<String> {
    let mut text = String::new();
    let (mut document, mut read) = (0, 0);
    while let Some(len) = data.lengths().len_of(document).filter(|_| read < tokens) {
        let mut ids = vec![0; len.min(tokens - read) as usize];
        data.read(document, 0, &mut ids)?;
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(&tokenizer.decode(&ids)?);
        read += ids.len() as u64;
        document += 1;
    }
    Ok(text)
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

/// The data of a run.
fn of_run(split: Split, recipe: &Recipe, folder: &Path, length: usize) -> Result<Arc<dyn Dataset>> {
    if recipe.data.is_synthetic() {
        return Ok(Arc::new(synthetic(split, recipe.data.synthetic, length)));
    }
    let run = folder.display();
    if let Some(task) = &recipe.data.task {
        bail!(
            "{run} was trained on the task {}, which has no text; use `fox eval accuracy`",
            task.name
        );
    }
    let data = RunData::open(recipe)
        .map_err(|e| anyhow!("the data of {run} cannot be read: {e}; name them with --data"))?;
    match split {
        Split::Train => Ok(data.train),
        Split::HeldOut => {
            data.heldout.ok_or_else(|| anyhow!("{run} has no held-out data; name some with --data"))
        }
    }
}

/// Documents of the embedded corpus with at least `length` tokens.
fn synthetic(split: Split, config: SyntheticConfig, length: usize) -> SyntheticDataset {
    let document_len = config.document_len.max(length as u64);
    let config = SyntheticConfig { document_len, ..config };
    SyntheticDataset::new(match split {
        Split::Train => config,
        Split::HeldOut => config.held_out(),
    })
}

/// The documents at `path`: prepared data, a Zarr array or text.
fn at(
    split: Split,
    path: &Path,
    tokenizer: Result<Tokenizer>,
    length: usize,
    count: u64,
) -> Result<Arc<dyn Dataset>> {
    let as_tokens = open_dataset(path, split, tokenizer.as_ref().ok(), Verify::Structure);
    match as_tokens {
        Err(fox_data::Error::NotADataset { .. }) if split == Split::Train => bail!(
            "{} has no training split; --split train is for prepared data and runs",
            path.display()
        ),
        Err(fox_data::Error::NotADataset { .. }) => {}
        other => return Ok(other?),
    }
    let tokenizer = tokenizer?;
    let mut documents: Vec<Vec<u32>> = Vec::new();
    let mut long_enough = 0;
    for document in Corpus::open(path, CorpusOptions::default())?.documents() {
        let ids = tokenizer.encode(&document?.text)?;
        long_enough += u64::from(ids.len() >= length);
        documents.push(ids);
        // Only the first `length` tokens of these documents are used.
        if long_enough >= count {
            documents.iter_mut().for_each(|ids| ids.truncate(length));
            break;
        }
    }
    let (vocab, bos, identity) =
        (tokenizer.vocab_size(), tokenizer.bos(), tokenizer.identity().to_string());
    Ok(Arc::new(MemoryDataset::new(documents, vocab, bos, identity)))
}
