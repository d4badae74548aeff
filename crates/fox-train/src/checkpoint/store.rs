//! The folder of checkpoints: writing, finding the newest good one, keeping the right ones.

use std::fs;
use std::path::{Path, PathBuf};

use fox_model::{Model, WriteOptions};
use fox_tensor::Device;

use super::{RunState, manifest, moments};
use crate::optimizer::{Optimizer, OptimizerSettings};
use crate::recipe::CheckpointRecipe;
use crate::{Error, Result, files};

const PREFIX: &str = "step-";
const PARTIAL: &str = ".partial";
const DAMAGED: &str = ".damaged";
const MODEL: &str = "model";
const MOMENTS: &str = "optimizer.safetensors";
const STATE: &str = "state.json";

/// The checkpoints of a run.
#[derive(Debug)]
pub struct CheckpointStore {
    folder: PathBuf,
    keep: CheckpointRecipe,
}

/// A run as a checkpoint holds it.
#[derive(Debug)]
pub struct Resumed {
    /// The weights.
    pub model: Model,
    /// The moments.
    pub optimizer: Optimizer,
    /// The counters.
    pub state: RunState,
    /// One line for each newer checkpoint that could not be used.
    pub notices: Vec<String>,
}

impl CheckpointStore {
    /// The checkpoints in `folder`. Nothing is read or written yet.
    pub fn new(folder: PathBuf, keep: CheckpointRecipe) -> CheckpointStore {
        CheckpointStore { folder, keep }
    }

    /// Steps of all checkpoints, ascending.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let mut steps: Vec<u64> =
            files::names(&self.folder)?.iter().filter_map(|path| step_of(path)).collect();
        steps.sort_unstable();
        Ok(steps)
    }

    /// The folder of a step.
    pub fn path(&self, step: u64) -> PathBuf {
        self.folder.join(format!("{PREFIX}{step:08}"))
    }

    /// The Hugging Face folder of a step.
    pub fn model_path(&self, step: u64) -> PathBuf {
        self.path(step).join(MODEL)
    }

    /// The step of the newest checkpoint that is whole. Nothing is changed.
    pub fn newest_whole(&self) -> Result<u64> {
        let steps = self.steps()?;
        let newest = steps.iter().rev().find(|step| manifest::verify(&self.path(**step)).is_ok());
        newest.copied().ok_or_else(|| Error::NoCheckpoint { path: self.folder.clone() })
    }

    /// Writes a checkpoint, then removes those that need not be kept.
    ///
    /// When it fails, what was there before is still there.
    pub fn write(&self, model: &Model, optimizer: &Optimizer, state: &RunState) -> Result<PathBuf> {
        let last = self.steps()?.last().copied();
        if last == Some(state.step) {
            return Ok(self.path(state.step));
        }
        let partial = self.folder.join(format!("{PREFIX}{:08}{PARTIAL}", state.step));
        let written = self.write_aside(&partial, model, optimizer, state);
        if let Err(cause) = written {
            // The space is needed more than the pieces; the first error is the one to report.
            let _ = fs::remove_dir_all(&partial);
            return Err(Error::CheckpointWrite { step: state.step, cause: Box::new(cause), last });
        }
        self.retain()?;
        Ok(self.path(state.step))
    }

    fn write_aside(
        &self,
        partial: &Path,
        model: &Model,
        optimizer: &Optimizer,
        state: &RunState,
    ) -> Result<()> {
        files::create_folder(&self.folder)?;
        if partial.exists() {
            fs::remove_dir_all(partial).map_err(Error::io("remove", partial))?;
        }
        fs::create_dir(partial).map_err(Error::io("create", partial))?;
        model.save(&partial.join(MODEL), &WriteOptions::for_model(model.config()))?;
        moments::write(&partial.join(MOMENTS), model, optimizer)?;
        files::write_json(&partial.join(STATE), state)?;
        manifest::write(partial)?;
        files::sync_folder(partial)?;
        let finished = self.path(state.step);
        fs::rename(partial, &finished).map_err(Error::io("rename", partial))?;
        files::sync_folder(&self.folder)
    }

    /// The newest checkpoint that is whole; `None` when there is none at all.
    ///
    /// Damaged ones are set aside under another name and reported; pieces of unfinished ones are
    /// removed.
    pub fn resume(&self, settings: OptimizerSettings, device: &Device) -> Result<Option<Resumed>> {
        for path in files::names(&self.folder)? {
            if path.to_string_lossy().ends_with(PARTIAL) {
                fs::remove_dir_all(&path).map_err(Error::io("remove", &path))?;
            }
        }
        let mut problems: Vec<(u64, String)> = Vec::new();
        for step in self.steps()?.into_iter().rev() {
            match self.read(step, settings, device) {
                Ok((model, optimizer, state)) => {
                    self.set_aside(&problems)?;
                    let notices = problems.into_iter().map(|(_, why)| {
                        format!("{why}; going on from the checkpoint of step {step}")
                    });
                    return Ok(Some(Resumed {
                        model,
                        optimizer,
                        state,
                        notices: notices.collect(),
                    }));
                }
                Err(e) => problems
                    .push((step, format!("the checkpoint of step {step} cannot be used: {e}"))),
            }
        }
        match problems.into_iter().next() {
            None => Ok(None),
            Some((_, detail)) => Err(Error::NoGoodCheckpoint { path: self.folder.clone(), detail }),
        }
    }

    fn read(
        &self,
        step: u64,
        settings: OptimizerSettings,
        device: &Device,
    ) -> Result<(Model, Optimizer, RunState)> {
        let folder = self.path(step);
        manifest::verify(&folder)?;
        let state_file = folder.join(STATE);
        let state: RunState = files::read_json(&state_file)?;
        if state.version != RunState::VERSION {
            let detail = format!(
                "it has version {}, this program reads {}",
                state.version,
                RunState::VERSION
            );
            return Err(Error::Damaged { path: state_file, detail });
        }
        let model = Model::from_checkpoint(&folder.join(MODEL), device)?;
        let mut optimizer = Optimizer::new(settings, model.params(), device)?;
        moments::read(&folder.join(MOMENTS), &model, &mut optimizer)?;
        optimizer.restore_updates(state.updates);
        Ok((model, optimizer, state))
    }

    /// Renames damaged checkpoints, so that their steps can be written again.
    fn set_aside(&self, problems: &[(u64, String)]) -> Result<()> {
        for (step, _) in problems {
            let from = self.path(*step);
            let to = self.folder.join(format!("{PREFIX}{step:08}{DAMAGED}"));
            if to.exists() {
                fs::remove_dir_all(&to).map_err(Error::io("remove", &to))?;
            }
            fs::rename(&from, &to).map_err(Error::io("rename", &from))?;
        }
        Ok(())
    }

    /// Removes all but the newest `keep` and those of every `keep_every`-th step.
    fn retain(&self) -> Result<()> {
        let steps = self.steps()?;
        let newest = steps.len().saturating_sub(self.keep.keep);
        let forever =
            |step: u64| self.keep.keep_every > 0 && step.is_multiple_of(self.keep.keep_every);
        for step in steps[..newest].iter().filter(|step| !forever(**step)) {
            let from = self.path(*step);
            // Renamed first: a folder `step-*` must never be half removed.
            let partial = self.folder.join(format!("{PREFIX}{step:08}{PARTIAL}"));
            fs::rename(&from, &partial).map_err(Error::io("rename", &from))?;
            fs::remove_dir_all(&partial).map_err(Error::io("remove", &partial))?;
        }
        Ok(())
    }
}

/// The step of a finished checkpoint's folder.
fn step_of(path: &Path) -> Option<u64> {
    path.file_name()?.to_str()?.strip_prefix(PREFIX)?.parse().ok()
}
