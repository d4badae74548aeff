//! The folder of a run, and whether it is this run's.
//!
//! ```text
//! config.toml     the whole recipe, every default written out
//! run.json        versions, commands, device, data
//! metrics.jsonl   tensorboard/   checkpoints/   export/   summary.json
//! data/           text that was prepared for this run alone, and input.txt, where it came through a pipe
//! ```
//!
//! A folder belongs to a run when everything that decides its numbers is the same: model, data, portions,
//! optimizer and schedule. How often it is watched and kept may change from start to start; a finished run may be
//! extended.

use std::fs;
use std::path::{Path, PathBuf};

use fox_base::{FolderLock, durable};
use fox_model::Model;
use fox_tensor::Device;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::checkpoint::CheckpointStore;
use crate::data::RunData;
use crate::recipe::Weights;
use crate::{Error, Recipe, Result, Summary, files, recipe, run_paths};

const CONFIG: &str = "config.toml";
const INFO: &str = "run.json";
const LOCK: &str = "run.lock";
/// Text that was prepared for this run alone.
const DATA: &str = "data";
/// Text that came through the standard input.
const INPUT: &str = "input.txt";

/// The Hugging Face folder in a run folder.
pub(crate) const EXPORT: &str = "export";

/// What decides the numbers of a run. Paths are not part of it: the data have an identity.
const DECISIVE: [&str; 5] = ["model", "data", "training", "optimizer", "schedule"];
const PLACES: [&str; 2] = ["path", "heldout"];

/// Versions, commands and data of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunInfo {
    /// Name or file of the recipe.
    pub recipe: String,
    /// What the training data are.
    pub data: String,
    /// Which tokenizer made them.
    pub tokenizer: String,
    /// Number of parameters.
    pub parameters: usize,
    /// Every start of the run.
    pub starts: Vec<StartInfo>,
}

/// One start of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StartInfo {
    /// Version of the program.
    pub version: String,
    /// The command line.
    pub command: Vec<String>,
    /// Where it computes.
    pub device: String,
    /// Processes that work together; gradients are added in the order of a binary tree over them.
    #[serde(default = "one")]
    pub processes: usize,
    /// Bytes per second that each of several processes sends when all exchange tensors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<f64>,
    /// How tensors travel between processes, and where they are added.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exchange: Option<String>,
    /// Operating system and architecture.
    pub system: String,
    /// The step it resumes from.
    pub from_step: u64,
    /// Seconds since 1970.
    pub time: f64,
}

/// The newest checkpoint of a run.
#[derive(Debug)]
pub struct NewestCheckpoint {
    /// Steps done.
    pub step: u64,
    /// The Hugging Face folder of its weights.
    pub folder: PathBuf,
    /// The model, with the weights asked for.
    pub model: Model,
}

/// Runs from before there were several.
fn one() -> usize {
    1
}

/// A run folder that this process alone writes to.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    _lock: FolderLock,
}

impl RunFolder {
    /// Creates the folder, or opens it when it holds the same run. Nothing of another run is touched.
    pub fn open(path: &Path, recipe: &Recipe, data: &str) -> Result<RunFolder> {
        let config = path.join(CONFIG);
        Self::check(path, recipe, Some(data))?;
        durable::create_folder(path)?;
        let lock = FolderLock::take(&path.join(LOCK))?
            .map_err(|_| Error::Locked { path: path.to_path_buf() })?;
        // Another run may have come and gone before the lock was had.
        Self::check(path, recipe, Some(data))?;
        let mut text = run_paths::stored(recipe, path).to_toml()?;
        if lacks_gate_init(&config) && !CheckpointStore::of_run(path, recipe).steps()?.is_empty() {
            // Stays without the key, so that the same command resumes it again.
            let lines = text.split_inclusive('\n').filter(|line| !line.starts_with("gate_init = "));
            text = lines.collect();
        }
        if fs::read(&config).ok().as_deref() != Some(text.as_bytes()) {
            durable::write(&config, text.as_bytes())?;
        }
        Ok(RunFolder { path: path.to_path_buf(), _lock: lock })
    }

    /// Whether a run of this recipe would go on here (true) or begin (false). Nothing is changed. `data` names what it
    /// is trained on, where that is known.
    ///
    /// # Errors
    /// A folder that holds another run, or something else.
    pub fn check(path: &Path, recipe: &Recipe, data: Option<&str>) -> Result<bool> {
        let config = path.join(CONFIG);
        match config.exists() {
            true => compare(path, &config, &recipe.to_toml()?, data, false)?,
            false => check_beginning(path)?,
        }
        Ok(config.exists())
    }

    /// Gives a recipe with fewer tokens than its file the warm-up of that file, where the folder holds a run of it: before
    /// version 0.1, a shorter run did not have a shorter warm-up, and the same command must resume it.
    ///
    /// # Errors
    /// A run folder or a recipe that cannot be read.
    pub fn keep_older_warmup(path: &Path, recipe: &mut Recipe) -> Result<()> {
        if !Self::is_run(path) {
            return Ok(());
        }
        let (there, full) = (Self::recipe(path)?, recipe::load(&recipe.name, &[])?);
        let warmup = there.schedule.warmup_tokens;
        let shorter = recipe.training.tokens < full.training.tokens
            && recipe.training.tokens == there.training.tokens;
        if shorter && warmup == full.schedule.warmup_tokens {
            recipe.schedule.warmup_tokens = warmup;
        }
        Ok(())
    }

    /// Gives a finished run the tokens of a recipe that has more of them and is the same otherwise, so that it resumes. A
    /// longer run from the beginning has other bits, so experiments do not use this. Other folders stay as they are.
    ///
    /// # Errors
    /// A finished run that differs in something else, or that another process trains.
    pub fn extend(path: &Path, recipe: &Recipe) -> Result<()> {
        let config = path.join(CONFIG);
        if !config.exists() || Summary::read(path)?.is_none_or(|run| !run.finished) {
            return Ok(());
        }
        if Self::recipe(path)?.training.tokens >= recipe.training.tokens {
            return Ok(());
        }
        let _lock = FolderLock::take(&path.join(LOCK))?
            .map_err(|_| Error::Locked { path: path.to_path_buf() })?;
        let data = RunData::open(recipe)?.train.identity();
        compare(path, &config, &recipe.to_toml()?, Some(&data), true)?;
        let text = run_paths::stored(recipe, path).to_toml()?;
        Ok(durable::write(&config, text.as_bytes())?)
    }

    /// Whether a folder may get the text of a run before the run itself is compared with the existing one.
    ///
    /// # Errors
    /// A folder that holds something else, or a run that was not started from a text.
    pub fn check_for_text(path: &Path) -> Result<()> {
        if !path.join(CONFIG).exists() {
            return check_beginning(path);
        }
        let data = Self::recipe(path)?.data.path;
        if path.join(DATA).exists() || data.is_some_and(|data| data.ends_with(DATA)) {
            return Ok(());
        }
        let detail = "it was not started from a text".to_string();
        Err(Error::DifferentRun { path: path.to_path_buf(), detail })
    }

    /// The recipe of a run folder.
    pub fn recipe(path: &Path) -> Result<Recipe> {
        let config = path.join(CONFIG);
        if !config.exists() {
            return Err(Error::NoRun { path: path.to_path_buf() });
        }
        let mut recipe = recipe::load(&config.to_string_lossy(), &[])?;
        run_paths::locate(&mut recipe, path);
        Ok(recipe)
    }

    /// Whether a run in this folder has a checkpoint, so that its data must stay what they are.
    pub fn has_checkpoint(path: &Path) -> bool {
        Self::newest_folder(path).is_ok()
    }

    /// The checkpoint folder that a path stands for: the export of a run folder, its newest checkpoint while it has
    /// none, and any other path itself.
    ///
    /// # Errors
    /// A run without a checkpoint.
    pub fn model_folder(path: &Path) -> Result<PathBuf> {
        match (Self::is_run(path), path.join(EXPORT)) {
            (true, export) if export.is_dir() => Ok(export),
            (true, _) => Self::newest_folder(path),
            (false, _) => Ok(path.to_path_buf()),
        }
    }

    /// What is known about a run and its starts.
    pub fn info(path: &Path) -> Result<RunInfo> {
        files::read_json(&path.join(INFO))
    }

    /// Whether a folder holds a run.
    pub fn is_run(path: &Path) -> bool {
        path.join(CONFIG).is_file() && path.join(INFO).is_file()
    }

    /// The run folder that a checkpoint's folder lies in, if it does: `RUN/export`, or
    /// `RUN/checkpoints/step-NUMBER/model`.
    pub fn around(checkpoint: &Path) -> Option<PathBuf> {
        let full = checkpoint.canonicalize().ok()?;
        full.ancestors().take(4).find(|folder| Self::is_run(folder)).map(Path::to_path_buf)
    }

    /// The model of the newest whole checkpoint, with the weights that `weights` or else the recipe's
    /// `evaluation.weights` names. The run may be under way: nothing in its folder is changed.
    ///
    /// # Errors
    /// A folder without a run or a checkpoint, a run without the average that is asked for.
    pub fn newest_model(
        path: &Path,
        weights: Option<Weights>,
        device: &Device,
    ) -> Result<NewestCheckpoint> {
        let recipe = Self::recipe(path)?;
        let weights = weights.unwrap_or(recipe.evaluation.weights);
        if weights == Weights::Ema && recipe.training.ema.is_none() {
            return Err(Error::NoAverage { path: path.to_path_buf() });
        }
        let store = CheckpointStore::of_run(path, &recipe);
        let step = store.newest_whole()?;
        let model = store.model(step, weights, device)?;
        Ok(NewestCheckpoint { step, folder: store.path(step).join("model"), model })
    }

    /// The Hugging Face folder of the newest whole checkpoint of a run.
    pub(crate) fn newest_folder(path: &Path) -> Result<PathBuf> {
        let store = CheckpointStore::of_run(path, &Self::recipe(path)?);
        Ok(store.path(store.newest_whole()?).join("model"))
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the export and the summary of a run that is about to get more tokens. Its checkpoints stay.
    pub(crate) fn reopen(&self) -> Result<()> {
        let export = self.path.join(EXPORT);
        if export.exists() {
            fs::remove_dir_all(&export).map_err(Error::io("remove", &export))?;
        }
        Summary::remove(&self.path)
    }

    /// Appends a start to run.json. A damaged file is renamed to run.json.damaged; returns a notice about it.
    pub(crate) fn note_start(&self, mut info: RunInfo) -> Result<Option<String>> {
        let path = self.path.join(INFO);
        let mut notice = None;
        if path.exists() {
            match files::read_json::<RunInfo>(&path) {
                Ok(mut earlier) => {
                    earlier.starts.append(&mut info.starts);
                    info.starts = earlier.starts;
                }
                Err(damage) => {
                    let aside = path.with_extension("json.damaged");
                    fs::rename(&path, &aside).map_err(Error::io("rename", &path))?;
                    notice = Some(format!("{damage}; it was renamed to {}", aside.display()));
                }
            }
        }
        files::write_json(&path, &info)?;
        Ok(notice)
    }

    /// Checks that the folder is where it was when the run started.
    ///
    /// # Errors
    /// A folder that was moved or removed.
    pub(crate) fn check_present(&self) -> Result<()> {
        match self.path.join(CONFIG).is_file() {
            true => Ok(()),
            false => Err(Error::FolderMoved { path: self.path.clone() }),
        }
    }
}

/// The figures of a run that is over; `None` when there is no run in the folder or it is not finished.
///
/// # Errors
/// A folder that holds another run than the recipe's on the recipe's data.
pub fn finished_run(path: &Path, recipe: &Recipe) -> Result<Option<Summary>> {
    let config = path.join(CONFIG);
    if !config.exists() {
        return Ok(None);
    }
    let data = RunData::open(recipe)?.train.identity();
    compare(path, &config, &recipe.to_toml()?, Some(&data), false)?;
    Ok(Summary::read(path)?.filter(|run| run.finished && run.steps >= recipe.steps()))
}

/// Refuses a folder in which there is more than the beginning of a run.
fn check_beginning(path: &Path) -> Result<()> {
    match path.is_file() || durable::entries(path)?.iter().any(|entry| !is_our_beginning(entry)) {
        true => Err(Error::NotARun { path: path.to_path_buf() }),
        false => Ok(()),
    }
}

/// Files that exist before a run starts: its text, and the remains of a start that was killed early.
fn is_our_beginning(entry: &Path) -> bool {
    let named = |name: &str| entry.with_file_name(name);
    match durable::final_path(entry) {
        Some(path) => [CONFIG, INPUT].map(named).contains(&path),
        None => [LOCK, DATA, INPUT].map(named).iter().any(|path| path == entry),
    }
}

/// Refuses a folder with a run of another recipe (`text`) or of other data. With `longer`, the recipe may have more tokens.
fn compare(path: &Path, config: &Path, text: &str, data: Option<&str>, longer: bool) -> Result<()> {
    let different = |detail: String| Error::DifferentRun { path: path.to_path_buf(), detail };
    let parse = |text: &str| {
        text.parse::<Table>().map_err(|e| Error::Toml {
            file: config.to_path_buf(),
            detail: e.message().to_string(),
        })
    };
    // Read as a recipe, so that keys which are younger than the folder have their defaults on both sides.
    let there = parse(&recipe::load(&config.to_string_lossy(), &[])?.to_toml()?)?;
    let mut here = parse(text)?;
    if lacks_gate_init(config)
        && let Some(Value::Table(training)) = here.get_mut("training")
        && training.get("gate_init").is_some_and(Value::is_str)
    {
        training.insert("gate_init".into(), "published".into());
    }
    if longer {
        // The warm-up of a finished run is over.
        for (section, key) in [("training", "tokens"), ("schedule", "warmup_tokens")] {
            let value = there.get(section).and_then(|section| section.get(key)).cloned();
            if let (Some(Value::Table(section)), Some(value)) = (here.get_mut(section), value) {
                section.insert(key.into(), value);
            }
        }
    }
    for section in DECISIVE {
        if let Some(detail) = difference(section, there.get(section), here.get(section)) {
            return Err(different(detail));
        }
    }
    // A missing or damaged run.json does not block a run: its checkpoints know their data too.
    let info = files::read_json::<RunInfo>(&path.join(INFO)).ok();
    match (info, data) {
        (Some(info), Some(data)) if info.data != data => {
            Err(different(format!("its data are \"{}\", these are \"{data}\"", info.data)))
        }
        _ => Ok(()),
    }
}

/// Whether a config.toml is older than `training.gate_init`: its gates started as published, whatever the default of
/// its recipe is today.
fn lacks_gate_init(config: &Path) -> bool {
    let table = fs::read_to_string(config).ok().and_then(|text| text.parse::<Table>().ok());
    let training = table.as_ref().and_then(|table| table.get("training")?.as_table());
    training
        .is_some_and(|keys| !keys.contains_key("gate_init") && !keys.contains_key("gate_memory"))
}

/// The first key that differs, in words.
fn difference(key: &str, there: Option<&Value>, here: Option<&Value>) -> Option<String> {
    if let (Some(Value::Table(there)), Some(Value::Table(here))) = (there, here) {
        let mut names: Vec<&String> = there.keys().chain(here.keys()).collect();
        names.sort();
        return names
            .into_iter()
            .filter(|name| !key.starts_with("data") || !PLACES.contains(&name.as_str()))
            .find_map(|name| {
                difference(&format!("{key}.{name}"), there.get(name), here.get(name))
            });
    }
    let show = |value: Option<&Value>| value.map_or("not set".to_string(), Value::to_string);
    (there != here).then(|| format!("{key} is {} there and {} here", show(there), show(here)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_places_of_data_may_differ() {
        let table = |text: &str| Value::Table(text.parse().unwrap());
        let differ = |key: &str, there: &str, here: &str| {
            difference(key, Some(&table(there)), Some(&table(here)))
        };
        assert_eq!(differ("data", "path = 'a'\nheldout = 'b'", "path = 'c'"), None);
        let found = differ("data", "path = 'a'\nstride = 1", "path = 'b'\nstride = 2");
        assert_eq!(found.as_deref(), Some("data.stride is 1 there and 2 here"));
        let found = differ("other", "path = 'a'", "path = 'b'");
        assert_eq!(found.as_deref(), Some("other.path is \"a\" there and \"b\" here"));
    }
}
