//! The folder of checkpoints: writing, finding the newest good one, keeping the right ones.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fox_base::durable::{self, NewFolder};
use fox_dist::Group;
use fox_model::{CheckpointReader, Model, WriteOptions};
use fox_tensor::Device;

use super::{RunState, manifest, optimizer_state};
use crate::optimizer::{OptimizerRecipe, Updater};
use crate::recipe::{CheckpointRecipe, Shard, TrainingRecipe, Weights};
use crate::sharded_weights::ResidentParams;
use crate::{Error, Recipe, Result, files, sharded_save, tuning};

const PREFIX: &str = "step-";
const DAMAGED: &str = ".damaged";
const MODEL: &str = "model";
const OPTIMIZER: &str = "optimizer.safetensors";
const STATE: &str = "state.json";

/// The checkpoints of a run.
#[derive(Debug)]
pub struct CheckpointStore {
    folder: PathBuf,
    keep: CheckpointRecipe,
    /// What of the models is trained, and how they change by themselves.
    training: TrainingRecipe,
    shard: Shard,
}

/// A run as a checkpoint holds it.
#[derive(Debug)]
pub struct Resumed {
    /// The weights.
    pub model: Model,
    /// The optimizer with its state.
    pub updater: Updater,
    /// The counters.
    pub state: RunState,
    /// One line for each newer checkpoint that could not be used.
    pub notices: Vec<String>,
}

impl CheckpointStore {
    /// The checkpoints in `folder`. Nothing is read or written yet.
    pub fn new(folder: PathBuf, keep: CheckpointRecipe) -> CheckpointStore {
        let (training, shard) = (TrainingRecipe::default(), Shard::default());
        CheckpointStore { folder, keep, training, shard }
    }

    /// The checkpoints of a run in `folder`, of which only a part may be trained.
    pub fn of_run(folder: &Path, recipe: &Recipe) -> CheckpointStore {
        let (training, shard) = (recipe.training.clone(), recipe.parallel.shard);
        let store = Self::new(folder.join("checkpoints"), recipe.checkpoints);
        CheckpointStore { training, shard, ..store }
    }

    /// Steps of all checkpoints, ascending.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let mut steps: Vec<u64> =
            durable::entries(&self.folder)?.iter().filter_map(|path| step_of(path)).collect();
        steps.sort_unstable();
        Ok(steps)
    }

    /// The folder of a step.
    pub fn path(&self, step: u64) -> PathBuf {
        self.folder.join(format!("{PREFIX}{step:08}"))
    }

    /// The step of the newest checkpoint that is whole. Nothing is changed.
    pub fn newest_whole(&self) -> Result<u64> {
        let steps = self.steps()?;
        let newest = steps.iter().rev().find(|step| manifest::verify(&self.path(**step)).is_ok());
        if let Some(step) = newest {
            return Ok(*step);
        }
        let path = self.folder.clone();
        Err(match steps.last().map(|step| manifest::verify(&self.path(*step))) {
            Some(Err(damage)) => Error::NoGoodCheckpoint { path, detail: damage.to_string() },
            _ => Error::NoCheckpoint { path },
        })
    }

    /// Writes a checkpoint, then removes those that need not be kept.
    ///
    /// When it fails, what was there before is still there. Of several processes, all call this: the first one writes
    /// the weights, each the optimizer's state of the parameters it owns, and the folder gets its name when all are done.
    pub fn write(&self, model: &Model, updater: &Updater, state: &RunState) -> Result<PathBuf> {
        let group = updater.group();
        let last = if group.is_first() { self.steps()?.last().copied() } else { None };
        let last = group.broadcast_value(last)?;
        if last != Some(state.step) {
            let written = self.write_aside(model, updater, state);
            written.map_err(|cause| match cause {
                // Not for want of space: another process has failed, or cannot see the folder.
                Error::Group(_) | Error::NotShared { .. } => cause,
                cause => Error::CheckpointWrite { step: state.step, cause: Box::new(cause), last },
            })?;
            if group.is_first() {
                self.retain()?;
            }
        }
        Ok(self.path(state.step))
    }

    fn write_aside(&self, model: &Model, updater: &Updater, state: &RunState) -> Result<()> {
        let group = updater.group();
        if !group.is_first() {
            // Where the folder is may differ from machine to machine; what it is called does not.
            let name = String::from_utf8_lossy(&group.broadcast(0, &[])?).into_owned();
            let folder = self.folder.join(name);
            if !folder.is_dir() {
                return Err(Error::NotShared { path: folder, rank: group.rank() });
            }
            sharded_save::send_to_first(model, updater)?;
            optimizer_state::write(&folder.join(OPTIMIZER), model, updater)?;
            return Ok(group.barrier()?);
        }
        let new = NewFolder::create(&self.path(state.step))?;
        let folder = new.path();
        optimizer_state::create(&folder.join(OPTIMIZER), model, updater)?;
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        group.broadcast(0, name.as_bytes())?;
        let options = WriteOptions::for_model(model.config());
        sharded_save::at_first(model, updater, |values| {
            Ok(model.save_from(&folder.join(MODEL), &options, values)?)
        })?;
        optimizer_state::write(&folder.join(OPTIMIZER), model, updater)?;
        files::write_json(&folder.join(STATE), state)?;
        group.barrier()?;
        manifest::write(folder)?;
        Ok(new.publish()?)
    }

    /// The newest checkpoint that is whole; `None` when there is none at all.
    ///
    /// Damaged ones are set aside under another name and reported; remains of unfinished ones are
    /// removed.
    pub fn resume(
        &self,
        optimizer: &OptimizerRecipe,
        ema: Option<f64>,
        device: &Device,
    ) -> Result<Option<Resumed>> {
        self.resume_in(optimizer, ema, device, &Arc::new(Group::alone()))
    }

    /// The same for one of several processes: the first one chooses, each reads the state of the parameters it owns.
    pub(crate) fn resume_in(
        &self,
        optimizer: &OptimizerRecipe,
        ema: Option<f64>,
        device: &Device,
        group: &Arc<Group>,
    ) -> Result<Option<Resumed>> {
        if !group.is_first() {
            let step = group.broadcast(0, &[])?;
            let Ok(step) = step.try_into().map(u64::from_le_bytes) else { return Ok(None) };
            let folder = self.path(step);
            if !folder.is_dir() {
                return Err(Error::NotShared { path: folder, rank: group.rank() });
            }
            let (model, updater, state) = self.read(step, optimizer, ema, device, group)?;
            return Ok(Some(Resumed { model, updater, state, notices: Vec::new() }));
        }
        let resumed = self.resume_first(optimizer, ema, device, group)?;
        let step = resumed.as_ref().map(|resumed| resumed.state.step.to_le_bytes());
        group.broadcast(0, step.as_ref().map_or(&[][..], |step| &step[..]))?;
        Ok(resumed)
    }

    fn resume_first(
        &self,
        optimizer: &OptimizerRecipe,
        ema: Option<f64>,
        device: &Device,
        group: &Arc<Group>,
    ) -> Result<Option<Resumed>> {
        durable::remove_leftovers(&self.folder)?;
        let mut problems: Vec<(u64, String)> = Vec::new();
        for step in self.steps()?.into_iter().rev() {
            match self.read(step, optimizer, ema, device, group) {
                Ok((model, updater, state)) => {
                    self.set_aside(&problems)?;
                    let notices = problems.into_iter().map(|(_, why)| {
                        format!("{why}; resuming from the checkpoint of step {step}")
                    });
                    return Ok(Some(Resumed { model, updater, state, notices: notices.collect() }));
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
        optimizer: &OptimizerRecipe,
        ema: Option<f64>,
        device: &Device,
        group: &Arc<Group>,
    ) -> Result<(Model, Updater, RunState)> {
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
        let mut reader = CheckpointReader::open(&folder.join(MODEL))?;
        let kept = ResidentParams::new(self.shard, group);
        let keeps = kept.of(reader.config());
        let mut model = Model::from_reader_where(&mut reader, device, &|id| keeps[id.0])?;
        self.training.freeze(model.params_mut());
        let mut updater = Updater::in_group(optimizer, ema, model.params(), device, group)?;
        optimizer_state::read(&folder.join(OPTIMIZER), &model, &mut updater)?;
        updater.restore_updates(state.updates);
        if kept.is_sharded() {
            updater.shard_weights(&mut model);
        }
        Ok((model, updater, state))
    }

    /// The model of a checkpoint that is whole, with the weights asked for.
    pub fn model(&self, step: u64, weights: Weights, device: &Device) -> Result<Model> {
        let mut model = Model::from_checkpoint(&self.path(step).join(MODEL), device)?;
        self.training.freeze(model.params_mut());
        if weights == Weights::Ema {
            optimizer_state::read_average(&self.path(step).join(OPTIMIZER), &mut model)?;
        }
        if self.training.rope_fade.is_some() {
            let state: RunState = files::read_json(&self.path(step).join(STATE))?;
            tuning::settle_rope(&mut model, self.training.rope_strength(state.tokens))?;
        }
        Ok(model)
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
            // A folder `step-*` must never be half removed.
            durable::remove_folder(&self.path(*step))?;
        }
        Ok(())
    }
}

/// The step of a finished checkpoint's folder.
fn step_of(path: &Path) -> Option<u64> {
    path.file_name()?.to_str()?.strip_prefix(PREFIX)?.parse().ok()
}
