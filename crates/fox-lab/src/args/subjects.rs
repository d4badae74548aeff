//! Model arguments: `PATH` or `NAME=PATH` of a checkpoint or run folder.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use fox_data::{ChatTemplate, Tokenizer};
use fox_eval::Subject;
use fox_infer::GenerationConfig;
use fox_model::{Model, Pruning};
use fox_tensor::Device;
use fox_train::data::RunData;
use fox_train::{Companions, Recipe, RunFolder};

use super::hints;
use super::hub::HubModel;
use crate::output;

/// A model argument that is not opened yet.
#[derive(Clone, Debug, PartialEq)]
pub struct Named {
    /// Name in reports; unique within a command.
    pub name: String,
    path: PathBuf,
}

impl Named {
    /// Parses the models of a command, each `PATH` or `NAME=PATH`. Without a name, a model is named after its folder;
    /// equal folder names get the distinguishing parent folders in parentheses.
    pub fn all(arguments: &[String]) -> Result<Vec<Named>> {
        let parsed: Vec<(Option<&str>, &Path)> = arguments.iter().map(|a| parse(a)).collect();
        let paths: Vec<PathBuf> = parsed
            .iter()
            .filter(|(name, _)| name.is_none())
            .map(|(_, p)| p.to_path_buf())
            .collect();
        let mut from_folders = folder_names(&paths)?.into_iter();
        let mut models: Vec<Named> = Vec::new();
        for (name, path) in parsed {
            let name = match name {
                Some(name) => name.to_string(),
                None => from_folders.next().unwrap_or_default(),
            };
            if models.iter().any(|other| other.name == name) {
                bail!("two models are called {name}; give them other names with NAME=PATH");
            }
            models.push(Named { name, path: path.to_path_buf() });
        }
        Ok(models)
    }

    /// Loads the model.
    pub fn open(&self, device: &Device) -> Result<Opened> {
        let Named { name, path } = self;
        let path = &located(path)?;
        let export = path.join("export");
        let folder = match path.join("config.json").exists() {
            false if export.join("config.json").exists() => export,
            false if RunFolder::is_run(path) => return self.open_unfinished(device),
            false => bail!(hints::no_model(path)),
            true => path.clone(),
        };
        let run = match RunFolder::around(&folder) {
            Some(run) => Some(ModelRun { recipe: RunFolder::recipe(&run)?, folder: run }),
            None => None,
        };
        let model = Model::from_checkpoint(&folder, device)?;
        Ok(Opened { name: name.clone(), folder, model, run })
    }

    /// Loads the newest checkpoint of a run without an export.
    fn open_unfinished(&self, device: &Device) -> Result<Opened> {
        let recipe = RunFolder::recipe(&self.path)?;
        let newest = RunFolder::newest_model(&self.path, None, device)?;
        output::note(&format!(
            "{} is not finished: evaluated after step {} of {}",
            self.path.display(),
            newest.step,
            recipe.steps()
        ));
        Ok(Opened {
            name: format!("{}@{}", self.name, newest.step),
            folder: newest.folder,
            model: newest.model,
            run: Some(ModelRun { folder: self.path.clone(), recipe }),
        })
    }
}

/// The folder that a model argument stands for: of ORG/NAME its folder in the Hugging Face cache, otherwise the path
/// itself.
///
/// # Errors
/// A name of a model that is not in the cache.
pub fn located(path: &Path) -> Result<PathBuf> {
    match path.to_str().and_then(HubModel::parse) {
        None => Ok(path.to_path_buf()),
        Some(model) => model.cached().with_context(|| hints::no_model(path)),
    }
}

/// A loaded model.
pub struct Opened {
    /// Name in reports.
    pub name: String,
    /// The checkpoint's folder.
    pub folder: PathBuf,
    /// The model.
    pub model: Model,
    /// The run that it belongs to.
    pub run: Option<ModelRun>,
}

/// The run of a model.
pub struct ModelRun {
    /// The run folder.
    pub folder: PathBuf,
    /// Its recipe.
    pub recipe: Recipe,
}

impl Opened {
    /// Opens a single `PATH` or `NAME=PATH`: a checkpoint folder or a run folder.
    pub fn new(argument: &str, device: &Device) -> Result<Opened> {
        let mut models = Named::all(&[argument.to_string()])?;
        models.remove(0).open(device)
    }

    /// The subject of evaluations; `training_length` overrides that of the checkpoint.
    pub fn subject(&self, training_length: Option<usize>) -> Subject<'_> {
        let default = self.model.config().max_position_embeddings;
        Subject {
            name: &self.name,
            model: &self.model,
            training_length: Some(training_length.unwrap_or(default)),
        }
    }

    /// Attention pruning, as in the evaluations during training.
    pub fn pruning(&self) -> Pruning {
        self.run.as_ref().map_or(Pruning::Config, |run| run.recipe.forward_options().pruning)
    }

    /// The named tokenizer, or that of the model.
    pub fn tokenizer(&self, name: Option<&str>) -> Result<Tokenizer> {
        if let Some(name) = name {
            return Ok(Tokenizer::from_name(name)?);
        }
        if let Some(task) = self.run.as_ref().and_then(|run| run.recipe.data.task.as_ref()) {
            bail!(
                "{} was trained on the task {}, which has no text; use `fox eval accuracy`",
                self.name,
                task.name
            );
        }
        let stored = Tokenizer::load(&self.folder);
        // A training checkpoint has no tokenizer; the data of its run have one.
        let of_run = || RunData::open(&self.run.as_ref()?.recipe).ok()?.tokenizer;
        match stored {
            Err(error) => {
                of_run().ok_or(error).context("name the model's tokenizer with --tokenizer")
            }
            stored => Ok(stored?),
        }
    }
}

/// Where the results `name` of some models go: the place that was named, the run folder of a single run, or the working
/// folder.
pub fn results_in(named: Option<&Path>, models: &[String], name: &str) -> PathBuf {
    match (named, models) {
        (Some(path), _) => path.to_path_buf(),
        (None, [model]) if RunFolder::is_run(parse(model).1) => parse(model).1.join(name),
        (None, _) => PathBuf::from(name),
    }
}

/// What a checkpoint says about generating with it.
pub struct GenerationFiles {
    /// Its chat template; without a source where it has none.
    pub chat: ChatTemplate,
    /// Its sampling defaults.
    pub config: GenerationConfig,
    /// Ids that end an answer: those of `config.json`, of `generation_config.json` and of the tokenizer.
    pub end_ids: Vec<i32>,
}

impl Opened {
    /// Chat template, sampling defaults and end ids, for text of this tokenizer.
    pub fn generation(&self, tokenizer: &Tokenizer) -> Result<GenerationFiles> {
        let mut chat = ChatTemplate::load(&self.folder, tokenizer)?;
        let mut config = GenerationConfig::load(&self.folder)?;
        // A training checkpoint has weights only; template and settings are those of its run.
        let tuned = self.run.as_ref().map(|run| &run.recipe);
        let tuned = tuned.filter(|r| r.data.messages.is_some() || r.training.init.is_some());
        if let (None, Some(recipe)) = (&chat.source, tuned) {
            let Companions { chat: trained, init, .. } = Companions::of_run(recipe);
            let init = init.filter(|init| init.is_dir());
            chat = match (trained, &init) {
                (Some(trained), _) => trained,
                (None, Some(init)) => ChatTemplate::load(init, tokenizer)?,
                (None, None) => chat,
            };
            if let (Some(init), true) = (init, config == GenerationConfig::default()) {
                config = GenerationConfig::load(&init)?;
            }
        }
        let model = self.model.config();
        let mut end_ids = vec![tokenizer.bos() as i32];
        end_ids.extend(model.tokens.eos.iter().map(|id| *id as i32));
        end_ids.extend(&config.eos);
        if let [id] = tokenizer.encode_marked(&chat.eos_token)?[..] {
            end_ids.push(id as i32);
        }
        end_ids.retain(|id| (*id as usize) < model.vocab_size);
        end_ids.sort_unstable();
        end_ids.dedup();
        Ok(GenerationFiles { chat, config, end_ids })
    }
}

/// Name and path of `PATH` or `NAME=PATH`.
pub(super) fn parse(argument: &str) -> (Option<&str>, &Path) {
    match argument.split_once('=') {
        Some((name, path)) if !name.is_empty() => (Some(name), Path::new(path)),
        _ => (None, Path::new(argument)),
    }
}

/// The distinctive components of a path, the last one first.
fn components(path: &Path) -> Vec<String> {
    const GENERIC: [&str; 4] = ["export", "model", "checkpoint", "checkpoints"];
    let full = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let names = full.iter().rev().filter_map(|part| part.to_str());
    names.filter(|name| !GENERIC.contains(name) && *name != "/").map(String::from).collect()
}

/// The last component of every path; equal ones get the distinguishing parents in parentheses.
fn folder_names(paths: &[PathBuf]) -> Result<Vec<String>> {
    let parts: Vec<Vec<String>> = paths.iter().map(|path| components(path)).collect();
    let last = |i: usize| parts[i].first().map_or("model", String::as_str);
    let mut names = Vec::new();
    for i in 0..parts.len() {
        let same = || (0..parts.len()).filter(move |j| *j != i).filter(|j| last(*j) == last(i));
        if let Some(j) = same().find(|j| parts[*j] == parts[i]) {
            let (a, b) = (paths[i].display(), paths[j].display());
            bail!("{a} and {b} are the same model; give them other names with NAME=PATH");
        }
        let depth = |j: usize| (1..).find(|k| parts[i].get(*k) != parts[j].get(*k)).unwrap_or(1);
        let name = match same().map(depth).max() {
            None => last(i).to_string(),
            Some(depth) => {
                let above: Vec<&str> =
                    parts[i].iter().take(depth + 1).skip(1).rev().map(String::as_str).collect();
                format!("{} ({})", last(i), above.join("/"))
            }
        };
        names.push(name);
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(arguments: &[&str]) -> Result<Vec<String>, String> {
        let arguments: Vec<String> = arguments.iter().map(|a| a.to_string()).collect();
        let models = Named::all(&arguments).map_err(|error| error.to_string())?;
        Ok(models.into_iter().map(|model| model.name).collect())
    }

    #[test]
    fn names_come_from_folders_and_are_unique() {
        let named = |arguments: &[&str]| names(arguments).unwrap();
        assert_eq!(named(&["/runs/tiny/export"]), ["tiny"]);
        assert_eq!(named(&["/a/tiny", "/b/tiny", "/b/other"]), ["tiny (a)", "tiny (b)", "other"]);
        assert_eq!(named(&["/a/x/tiny", "/b/x/tiny"]), ["tiny (a/x)", "tiny (b/x)"]);
        assert_eq!(named(&["mine=/a/tiny", "/b/tiny"]), ["mine", "tiny"]);
        // A path may be the end of another one.
        assert_eq!(named(&["/x/tiny", "/a/x/tiny"]), ["tiny (x)", "tiny (a/x)"]);
        assert_eq!(
            names(&["/a/tiny", "/a/tiny/export"]).unwrap_err(),
            "/a/tiny and /a/tiny/export are the same model; give them other names with NAME=PATH"
        );
        let said = names(&["m=/a/tiny", "m=/b/tiny"]).unwrap_err();
        assert_eq!(said, "two models are called m; give them other names with NAME=PATH");
    }
}
