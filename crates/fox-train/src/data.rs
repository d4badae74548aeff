//! The data of a recipe: what to train on, what to evaluate on, and the tokenizer that belongs to them.

use std::path::Path;
use std::sync::Arc;

use fox_data::task::{TaskConfig, TaskDataset};
use fox_data::{
    ChatTemplate, Dataset, Loader, LoaderConfig, Split, SyntheticDataset, Tokenizer, Verify,
    open_dataset,
};

use crate::evaluate::Evaluator;
use crate::messages::{MessagesDataset, MessagesRecipe};
use crate::{Recipe, Result};

/// The data of a run.
pub struct RunData {
    /// Documents to train on.
    pub train: Arc<dyn Dataset>,
    /// Documents to evaluate on, when there are any.
    pub heldout: Option<Arc<dyn Dataset>>,
    /// The tokenizer, when it is known.
    pub tokenizer: Option<Tokenizer>,
    /// The template of conversations that are trained on.
    pub chat: Option<ChatTemplate>,
}

impl RunData {
    /// Opens what the recipe names: a path, a task, or else the embedded synthetic corpus.
    pub fn open(recipe: &Recipe) -> Result<RunData> {
        if let Some(task) = &recipe.data.task {
            return RunData::task(recipe, task);
        }
        let wanted = recipe.data.tokenizer.as_deref().map(Tokenizer::from_name).transpose()?;
        if let Some(messages) = &recipe.data.messages {
            return RunData::messages(recipe, messages, wanted);
        }
        let Some(path) = &recipe.data.path else {
            return RunData::synthetic(recipe, wanted);
        };
        let open =
            |path: &Path, split| open_dataset(path, split, wanted.as_ref(), Verify::Structure);
        let train = open(path, Split::Train)?;
        let heldout = match &recipe.data.heldout {
            // Held-out data may be a split of a prepared folder, or a separate folder.
            Some(other) => match open(other, Split::HeldOut) {
                Err(fox_data::Error::EmptySplit { .. }) => Some(open(other, Split::Train)?),
                other => Some(other?),
            },
            // A bare array has no held-out split.
            None if path.join(".zarray").exists() => None,
            None => match open(path, Split::HeldOut) {
                Ok(data) => Some(data),
                Err(fox_data::Error::EmptySplit { .. } | fox_data::Error::NotADataset { .. }) => {
                    None
                }
                Err(e) => return Err(e.into()),
            },
        };
        if let (Some(data), Some(other)) = (&heldout, &recipe.data.heldout) {
            check_heldout(recipe, (path, &*train), (other, &**data))?;
        }
        let tokenizer = wanted.or_else(|| tokenizer_of(path, &*train));
        Ok(RunData { train, heldout, tokenizer, chat: None })
    }

    /// The cases of a task. Their tokens are not text, so there is no tokenizer.
    fn task(recipe: &Recipe, task: &TaskConfig) -> Result<RunData> {
        let data = &recipe.data;
        let places = [
            ("data.path", data.path.is_some()),
            ("data.heldout", data.heldout.is_some()),
            ("data.tokenizer", data.tokenizer.is_some()),
        ];
        if let Some((key, _)) = places.iter().find(|(_, given)| *given) {
            let detail = "is set beside data.task, which generates its data; remove one of them";
            return Err(crate::Error::value(&recipe.name, key, detail));
        }
        let heldout = TaskDataset::held_out(task.clone())?;
        Ok(RunData {
            train: Arc::new(TaskDataset::train(task.clone())?),
            heldout: Some(Arc::new(heldout)),
            tokenizer: None,
            chat: None,
        })
    }

    /// Conversations, in the tokens of the recipe's tokenizer or else of the checkpoint that the run begins with.
    fn messages(
        recipe: &Recipe,
        messages: &MessagesRecipe,
        wanted: Option<Tokenizer>,
    ) -> Result<RunData> {
        let of_checkpoint = || {
            let folder = recipe.init_folder().ok().flatten()?;
            Tokenizer::load(&folder).ok()
        };
        let Some(tokenizer) = wanted.or_else(of_checkpoint) else {
            let detail = "is missing; name the tokenizer of data.messages, or begin with a checkpoint that has one";
            return Err(crate::Error::value(&recipe.name, "data.tokenizer", detail));
        };
        let (origin, init) = (&recipe.name, recipe.init_folder()?);
        let chat = messages.chat_template(origin, init.as_deref(), &tokenizer)?;
        let open = |file: &Path, length: usize| -> Result<Arc<dyn Dataset>> {
            let text = (&tokenizer, &chat);
            Ok(Arc::new(MessagesDataset::open(origin, messages, file, text, length)?))
        };
        let length = recipe.data.sequence_length;
        let train = open(&messages.path, length)?;
        let judged = recipe.evaluation.length.unwrap_or(length);
        let heldout = messages.heldout.as_deref().map(|file| open(file, judged)).transpose()?;
        Ok(RunData { train, heldout, tokenizer: Some(tokenizer), chat: Some(chat) })
    }

    fn synthetic(recipe: &Recipe, wanted: Option<Tokenizer>) -> Result<RunData> {
        let config = recipe.data.synthetic;
        let train = Arc::new(SyntheticDataset::new(config));
        let tokenizer = Tokenizer::from_name("synthetic")?;
        if let Some(wanted) = wanted.filter(|w| w.identity() != tokenizer.identity()) {
            return Err(crate::Error::value(
                &recipe.name,
                "data.tokenizer",
                format!(
                    "is {}, but the embedded corpus has its own; give prepared data (data.path)",
                    wanted.identity().name
                ),
            ));
        }
        let heldout = Arc::new(SyntheticDataset::new(config.held_out()));
        Ok(RunData { train, heldout: Some(heldout), tokenizer: Some(tokenizer), chat: None })
    }

    /// The loader of the training data.
    pub fn loader(&self, recipe: &Recipe) -> Result<Loader> {
        let config = LoaderConfig {
            layout: recipe.data.layout,
            order: recipe.data.loader_order(),
            epochs: recipe.data.epochs,
            ..LoaderConfig::new(recipe.data.sequence_length, recipe.training.batch)
        };
        Ok(Loader::new(self.train.clone(), config)?)
    }

    /// Tokens of all training sequences, each once; the remainder that fills no batch is left out.
    pub fn epoch_tokens(&self, recipe: &Recipe) -> Result<u64> {
        Ok(self.loader(recipe)?.batches_per_epoch() * recipe.tokens_per_step())
    }

    /// The evaluation on held-out data, when there are any and the recipe wants it.
    pub fn evaluator(&self, recipe: &Recipe) -> Result<Option<Evaluator>> {
        let Some(data) = self.heldout.clone().filter(|_| recipe.evaluation.sequences > 0) else {
            return Ok(None);
        };
        let length = recipe.evaluation.length.unwrap_or(recipe.data.sequence_length);
        // As many tokens at a time as a part of a training step.
        let rows = recipe.micro_batch() * recipe.data.sequence_length / length;
        Evaluator::new(data, recipe.evaluation.sequences, length, rows).map(Some)
    }
}

/// Held-out data from elsewhere must be of the same tokenizer, and not be what is trained on.
fn check_heldout(
    recipe: &Recipe,
    (path, train): (&Path, &dyn Dataset),
    (other, heldout): (&Path, &dyn Dataset),
) -> Result<()> {
    let (found, expected) = (heldout.tokenizer_identity(), train.tokenizer_identity());
    if found != expected {
        let path = other.to_path_buf();
        return Err(fox_data::Error::WrongTokenizer { path, found, expected }.into());
    }
    // The identity of prepared data is one of their contents; that of an array is only name and shape.
    let same_place = path.canonicalize().ok() == other.canonicalize().ok();
    let by_contents = train.identity().starts_with("prepared");
    if train.identity() == heldout.identity() && (same_place || by_contents) {
        let detail = "has the documents that are trained on; give others, or leave it out for the held-out part of the data";
        return Err(crate::Error::value(&recipe.name, "data.heldout", detail));
    }
    Ok(())
}

/// The tokenizer that lies with prepared data, or the one that the data name.
fn tokenizer_of(path: &Path, data: &dyn Dataset) -> Option<Tokenizer> {
    let identity = data.tokenizer_identity();
    let named = identity.split(':').next().and_then(|name| Tokenizer::from_name(name).ok());
    [Tokenizer::load(path).ok(), named]
        .into_iter()
        .flatten()
        .find(|tokenizer| tokenizer.identity().to_string() == identity)
}

#[cfg(test)]
mod tests {
    use fox_data::MemoryDataset;

    use super::*;

    #[test]
    fn tokenizer_has_the_identity_of_the_data() {
        let bytes = Tokenizer::from_name("bytes").unwrap();
        let found = |identity: &str| {
            let (size, bos) = (bytes.vocab_size(), bytes.bos());
            let data = MemoryDataset::new(vec![vec![1, 2]], size, bos, identity);
            tokenizer_of(Path::new("missing"), &data).map(|t| t.identity().to_string())
        };
        let identity = bytes.identity().to_string();
        assert_eq!(found(&identity), Some(identity));
        assert_eq!(found("bytes:0"), None);
        assert_eq!(found("another"), None);
    }
}
